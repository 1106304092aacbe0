//! Arrays inside messages: numpy's and torch's spelling, inline or in a frame of their own.
//!
//! On the wire an array is `[dtype, shape, data]`, where data is extension 3 or the index of an
//! auxiliary frame. Decoded data refers to the frame it came in; nothing is copied.

mod dtype;

use bytes::Bytes;
use smallvec::SmallVec;
use thiserror::Error as ThisError;

use super::codec::{
    ArrayPart, DecodeProblem, DecodeResult, INLINE_BELOW_BYTES, Part, Reader, Source, Visible,
    Wire, Writer, check_extension, shortened,
};

pub use dtype::{NumpyDtype, TorchDtype, WireDtype};

/// Length in each dimension; empty for a scalar.
pub type Shape = SmallVec<[u64; 2]>;

/// More dimensions than numpy or torch have.
const MAX_DIMENSIONS: usize = 64;

/// An array whose data lies in a frame. Data is in C order.
#[derive(Debug, Clone, PartialEq)]
pub struct Array<D> {
    dtype: D,
    shape: Shape,
    data: Bytes,
}

/// A numpy array.
pub type NumpyArray = Array<NumpyDtype>;
/// A torch tensor.
pub type TorchTensor = Array<TorchDtype>;

impl<D: WireDtype + Default> Default for Array<D> {
    /// No elements in one dimension.
    fn default() -> Self {
        Self { dtype: D::default(), shape: SmallVec::from_slice(&[0]), data: Bytes::new() }
    }
}

/// Parts that make no array.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum ArrayError {
    /// A name that no array can have as its element type.
    #[error("element type {name:?} is not supported on the wire")]
    UnknownDtype {
        /// The name.
        name: String,
    },
    /// Data of another size than dtype and shape say.
    #[error("{dtype} array of shape {shape:?} has {found} bytes of data")]
    ShapeMismatch {
        /// Name of the element type.
        dtype: &'static str,
        /// The shape.
        shape: Vec<u64>,
        /// Bytes given.
        found: usize,
    },
}

impl<D: WireDtype> Array<D> {
    /// An array of the given bytes in C order.
    ///
    /// # Errors
    ///
    /// [`ArrayError::ShapeMismatch`] unless dtype and shape describe exactly `data`.
    pub fn new(dtype: D, shape: impl Into<Shape>, data: Bytes) -> Result<Self, ArrayError> {
        let shape = shape.into();
        if size_bytes(dtype, &shape) == Some(data.len() as u64) {
            return Ok(Self { dtype, shape, data });
        }
        let (dtype, shape, found) = (dtype.name(), shape.to_vec(), data.len());
        Err(ArrayError::ShapeMismatch { dtype, shape, found })
    }

    /// An array with the element type of this name.
    ///
    /// # Errors
    ///
    /// [`ArrayError`] if the name is unknown or the data has another size.
    pub fn named(dtype: &str, shape: impl Into<Shape>, data: Bytes) -> Result<Self, ArrayError> {
        let unknown = || ArrayError::UnknownDtype { name: dtype.to_owned() };
        Self::new(D::from_name(dtype).ok_or_else(unknown)?, shape, data)
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> D {
        self.dtype
    }

    /// Length in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The array as data.
    #[must_use]
    pub fn as_part(&self) -> ArrayPart<'_> {
        ArrayPart { dtype: self.dtype.name(), shape: &self.shape, data: &self.data }
    }

    /// The bytes in C order.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }
}

fn size_bytes<D: WireDtype>(dtype: D, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(dtype.size_bytes(), |size, length| size.checked_mul(*length))
}

/// An array that is checked, by where its data lies.
#[derive(Debug, Clone, PartialEq)]
pub struct ArraySpan<D> {
    /// The element type.
    pub dtype: D,
    /// Length in each dimension.
    pub shape: Shape,
    /// Index of the frame that holds the data.
    pub frame: usize,
    /// First byte of the data in the frame.
    pub start: usize,
    /// Past the last byte.
    pub end: usize,
}

impl<D: WireDtype> ArraySpan<D> {
    pub(crate) fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let mut elements = reader.elements("an array, [dtype, shape, data]")?;
        let dtype = reader.field(&mut elements, "dtype", read_dtype)?;
        let shape = reader.field(&mut elements, "shape", read_shape)?;
        let (frame, start, end) = reader.field(&mut elements, "data", read_data)?;
        reader.skip_extra(&elements)?;
        let span = Self { dtype, shape, frame, start, end };
        match size_bytes(dtype, &span.shape) {
            Some(size) if size == (end - start) as u64 => Ok(span),
            _ => Err(span.mismatch()),
        }
    }

    /// Writes the array that lies in these frames.
    pub(crate) fn write(&self, writer: &mut Writer, frames: &[Bytes]) {
        match frames.get(self.frame).and_then(|frame| frame.get(self.start..self.end)) {
            Some(data) if is_inline(self.dtype, &self.shape, data.len()) => {
                write_head(writer, self.dtype, &self.shape);
                writer.raw_view(data);
            }
            _ => match self.resolve(frames) {
                Some(array) => array.write(writer),
                None => writer.nil(),
            },
        }
    }

    #[cold]
    fn mismatch(&self) -> super::DecodeError {
        DecodeProblem::ShapeMismatch {
            dtype: self.dtype.name().to_owned(),
            shape: format!("{:?}", self.shape.as_slice()),
            found: self.end - self.start,
        }
        .into()
    }

    /// The array, given the frames that it was read from.
    #[must_use]
    pub fn resolve(&self, frames: &[Bytes]) -> Option<Array<D>> {
        let frame = frames.get(self.frame)?;
        if self.end > frame.len() {
            return None;
        }
        let data = frame.slice(self.start..self.end);
        Some(Array { dtype: self.dtype, shape: self.shape.clone(), data })
    }
}

