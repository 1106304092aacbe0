//! A layer's blocks as a strided tensor, and what follows from it alone.
//!
//! A [`Layout`] is a logical shape with named dims, a stride order and the dim that counts blocks.
//! The stride order has vLLM's meaning (`get_kv_cache_stride_order`): physical dim `i`, counted
//! from the outermost, is logical dim `stride_order[i]`. Then
//!
//! - segments = product of the sizes of the dims physically outside the block dim;
//! - bytes per block and segment = product of the sizes of the dims inside it × element size;
//! - block `b` of segment `s` begins at byte `(s * capacity + b) * bytes_per_block_per_segment`.
//!
//! A layout knows no number of blocks; [`Layout::at`] gives it one and makes it a
//! [`SizedLayout`] with shape, strides and byte ranges.

mod cache_order;
mod sized;
mod standard;
mod strides;

use std::borrow::Cow;

pub(crate) use cache_order::LAYER_DIM;
pub use cache_order::{CacheOrder, UnknownCacheOrder};
pub(crate) use sized::check_growth;
pub use sized::{SizedLayout, TensorView};

use super::checked::{mul, product};
use super::error::LayoutError;
use super::spec::NumBlocks;
use crate::dtype::Dtype;
use crate::units::Bytes;

/// One dim of a logical shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Dim {
    /// What it counts: `kv`, `blocks`, `tokens`, `heads`, ….
    pub name: Cow<'static, str>,
    /// Its size; of the block dim any non-zero number, which is not used.
    pub size: u64,
}

impl Dim {
    /// Names a dim.
    #[must_use]
    pub fn new(name: impl Into<Cow<'static, str>>, size: u64) -> Self {
        Self { name: name.into(), size }
    }

    /// The dim that counts blocks.
    #[must_use]
    pub fn blocks() -> Self {
        Self::new("blocks", 1)
    }
}

/// The most segments of one layout; LHBNC with 128 layers of 128 heads has 16,384.
pub const MAX_SEGMENTS: u64 = 1 << 16;

/// Where the elements of every block lie, for any number of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    dims: Vec<Dim>,
    stride_order: Vec<usize>,
    block_dim: usize,
    dtype: Dtype,
    num_segments: u64,
    unpadded_bytes: u64,
    bytes_per_block_per_segment: u64,
}

impl Layout {
    /// Lays a logical shape out in `stride_order`.
    ///
    /// # Errors
    /// [`LayoutError::BlockDimOutOfRange`], [`LayoutError::ZeroDim`], a `StrideOrder…` error if
    /// the order is no permutation of the dims, [`LayoutError::TooManySegments`],
    /// [`LayoutError::Overflow`].
    pub fn new(
        mut dims: Vec<Dim>,
        stride_order: Vec<usize>,
        block_dim: usize,
        dtype: Dtype,
    ) -> Result<Self, LayoutError> {
        check_dims(&dims, block_dim)?;
        check_permutation(&stride_order, dims.len())?;
        if let Some(dim) = dims.get_mut(block_dim) {
            dim.size = 1;
        }
        let sizes = stride_order.iter().filter_map(|&i| dims.get(i)).map(|dim| dim.size);
        let place = stride_order.iter().take_while(|&&i| i != block_dim).count();
        let num_segments = product("number of segments", sizes.clone().take(place))?;
        if num_segments > MAX_SEGMENTS {
            let limit = MAX_SEGMENTS;
            return Err(LayoutError::TooManySegments { num_segments, limit });
        }
        let elements = product("elements per block", sizes.skip(place))?;
        let unpadded_bytes = mul("bytes per block", elements, dtype.size_bytes())?;
        mul("bytes per block", num_segments, unpadded_bytes)?;
        Ok(Self {
            dims,
            stride_order,
            block_dim,
            dtype,
            num_segments,
            unpadded_bytes,
            bytes_per_block_per_segment: unpadded_bytes,
        })
    }

