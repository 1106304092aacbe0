//! Multimodal inputs of a request: tensors by name, and where they go in the prompt.

use super::codec::{
    DecodeError, DecodeProblem, DecodeResult, Map, Part, Reader, Source, Visible, Wire, Writer,
    read_items,
};
use super::tensor::TorchTensor;

wire_map! {
    /// The prompt positions of one input.
    pub struct PlaceholderRange {
        /// First position.
        offset: i64 [required];
        /// Number of positions.
        length: i64 [required];
        /// Which of the positions get an embedding; `None` for all.
        is_embed: Option<TorchTensor> [or None];
    }
}

/// Tensors in lists of any depth. Processors also leave numbers there.
#[derive(Debug, Clone, PartialEq)]
pub enum NestedTensors {
    /// One tensor.
    Tensor(Box<TorchTensor>),
    /// A number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A list.
    List(Vec<Self>),
}

impl Wire for NestedTensors {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.is_int() {
            return i64::read(reader).map(Self::Int);
        }
        if reader.is_float() {
            return f64::read(reader).map(Self::Float);
        }
        if reader.is_array_of(Reader::is_str) {
            return Box::read(reader).map(Self::Tensor);
        }
        reader.nested(|reader| read_items(reader, Self::read)).map(Self::List)
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Tensor(tensor) => tensor.write(writer),
            Self::Int(value) => value.write(writer),
            Self::Float(value) => value.write(writer),
            Self::List(items) => items.write(writer),
        }
    }
}

wire_array! {
    /// A Python slice: all three written, any may be nil.
    pub struct Slice {
        /// First index.
        start: Option<i64> [required];
        /// Past the last index.
        stop: Option<i64> [or None];
        /// Distance between two indices.
        step: Option<i64> [or None];
    }
}

/// Slices in lists of any depth.
#[derive(Debug, Clone, PartialEq)]
pub enum NestedSlices {
    /// One slice.
    Slice(Slice),
    /// A list.
    List(Vec<Self>),
}

impl Default for NestedSlices {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl Wire for NestedSlices {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.is_array_of(|reader| reader.is_int() || reader.is_nil()) {
            return Slice::read(reader).map(Self::Slice);
        }
        reader.nested(|reader| read_items(reader, Self::read)).map(Self::List)
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Slice(slice) => slice.write(writer),
            Self::List(items) => items.write(writer),
        }
    }
}

wire_map! {
    /// Arguments of [`MultiModalField::Batched`].
    pub struct BatchedField {
        /// Whether the tensors stay on the host.
        keep_on_cpu: bool [or false];
    }
}

wire_map! {
    /// Arguments of [`MultiModalField::Shared`].
    pub struct SharedField {
        /// Whether the tensors stay on the host.
        keep_on_cpu: bool [or false];
        /// Inputs that share the tensor.
        batch_size: i64 [required];
    }
}

wire_map! {
    /// Arguments of [`MultiModalField::Flat`].
    pub struct FlatField {
        /// Whether the tensors stay on the host.
        keep_on_cpu: bool [or false];
        /// The part of each input.
        slices: NestedSlices [required];
        /// Dimension that the slices cut.
        dim: i64 [or 0];
    }
}

/// How the tensors of several inputs make a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum MultiModalField {
    /// Along a new first dimension.
    Batched(BatchedField),
    /// One tensor for all.
    Shared(SharedField),
    /// One after the other.
    Flat(FlatField),
}

impl Default for MultiModalField {
    fn default() -> Self {
        Self::Batched(BatchedField::default())
    }
}

impl Wire for MultiModalField {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let mut elements = reader.elements("an array, [field name, arguments]")?;
        let name = reader.field(&mut elements, "name", Reader::str)?;
        let read: fn(&mut Reader<'_>) -> DecodeResult<Self> = match name {
            "batched" => |reader| BatchedField::read(reader).map(Self::Batched),
            "shared" => |reader| SharedField::read(reader).map(Self::Shared),
            "flat" => |reader| FlatField::read(reader).map(Self::Flat),
            _ => {
                let unknown = DecodeProblem::unknown_text("multimodal field", name);
                return Err(DecodeError::from(unknown).in_field("name"));
            }
        };
        let field = reader.field(&mut elements, "arguments", read)?;
        reader.skip_extra(&elements)?;
        Ok(field)
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(2);
        match self {
            Self::Batched(field) => {
                writer.str("batched");
                field.write(writer);
            }
            Self::Shared(field) => {
                writer.str("shared");
                field.write(writer);
            }
            Self::Flat(field) => {
                writer.str("flat");
                field.write(writer);
            }
        }
    }
}

wire_map! {
    /// One named part of an input.
    pub struct MultiModalFieldElem {
        /// Its tensors.
        data: Option<NestedTensors> [required];
        /// How they make a batch.
        field: MultiModalField [required];
    }
}

wire_map! {
    /// One multimodal input.
    pub struct MultiModalFeatureSpec {
        /// Its parts by name; `None` if the engine should have them cached.
        data: Option<Map<String, MultiModalFieldElem>> [required];
        /// Such as `image`.
        modality: String [required];
        /// Identity of the input, with everything that changes its embedding.
        identifier: String [required];
        /// Where it goes in the prompt.
        mm_position: PlaceholderRange [required];
        /// Hash of the raw input.
        mm_hash: Option<String> [or None];
    }
}

impl Visible for NestedTensors {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Tensor(tensor) => tensor.part(),
            Self::Int(value) => value.part(),
            Self::Float(value) => value.part(),
            Self::List(items) => items.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_int() {
            i64::from_source(source).map(Self::Int)
        } else if source.is_float() {
            source.float().map(Self::Float)
        } else if source.is_list() {
            Vec::from_source(source).map(Self::List)
        } else {
            Box::from_source(source).map(Self::Tensor)
        }
    }
}

impl Visible for NestedSlices {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Slice(slice) => slice.part(),
            Self::List(items) => items.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_list() {
            Vec::from_source(source).map(Self::List)
        } else {
            Slice::from_source(source).map(Self::Slice)
        }
    }
}

impl Visible for MultiModalField {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Batched(field) => field.part(),
            Self::Shared(field) => field.part(),
            Self::Flat(field) => field.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.field("slices")?.is_some() {
            FlatField::from_source(source).map(Self::Flat)
        } else if source.field("batch_size")?.is_some() {
            SharedField::from_source(source).map(Self::Shared)
        } else {
            BatchedField::from_source(source).map(Self::Batched)
        }
    }
}
