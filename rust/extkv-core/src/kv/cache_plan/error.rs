//! Why layers do not make a cache together, with the values that make it so.

use thiserror::Error as ThisError;

use crate::dtype::Dtype;
use crate::kv::error::LayoutError;
use crate::kv::layout::CacheOrder;

/// Layers that do not make a cache together.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum PlanError {
    /// One layer's spec or layout is wrong.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No layers at all.
    #[error("a cache plan needs at least one layer")]
    NoLayers,
    /// Two layers of one name.
    #[error("layer {layer} is listed twice")]
    DuplicateLayer {
        /// The name.
        layer: String,
    },
    /// A kind of layout that the spec cannot have.
    #[error("layer {layer} has a {layout} layout; recurrent layers need state, others do not")]
    LayoutKind {
        /// The layer.
        layer: String,
        /// Its kind of layout.
        layout: &'static str,
    },
    /// A layout with more or fewer bytes than the spec.
    #[error(
        "the layout of layer {layer} has {layout_bytes} bytes per block, its spec {spec_bytes}"
    )]
    LayoutBytes {
        /// The layer.
        layer: String,
        /// Bytes per block of the layout, without padding.
        layout_bytes: u64,
        /// Bytes per block of the spec.
        spec_bytes: u64,
    },
    /// A part that would begin where its elements cannot.
    #[error(
        "{dtype} elements in layer {layer} would begin {offset} bytes into a block's share, no \
         multiple of their size"
    )]
    PartMisaligned {
        /// The layer.
        layer: String,
        /// Bytes per block of the parts before it.
        offset: u64,
        /// Its element type.
        dtype: Dtype,
    },
    /// A layer that must be one run of bytes per block, and is not.
    #[error("a block of layer {layer} is not one run of bytes")]
    NotOneSegment {
        /// The layer.
        layer: String,
    },
    /// A whole-cache order under which a layer's part of a block is scattered.
    #[error(
        "layer {layer} of a hybrid model cannot be stacked in {order}: its bytes in a block are \
         not one run; use LBHNC, LBNHC, BLHNC or BLNHC"
    )]
    HybridOrder {
        /// The layer.
        layer: String,
        /// Its order.
        order: CacheOrder,
    },
    /// Sharing with a layer that is not listed before.
    #[error("layer {layer} shares the memory of {with}, which is not listed before it")]
    UnknownSharedLayer {
        /// The layer that shares.
        layer: String,
        /// The layer it names.
        with: String,
    },
    /// Sharing blocks between layers of different specs or layouts.
    #[error(
        "layer {layer} ({layer_bytes} bytes per block) cannot read the blocks of {other} \
         ({other_bytes} bytes per block): their specs or layouts differ"
    )]
    SharedBlocksDiffer {
        /// The layer that shares.
        layer: String,
        /// Its bytes per block.
        layer_bytes: u64,
        /// The layer it names.
        other: String,
        /// That one's bytes per block.
        other_bytes: u64,
    },
    /// A pool shared by layers whose blocks are not the same bytes.
    #[error(
        "layers {layer} and {other} cannot share a pool: their segments (count, bytes per block) \
         are {segments:?} and {other_segments:?}"
    )]
    PoolsDiffer {
        /// The layer that shares.
        layer: String,
        /// Its segments: how many, and their bytes per block.
        segments: Vec<(u64, u64)>,
        /// The layer it names.
        other: String,
        /// That one's segments.
        other_segments: Vec<(u64, u64)>,
    },
    /// A pool shared with a layer in a whole-cache tensor.
    #[error("layers {layer} and {other} cannot share a pool: a stacked layer has none of its own")]
    StackHasNoPool {
        /// The layer that shares.
        layer: String,
        /// The layer it names.
        other: String,
    },
    /// Layers placed on the same bytes.
    #[error("layers {layer} and {other} overlap in their buffer")]
    PlacementsOverlap {
        /// The layer that comes first.
        layer: String,
        /// The other.
        other: String,
    },
    /// Bytes of a buffer that no layer uses.
    #[error("bytes {from}..{to} at layer {layer} belong to no layer, so the layers do not tile")]
    PlacementGap {
        /// The layer next to the gap.
        layer: String,
        /// First unused byte.
        from: u64,
        /// The byte after the last unused one.
        to: u64,
    },
    /// Fewer bytes than one block needs.
    #[error("{max_bytes} bytes hold no block: one takes {bytes_per_block} bytes")]
    BudgetTooSmall {
        /// Bytes allowed.
        max_bytes: u64,
        /// Bytes of a block in all buffers.
        bytes_per_block: u64,
    },
    /// Layers whose blocks hold different numbers of tokens.
    #[error(
        "layers {layer} and {other} have block_size {block_size} and {other_block_size}; sizing \
         needs one"
    )]
    MixedBlockSizes {
        /// A layer.
        layer: String,
        /// Its tokens per block.
        block_size: u64,
        /// Another layer.
        other: String,
        /// That one's tokens per block.
        other_block_size: u64,
    },
}