    /// Lays a logical shape out as it is written (row-major).
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn contiguous(dims: Vec<Dim>, block_dim: usize, dtype: Dtype) -> Result<Self, LayoutError> {
        let stride_order = (0..dims.len()).collect();
        Self::new(dims, stride_order, block_dim, dtype)
    }

    /// The same logical shape in another physical order, without padding.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn with_stride_order(self, stride_order: Vec<usize>) -> Result<Self, LayoutError> {
        Self::new(self.dims, stride_order, self.block_dim, self.dtype)
    }

    /// Pads each segment's block to `bytes`, so that the next block begins that much later.
    ///
    /// # Errors
    /// [`LayoutError::BlockTooSmall`], [`LayoutError::BlockMisaligned`],
    /// [`LayoutError::Overflow`].
    pub fn padded_to(mut self, bytes: u64) -> Result<Self, LayoutError> {
        if bytes < self.unpadded_bytes {
            return Err(LayoutError::BlockTooSmall {
                bytes: Bytes(bytes),
                needed: Bytes(self.unpadded_bytes),
                num_speculative_tokens: 0,
            });
        }
        let alignment = self.dtype.size_bytes();
        if !bytes.is_multiple_of(alignment) {
            let (bytes, alignment) = (Bytes(bytes), Bytes(alignment));
            return Err(LayoutError::BlockMisaligned { bytes, alignment });
        }
        mul("bytes per block", self.num_segments, bytes)?;
        self.bytes_per_block_per_segment = bytes;
        Ok(self)
    }

    /// The logical dims; the block dim has size 1.
    #[must_use]
    pub fn dims(&self) -> &[Dim] {
        &self.dims
    }

    /// Logical dims from the outermost in memory to the innermost.
    #[must_use]
    pub fn stride_order(&self) -> &[usize] {
        &self.stride_order
    }

    /// The index of the dim that counts blocks.
    #[must_use]
    pub fn block_dim(&self) -> usize {
        self.block_dim
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Separate runs of memory that each hold a part of every block.
    #[must_use]
    pub fn num_segments(&self) -> u64 {
        self.num_segments
    }

    /// Bytes of a block in one segment, padding included.
    #[must_use]
    pub fn bytes_per_block_per_segment(&self) -> u64 {
        self.bytes_per_block_per_segment
    }

    /// Bytes of a block in all segments.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        // Cannot overflow: checked when the layout was made.
        self.num_segments.saturating_mul(self.bytes_per_block_per_segment)
    }

    /// Bytes of a block in all segments that elements use.
    #[must_use]
    pub fn unpadded_bytes_per_block(&self) -> u64 {
        self.num_segments.saturating_mul(self.unpadded_bytes)
    }

    /// Gives the layout a number of blocks.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`] for no blocks, [`LayoutError::Overflow`] for more bytes than a
    /// tensor can have (2^63).
    pub fn at(&self, capacity: NumBlocks) -> Result<SizedLayout, LayoutError> {
        SizedLayout::new(self, capacity)
    }
}

fn check_dims(dims: &[Dim], block_dim: usize) -> Result<(), LayoutError> {
    if block_dim >= dims.len() {
        return Err(LayoutError::BlockDimOutOfRange { block_dim, num_dims: dims.len() });
    }
    match dims.iter().find(|dim| dim.size == 0) {
        Some(dim) => Err(LayoutError::ZeroDim { dim: dim.name.to_string() }),
        None => Ok(()),
    }
}

fn check_permutation(stride_order: &[usize], num_dims: usize) -> Result<(), LayoutError> {
    if stride_order.len() != num_dims {
        let found = stride_order.len();
        return Err(LayoutError::StrideOrderLength { expected: num_dims, found });
    }
    let mut seen = vec![false; num_dims];
    for &entry in stride_order {
        match seen.get_mut(entry) {
            None => return Err(LayoutError::StrideOrderEntry { entry, num_dims }),
            Some(true) => return Err(LayoutError::StrideOrderRepeats { dim: entry }),
            Some(slot) => *slot = true,
        }
    }
    Ok(())
}