fn read_dtype<D: WireDtype>(reader: &mut Reader<'_>) -> DecodeResult<D> {
    let packed = reader.peek_bytes(4).and_then(|bytes| bytes.first_chunk::<4>());
    if let Some(dtype) = packed.and_then(|packed| D::from_packed(*packed)) {
        reader.advance(4);
        return Ok(dtype);
    }
    let name = reader.str()?;
    D::from_name(name).ok_or_else(|| DecodeProblem::UnknownDtype { name: shortened(name) }.into())
}

fn read_shape(reader: &mut Reader<'_>) -> DecodeResult<Shape> {
    let len = reader.array_len("an array of lengths")?;
    if len > MAX_DIMENSIONS {
        return Err(DecodeProblem::Invalid { rule: "an array has at most 64 dimensions" }.into());
    }
    let mut shape = Shape::with_capacity(len);
    for index in 0..len {
        let length = match reader.take_fixint() {
            Some(length) => u64::from(length),
            None => u64::read(reader).map_err(|error| error.at_index(index))?,
        };
        shape.push(length);
    }
    Ok(shape)
}

fn read_data(reader: &mut Reader<'_>) -> DecodeResult<(usize, usize, usize)> {
    if let Some((start, end)) = reader.take_short_raw_view() {
        return Ok((0, start, end));
    }
    if reader.is_int() {
        let index = reader.int()?;
        let data = reader.aux_frame(index)?;
        return Ok((usize::try_from(index).unwrap_or(0), 0, data.len()));
    }
    if reader.is_map() {
        return Err(DecodeProblem::OutOfBandTensor.into());
    }
    let (code, start, end) = reader.ext()?;
    check_extension(code)?;
    Ok((0, start, end))
}

impl<D: WireDtype> Wire for Array<D> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let span = ArraySpan::read(reader)?;
        span.resolve(reader.frames()).ok_or_else(|| span.mismatch())
    }

    fn write(&self, writer: &mut Writer) {
        write_array(writer, self.dtype, &self.shape, self.data.clone());
    }
}

/// Writes an array: inline if it is small, else as an auxiliary frame.
pub(crate) fn write_array<D: WireDtype>(writer: &mut Writer, dtype: D, shape: &[u64], data: Bytes) {
    write_head(writer, dtype, shape);
    if is_inline(dtype, shape, data.len()) {
        writer.raw_view(&data);
    } else {
        writer.aux_frame(data);
    }
}

fn write_head<D: WireDtype>(writer: &mut Writer, dtype: D, shape: &[u64]) {
    writer.array_len(3);
    writer.str(dtype.name());
    writer.array_len(shape.len());
    shape.iter().for_each(|length| writer.u64(*length));
}

/// Whether data lies in the first frame: it is small, or a scalar of numpy.
fn is_inline<D: WireDtype>(_dtype: D, shape: &[u64], num_bytes: usize) -> bool {
    num_bytes < INLINE_BELOW_BYTES || (!D::IS_TORCH && shape.is_empty())
}

impl<D: WireDtype> Visible for Array<D> {
    fn part(&self) -> Part<'_> {
        if D::IS_TORCH { Part::Torch(self.as_part()) } else { Part::Numpy(self.as_part()) }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        let (dtype, shape, data) = source.array(D::IS_TORCH)?;
        let len = data.len();
        Self::named(&dtype, shape, data).map_err(|error| match error {
            ArrayError::UnknownDtype { name } => DecodeProblem::UnknownDtype { name }.into(),
            ArrayError::ShapeMismatch { shape, .. } => {
                DecodeProblem::ShapeMismatch { dtype, shape: format!("{shape:?}"), found: len }
                    .into()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_data_of_another_size_than_the_shape() {
        let shape: Shape = [2, 3].as_slice().into();
        let error = TorchTensor::named("float32", shape, Bytes::from_static(&[0; 23])).unwrap_err();
        let dtype = "float32";
        assert_eq!(error, ArrayError::ShapeMismatch { dtype, shape: vec![2, 3], found: 23 });
    }

    #[test]
    fn rejects_a_shape_whose_size_overflows() {
        let shape: Shape = [u64::MAX, 2].as_slice().into();
        assert!(NumpyArray::new(NumpyDtype::INT32, shape, Bytes::new()).is_err());
    }

    #[test]
    fn rejects_an_unknown_element_type() {
        let error = TorchTensor::named("float7", Shape::new(), Bytes::new()).unwrap_err();
        assert_eq!(error, ArrayError::UnknownDtype { name: "float7".to_owned() });
    }
}
