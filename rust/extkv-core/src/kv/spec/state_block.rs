//! Several state tensors in one block, and where each lies.

use crate::dtype::Dtype;
use crate::kv::checked::{add, mul, product, round_up};
use crate::kv::error::LayoutError;
use crate::units::Bytes;

/// One state of a recurrent layer, for one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateSpec {
    name: String,
    shape: Vec<u64>,
    dtype: Dtype,
    speculative_dim: Option<usize>,
}

impl StateSpec {
    /// Describes a state by its shape without speculation, for example the convolution's
    /// `[channels, kernel - 1]`.
    ///
    /// # Errors
    /// [`LayoutError::ZeroDim`] for a dim of 0.
    pub fn new(
        name: impl Into<String>,
        shape: impl Into<Vec<u64>>,
        dtype: Dtype,
    ) -> Result<Self, LayoutError> {
        let (name, shape) = (name.into(), shape.into());
        if let Some(dim) = shape.iter().position(|&size| size == 0) {
            return Err(LayoutError::ZeroDim { dim: format!("{name}[{dim}]") });
        }
        Ok(Self { name, shape, dtype, speculative_dim: None })
    }

    /// Makes dim `dim` one longer for each speculated token, so that a rejected token can be
    /// rolled back (the convolution's window; a leading dim of copies).
    ///
    /// # Errors
    /// [`LayoutError::SpeculativeDim`] if there is no such dim.
    pub fn widened_along(mut self, dim: usize) -> Result<Self, LayoutError> {
        let num_dims = self.shape.len();
        if dim >= num_dims {
            return Err(LayoutError::SpeculativeDim { state: self.name, dim, num_dims });
        }
        self.speculative_dim = Some(dim);
        Ok(self)
    }

    /// The shape with room for `num_speculative_tokens`.
    ///
    /// # Errors
    /// [`LayoutError::Overflow`].
    pub fn shape_with(&self, num_speculative_tokens: u64) -> Result<Vec<u64>, LayoutError> {
        let mut shape = self.shape.clone();
        if let Some(size) = self.speculative_dim.and_then(|dim| shape.get_mut(dim)) {
            *size = add("speculative dim of a state", *size, num_speculative_tokens)?;
        }
        Ok(shape)
    }
}

/// One state tensor inside a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateTensor {
    /// The state's name.
    pub name: String,
    /// Where it begins, from the start of the block.
    pub offset_bytes: u64,
    /// Its shape in one block.
    pub shape: Vec<u64>,
    /// Its element type.
    pub dtype: Dtype,
}

impl StateTensor {
    fn end_bytes(&self) -> Result<u64, LayoutError> {
        let what = "bytes of a state";
        let elements = product(what, self.shape.iter().copied())?;
        add(what, self.offset_bytes, mul(what, elements, self.dtype.size_bytes())?)
    }
}

/// Where the states lie in a block.
///
/// Element `i` (row-major) of state `s` in block `b` is at byte
/// `b * bytes_per_block + s.offset_bytes + i * s.dtype.size_bytes()`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateBlock {
    tensors: Vec<StateTensor>,
    bytes_per_block: u64,
}

impl StateBlock {
    /// Packs states one after another, each at the next multiple of its element size, and rounds
    /// the block up to the largest element.
    ///
    /// # Errors
    /// [`LayoutError::NoStates`], [`LayoutError::Overflow`].
    pub fn pack(states: &[StateSpec], num_speculative_tokens: u64) -> Result<Self, LayoutError> {
        let what = "bytes per block of a recurrent layer";
        let mut tensors = Vec::with_capacity(states.len());
        let mut end = 0;
        for state in states {
            let offset_bytes = round_up(what, end, state.dtype.size_bytes())?;
            let shape = state.shape_with(num_speculative_tokens)?;
            let (name, dtype) = (state.name.clone(), state.dtype);
            let tensor = StateTensor { name, offset_bytes, shape, dtype };
            end = tensor.end_bytes()?;
            tensors.push(tensor);
        }
        let bytes = round_up(what, end, alignment_bytes(&tensors))?;
        Self::from_offsets(tensors, bytes)
    }

    /// Takes states at the offsets that a layer reports.
    ///
    /// # Errors
    /// [`LayoutError::NoStates`]; [`LayoutError::StateMisaligned`] and
    /// [`LayoutError::BlockMisaligned`] where an element would not be at a multiple of its size in
    /// every block; [`LayoutError::StateOutsideBlock`]; [`LayoutError::StatesOverlap`];
    /// [`LayoutError::ZeroDim`]; [`LayoutError::Overflow`].
    pub fn from_offsets(
        tensors: Vec<StateTensor>,
        bytes_per_block: u64,
    ) -> Result<Self, LayoutError> {
        if tensors.is_empty() {
            return Err(LayoutError::NoStates);
        }
        for tensor in &tensors {
            check_inside(tensor, bytes_per_block)?;
        }
        let alignment = alignment_bytes(&tensors);
        if !bytes_per_block.is_multiple_of(alignment) {
            let (bytes, alignment) = (Bytes(bytes_per_block), Bytes(alignment));
            return Err(LayoutError::BlockMisaligned { bytes, alignment });
        }
        let mut by_offset: Vec<&StateTensor> = tensors.iter().collect();
        by_offset.sort_by_key(|tensor| tensor.offset_bytes);
        for pair in by_offset.windows(2) {
            if let [first, second] = pair
                && first.end_bytes()? > second.offset_bytes
            {
                let (first, second) = (first.name.clone(), second.name.clone());
                return Err(LayoutError::StatesOverlap { first, second });
            }
        }
        Ok(Self { tensors, bytes_per_block })
    }

    /// The same states in a block of `bytes`.
    ///
    /// # Errors
    /// As [`StateBlock::from_offsets`].
    pub fn padded_to(self, bytes: u64) -> Result<Self, LayoutError> {
        Self::from_offsets(self.tensors, bytes)
    }

    /// The states in the order they were given.
    #[must_use]
    pub fn tensors(&self) -> &[StateTensor] {
        &self.tensors
    }

    /// The largest element size; a block starts at a multiple of it.
    #[must_use]
    pub fn alignment_bytes(&self) -> u64 {
        alignment_bytes(&self.tensors)
    }

    /// Bytes from one block to the next, padding included.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_block
    }
}

fn alignment_bytes(tensors: &[StateTensor]) -> u64 {
    // Element sizes are powers of two, so the largest is a multiple of the others.
    tensors.iter().map(|tensor| tensor.dtype.size_bytes()).max().unwrap_or(1)
}

fn check_inside(tensor: &StateTensor, bytes_per_block: u64) -> Result<(), LayoutError> {
    let state = tensor.name.clone();
    if let Some(dim) = tensor.shape.iter().position(|&size| size == 0) {
        return Err(LayoutError::ZeroDim { dim: format!("{state}[{dim}]") });
    }
    if !tensor.offset_bytes.is_multiple_of(tensor.dtype.size_bytes()) {
        let (offset, dtype) = (tensor.offset_bytes, tensor.dtype);
        return Err(LayoutError::StateMisaligned { state, offset, dtype });
    }
    let end = tensor.end_bytes()?;
    if end > bytes_per_block {
        return Err(LayoutError::StateOutsideBlock { state, end, bytes_per_block });
    }
    Ok(())
}
