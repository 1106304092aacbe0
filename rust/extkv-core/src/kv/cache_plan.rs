//! From a list of layers to the buffers that memory reserves and the tensors that layers see.
//!
//! Every buffer is a list of segments; the committed prefix of each segment covers the same number
//! of blocks, in all buffers, always. All offsets are from the start of their buffer.

mod buffer;
mod error;
mod form;
mod layer;
mod placement;
mod request_need;

pub use error::PlanError;
pub use layer::{Layer, LayerLayout, Shared};
pub use placement::{Placement, segments_of_placements};

use self::buffer::{Home, Homes};
use self::form::Form;
use self::request_need::{block_size, request_need};
use super::checked::{add, mul, non_zero};
use super::error::LayoutError;
use super::layout::{TensorView, check_growth};
use super::sizing::CacheFacts;
use super::spec::{BlockId, NumBlocks, RequestShape};

/// How much a cache may ever hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// This many blocks.
    Blocks(NumBlocks),
    /// As many whole blocks as fit these bytes.
    Bytes(u64),
}

impl Capacity {
    fn blocks(self, bytes_per_block: u64) -> Result<NumBlocks, PlanError> {
        match self {
            Self::Blocks(blocks) => Ok(NumBlocks(non_zero("max_blocks", blocks.0)?)),
            Self::Bytes(max_bytes) => match max_bytes / bytes_per_block {
                0 => Err(PlanError::BudgetTooSmall { max_bytes, bytes_per_block }),
                blocks => Ok(NumBlocks(blocks)),
            },
        }
    }
}

/// A run of memory whose committed prefix grows block by block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentPlan {
    /// Where it begins.
    pub offset_bytes: u64,
    /// Bytes of all blocks that it can hold.
    pub capacity_bytes: u64,
    /// Bytes that one block adds.
    pub bytes_per_block: u64,
}

/// One reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferPlan {
    /// The layers in it, sharers included, in plan order.
    pub layers: Vec<String>,
    /// Its segments, back to back from offset 0.
    pub segments: Vec<SegmentPlan>,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
}

/// What one layer sees: tensors over the full capacity of a buffer.
///
/// Bytes of blocks past the committed prefix must not be touched, not even by a masked read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerView {
    /// The layer.
    pub name: String,
    /// Index of its buffer.
    pub buffer: usize,
    /// One tensor, or one per part or state.
    pub tensors: Vec<TensorView>,
}

/// Bytes of one segment, as a connector registers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Index of the buffer.
    pub buffer: usize,
    /// Index of the segment in it.
    pub segment: usize,
    /// First byte.
    pub offset_bytes: u64,
    /// Number of bytes.
    pub length_bytes: u64,
}

/// The buffers and tensors of a whole cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachePlan {
    layers: Vec<Layer>,
    homes: Homes,
    buffers: Vec<BufferPlan>,
    views: Vec<LayerView>,
    max_blocks: NumBlocks,
    bytes_per_block: u64,
    capacity_bytes: u64,
}

impl CachePlan {
    /// Plans a cache. Layers without sharing get a buffer each, in order; stacked layers of equal
    /// order and block shape get one together.
    ///
    /// # Errors
    /// Every [`PlanError`]; see its variants for the conditions.
    pub fn new(layers: Vec<Layer>, capacity: Capacity) -> Result<Self, PlanError> {
        let homes = Homes::new(&layers)?;
        let bytes_per_block = homes.buffers.iter().try_fold(0, |sum, buffer| {
            add("bytes per block of a cache", sum, buffer.bytes_per_block()?)
        })?;
        let max_blocks = capacity.blocks(bytes_per_block)?;
        let buffers = homes.buffers.iter().map(|buffer| buffer.plan(&layers, max_blocks));
        Ok(Self {
            buffers: buffers.collect::<Result<_, _>>()?,
            views: views(&layers, &homes, max_blocks)?,
            layers,
            homes,
            max_blocks,
            bytes_per_block,
            capacity_bytes: mul("bytes of a cache", bytes_per_block, max_blocks.0)?,
        })
    }

    /// The reservations to make.
    #[must_use]
    pub fn buffers(&self) -> &[BufferPlan] {
        &self.buffers
    }

    /// The tensors of every layer, in the order the layers were given.
    #[must_use]
    pub fn layers(&self) -> &[LayerView] {
        &self.views
    }

    /// The tensors of one layer.
    #[must_use]
    pub fn layer(&self, name: &str) -> Option<&LayerView> {
        self.views.iter().find(|view| view.name == name)
    }

    /// The most blocks that can be committed.
    #[must_use]
    pub fn max_blocks(&self) -> NumBlocks {
        self.max_blocks
    }

