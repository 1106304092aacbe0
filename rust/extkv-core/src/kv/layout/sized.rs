//! A layout with a number of blocks: torch shape and strides, and byte ranges of blocks.

use std::ops::Range;

use super::Layout;
use crate::dtype::Dtype;
use crate::kv::checked::{mul, non_zero};
use crate::kv::error::LayoutError;
use crate::kv::spec::{BlockId, NumBlocks};

/// A tensor over a buffer: what `torch.as_strided` needs, but for the offset in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorView {
    /// The state it holds; `None` for tensors of attention.
    pub name: Option<String>,
    /// First byte, from the start of the buffer.
    pub offset_bytes: u64,
    /// The element type.
    pub dtype: Dtype,
    /// The logical shape, block dim at its full capacity.
    pub shape: Vec<u64>,
    /// Elements between neighbours along each logical dim.
    pub strides: Vec<u64>,
}

/// A [`Layout`] for `capacity` blocks.
///
/// The element at logical index `i` is at byte `sum(i[d] * strides[d]) * dtype.size_bytes()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizedLayout {
    layout: Layout,
    capacity: NumBlocks,
    segment_capacity_bytes: u64,
    capacity_bytes: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl SizedLayout {
    pub(super) fn new(layout: &Layout, capacity: NumBlocks) -> Result<Self, LayoutError> {
        let what = "bytes of a layout";
        non_zero("number of blocks", capacity.0)?;
        let segment_capacity_bytes = mul(what, layout.bytes_per_block_per_segment(), capacity.0)?;
        let capacity_bytes = mul(what, segment_capacity_bytes, layout.num_segments())?;
        i64::try_from(capacity_bytes).map_err(|_| LayoutError::Overflow { what })?;
        let shape = (layout.dims().iter().enumerate())
            .map(|(i, dim)| if i == layout.block_dim() { capacity.0 } else { dim.size })
            .collect();
        let strides = strides(layout, capacity)?;
        let layout = layout.clone();
        Ok(Self { layout, capacity, segment_capacity_bytes, capacity_bytes, shape, strides })
    }

    /// The layout without its number of blocks.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The number of blocks.
    #[must_use]
    pub fn capacity(&self) -> NumBlocks {
        self.capacity
    }

    /// The logical shape.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Elements between neighbours along each logical dim.
    #[must_use]
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// Bytes of all segments.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes from one segment to the next: `capacity * bytes_per_block_per_segment`.
    #[must_use]
    pub fn segment_capacity_bytes(&self) -> u64 {
        self.segment_capacity_bytes
    }

    /// The byte of the element at a logical index.
    ///
    /// # Errors
    /// [`LayoutError::IndexOutOfRange`].
    pub fn byte_offset(&self, index: &[u64]) -> Result<u64, LayoutError> {
        let inside = index.len() == self.shape.len()
            && index.iter().zip(&self.shape).all(|(i, size)| i < size);
        if !inside {
            let (index, shape) = (index.to_vec(), self.shape.clone());
            return Err(LayoutError::IndexOutOfRange { index, shape });
        }
        // Cannot overflow: the last element is inside `capacity_bytes`.
        let elements: u64 = index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum();
        Ok(elements * self.layout.dtype().size_bytes())
    }

    /// The bytes of one block: one range per segment, in ascending order.
    ///
    /// # Errors
    /// [`LayoutError::BlockOutOfRange`].
    pub fn block_ranges(&self, block: BlockId) -> Result<Vec<Range<u64>>, LayoutError> {
        if block.0 >= self.capacity.0 {
            return Err(LayoutError::BlockOutOfRange { block, capacity: self.capacity });
        }
        Ok(self.ranges(block.0, block.0 + 1))
    }

    /// The bytes of blocks `0..num_blocks`: the committed prefix of each segment.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`].
    pub fn committed_ranges(&self, num_blocks: NumBlocks) -> Result<Vec<Range<u64>>, LayoutError> {
        self.grown_ranges(NumBlocks(0), num_blocks)
    }

    /// The bytes of blocks `from..to`: what growing adds to each segment.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`], [`LayoutError::NotGrowing`].
    pub fn grown_ranges(
        &self,
        from: NumBlocks,
        to: NumBlocks,
    ) -> Result<Vec<Range<u64>>, LayoutError> {
        check_growth(from, to, self.capacity)?;
        Ok(self.ranges(from.0, to.0))
    }

    fn ranges(&self, from: u64, to: u64) -> Vec<Range<u64>> {
        let block = self.layout.bytes_per_block_per_segment();
        (0..self.layout.num_segments())
            .map(|segment| segment * self.segment_capacity_bytes)
            .map(|start| start + from * block..start + to * block)
            .collect()
    }

    /// The whole tensor, `offset_bytes` into a buffer.
    #[must_use]
    pub fn view(&self, offset_bytes: u64) -> TensorView {
        TensorView {
            name: None,
            offset_bytes,
            dtype: self.layout.dtype(),
            shape: self.shape.clone(),
            strides: self.strides.clone(),
        }
    }

    /// Entry `index` of dim `dim`, without that dim: one layer of a whole-cache tensor.
    ///
    /// # Errors
    /// [`LayoutError::IndexOutOfRange`].
    pub fn select(&self, dim: usize, index: u64) -> Result<TensorView, LayoutError> {
        let mut at = vec![0; self.shape.len()];
        match at.get_mut(dim) {
            Some(entry) => *entry = index,
            None => at.push(index),
        }
        let mut view = self.view(self.byte_offset(&at)?);
        view.shape.remove(dim);
        view.strides.remove(dim);
        Ok(view)
    }
}

/// Refuses growth that shrinks or goes past the capacity.
pub(crate) fn check_growth(
    from: NumBlocks,
    to: NumBlocks,
    capacity: NumBlocks,
) -> Result<(), LayoutError> {
    if to > capacity {
        return Err(LayoutError::TooManyBlocks { requested: to, capacity });
    }
    if from > to {
        return Err(LayoutError::NotGrowing { from, to });
    }
    Ok(())
}

/// Walks the dims from the innermost outwards; the block dim steps by the padded block.
fn strides(layout: &Layout, capacity: NumBlocks) -> Result<Vec<u64>, LayoutError> {
    let what = "stride of a layout";
    let mut strides = vec![0; layout.dims().len()];
    let mut step = 1;
    for &i in layout.stride_order().iter().rev() {
        let is_block = i == layout.block_dim();
        if is_block {
            step = layout.bytes_per_block_per_segment() / layout.dtype().size_bytes();
        }
        if let Some(stride) = strides.get_mut(i) {
            *stride = step;
        }
        let size = layout.dims().get(i).map_or(1, |dim| dim.size);
        step = mul(what, step, if is_block { capacity.0 } else { size })?;
    }
    Ok(strides)
}