    /// Bytes that one block takes in all buffers.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_block
    }

    /// Segments of all buffers.
    #[must_use]
    pub fn num_segments(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.segments.len()).sum()
    }

    /// Bytes of address space that the buffers need.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Logical bytes of `num_blocks` blocks.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`], [`LayoutError::Overflow`].
    pub fn committed_bytes(&self, num_blocks: NumBlocks) -> Result<u64, LayoutError> {
        check_growth(NumBlocks(0), num_blocks, self.max_blocks)?;
        mul("committed bytes", self.bytes_per_block, num_blocks.0)
    }

    /// Physical bytes of `num_blocks` blocks where memory is mapped in granules, each buffer
    /// begins at one, and a granule that two segments touch is mapped once.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`], [`LayoutError::ZeroSize`] for a granule of 0,
    /// [`LayoutError::Overflow`].
    pub fn physical_bytes(
        &self,
        num_blocks: NumBlocks,
        granule_bytes: u64,
    ) -> Result<u64, LayoutError> {
        check_growth(NumBlocks(0), num_blocks, self.max_blocks)?;
        non_zero("granule_bytes", granule_bytes)?;
        let mut granules: u64 = 0;
        for buffer in self.buffers.iter().filter(|_| num_blocks.0 > 0) {
            let mut mapped = 0;
            for segment in &buffer.segments {
                let length = segment.bytes_per_block * num_blocks.0;
                let first = (segment.offset_bytes / granule_bytes).max(mapped);
                let end = (segment.offset_bytes + length).div_ceil(granule_bytes);
                granules = granules.saturating_add(end.saturating_sub(first));
                mapped = end.max(mapped);
            }
        }
        mul("physical bytes", granules, granule_bytes)
    }

    /// The committed bytes of every segment at `num_blocks` blocks.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`].
    pub fn regions(&self, num_blocks: NumBlocks) -> Result<Vec<Region>, LayoutError> {
        self.grown_regions(NumBlocks(0), num_blocks)
    }

    /// The bytes that growing from `from` to `to` blocks adds to every segment: what to zero.
    ///
    /// # Errors
    /// [`LayoutError::TooManyBlocks`], [`LayoutError::NotGrowing`].
    pub fn grown_regions(
        &self,
        from: NumBlocks,
        to: NumBlocks,
    ) -> Result<Vec<Region>, LayoutError> {
        check_growth(from, to, self.max_blocks)?;
        let mut regions = Vec::with_capacity(self.num_segments());
        for (buffer, plan) in self.buffers.iter().enumerate() {
            for (segment, part) in plan.segments.iter().enumerate() {
                let offset_bytes = part.offset_bytes + from.0 * part.bytes_per_block;
                let length_bytes = (to.0 - from.0) * part.bytes_per_block;
                regions.push(Region { buffer, segment, offset_bytes, length_bytes });
            }
        }
        Ok(regions)
    }

    /// The bytes of one block in every segment.
    ///
    /// # Errors
    /// [`LayoutError::BlockOutOfRange`].
    pub fn block_regions(&self, block: BlockId) -> Result<Vec<Region>, LayoutError> {
        if block.0 >= self.max_blocks.0 {
            return Err(LayoutError::BlockOutOfRange { block, capacity: self.max_blocks });
        }
        self.grown_regions(NumBlocks(block.0), NumBlocks(block.0 + 1))
    }

    /// What sizing needs to know of this cache.
    ///
    /// # Errors
    /// [`PlanError::MixedBlockSizes`] where layers that hold tokens differ in `block_size`.
    pub fn facts(&self, request: &RequestShape) -> Result<CacheFacts, PlanError> {
        let block_size = block_size(&self.layers)?;
        let need = request_need(&self.layers, &self.homes.buffers, request, block_size);
        Ok(CacheFacts {
            bytes_per_block: self.bytes_per_block,
            num_segments: self.num_segments() as u64,
            block_size,
            num_block_tables: need.num_block_tables,
            fixed_blocks_per_request: need.fixed_blocks,
        })
    }
}

fn views(
    layers: &[Layer],
    homes: &Homes,
    max_blocks: NumBlocks,
) -> Result<Vec<LayerView>, LayoutError> {
    let at_home = layers.iter().zip(&homes.homes).zip(&homes.forms);
    let view = |((layer, &home), form): ((&Layer, &Home), &Form)| {
        let tensors = form.tensors(homes.place_of(home), max_blocks)?;
        Ok(LayerView { name: layer.name.clone(), buffer: home.buffer, tensors })
    };
    at_home.map(view).collect()
}
