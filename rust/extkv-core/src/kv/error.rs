//! Every way that one layer's spec or layout can be wrong, with the values that make it so.
//!
//! Layers together have [`super::PlanError`], sizes [`super::SizingError`].

use thiserror::Error as ThisError;

use super::spec::{BlockId, NumBlocks};
use crate::dtype::Dtype;
use crate::units::Bytes;

/// A spec or layout that cannot be, or a question about blocks it does not have.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum LayoutError {
    /// A size that must be at least 1.
    #[error("{what} is 0; it must be at least 1")]
    ZeroSize {
        /// The size.
        what: &'static str,
    },
    /// A dim of size 0.
    #[error("dim {dim} has size 0")]
    ZeroDim {
        /// The dim's name.
        dim: String,
    },
    /// A size that does not fit 64 bits (signed, for what torch must address).
    #[error("{what} overflows 64 bits")]
    Overflow {
        /// What was computed.
        what: &'static str,
    },
    /// More separate runs of memory than a buffer should be cut into.
    #[error("{num_segments} segments exceed the limit of {limit}: move the block dim outwards")]
    TooManySegments {
        /// Segments of the layout.
        num_segments: u64,
        /// The most a layout may have.
        limit: u64,
    },
    /// A block dim that the shape does not have.
    #[error("block dim {block_dim} is out of range for {num_dims} dims")]
    BlockDimOutOfRange {
        /// The index asked for.
        block_dim: usize,
        /// Dims of the shape.
        num_dims: usize,
    },
    /// A stride order with too few or too many entries.
    #[error("stride order has {found} entries for {expected} dims")]
    StrideOrderLength {
        /// Dims of the shape.
        expected: usize,
        /// Entries of the order.
        found: usize,
    },
    /// A stride order that names a dim which is not there.
    #[error("stride order names dim {entry}, the shape has {num_dims} dims")]
    StrideOrderEntry {
        /// The entry.
        entry: usize,
        /// Dims of the shape.
        num_dims: usize,
    },
    /// A stride order that names a dim twice, and so leaves one out.
    #[error("stride order names dim {dim} twice; it must be a permutation")]
    StrideOrderRepeats {
        /// The dim.
        dim: usize,
    },
    /// Strides that are not one per dim.
    #[error("{found} strides given for {expected} dims")]
    StrideCount {
        /// Dims of the shape.
        expected: usize,
        /// Strides given.
        found: usize,
    },
    /// A stride below 0.
    #[error("dim {dim} has the negative stride {stride}")]
    NegativeStride {
        /// The dim's name.
        dim: String,
        /// Its stride in elements.
        stride: i64,
    },
    /// Strides under which two indices are one element.
    #[error("strides alias: dim {dim} steps by {stride} over dims that span {span} elements")]
    StridesAlias {
        /// The dim that steps too little.
        dim: String,
        /// Its stride in elements.
        stride: u64,
        /// Elements that the dims inside it span.
        span: u64,
    },
    /// Strides under which some elements belong to no index.
    #[error("strides do not tile: dim {dim} steps by {stride} over dims that span {span} elements")]
    StridesLeaveGap {
        /// The dim that steps too far.
        dim: String,
        /// Its stride in elements.
        stride: u64,
        /// Elements that the dims inside it span.
        span: u64,
    },
    /// Strides of a tensor with a single block.
    #[error(
        "the block dim has size 1, so its stride does not say where blocks lie; report the \
         strides of at least 2 blocks"
    )]
    AmbiguousBlockDim,
    /// A layout with one width for keys and values of different widths.
    #[error(
        "keys have head_dim {head_dim} and values {head_dim_v}; a kv dim needs equal widths, use \
         separate key and value tensors or a fused content dim"
    )]
    UnequalHeadDims {
        /// Width of a key.
        head_dim: u64,
        /// Width of a value.
        head_dim_v: u64,
    },
    /// A block padded to fewer bytes than it has.
    #[error(
        "a block of {bytes} is too small: {needed} are needed with {num_speculative_tokens} \
         speculative tokens"
    )]
    BlockTooSmall {
        /// The size asked for.
        bytes: Bytes,
        /// The size without padding.
        needed: Bytes,
        /// Speculative tokens that the states have room for.
        num_speculative_tokens: u64,
    },
    /// Two parts of an engine disagree on a block's size.
    #[error(
        "a block was planned with {planned} but has {actual} with {num_speculative_tokens} \
         speculative tokens"
    )]
    BlockMismatch {
        /// The size another part planned.
        planned: Bytes,
        /// The size of the spec.
        actual: Bytes,
        /// Speculative tokens that the states have room for.
        num_speculative_tokens: u64,
    },
    /// A block size that misaligns the next block for those who read it.
    #[error("a block of {bytes} is not a multiple of {alignment}, as its readers need")]
    BlockMisaligned {
        /// The block.
        bytes: Bytes,
        /// What every block must start at a multiple of.
        alignment: Bytes,
    },
    /// A layout of one kind of layer for another kind.
    #[error("this layout is for {needed} layers, the spec describes a layer of kind {found}")]
    SpecKind {
        /// The kind of layer that can have it.
        needed: &'static str,
        /// The kind of the spec.
        found: &'static str,
    },
    /// A recurrent layer without states.
    #[error("a recurrent layer has no states")]
    NoStates,
    /// A speculative dim that the state does not have.
    #[error("state {state} has {num_dims} dims, so dim {dim} cannot be widened")]
    SpeculativeDim {
        /// The state.
        state: String,
        /// The dim asked for.
        dim: usize,
        /// Dims of the state.
        num_dims: usize,
    },
    /// A state whose elements would not be aligned.
    #[error("state {state} of {dtype} begins at byte {offset}, no multiple of its element size")]
    StateMisaligned {
        /// The state.
        state: String,
        /// Its first byte in the block.
        offset: u64,
        /// Its element type.
        dtype: Dtype,
    },
    /// A state that ends past its block.
    #[error("state {state} ends at byte {end} of a block of {bytes_per_block} bytes")]
    StateOutsideBlock {
        /// The state.
        state: String,
        /// The byte after its last.
        end: u64,
        /// Bytes of the block.
        bytes_per_block: u64,
    },
    /// Two states on the same bytes.
    #[error("states {first} and {second} overlap")]
    StatesOverlap {
        /// The state that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// A block index past the capacity.
    #[error("block {block} is out of range: the layout has {capacity} blocks")]
    BlockOutOfRange {
        /// The block asked for.
        block: BlockId,
        /// Blocks of the layout.
        capacity: NumBlocks,
    },
    /// More blocks than the capacity.
    #[error("{requested} blocks asked for, {capacity} can be held")]
    TooManyBlocks {
        /// Blocks asked for.
        requested: NumBlocks,
        /// The most there can be.
        capacity: NumBlocks,
    },
    /// A growth that would shrink.
    #[error("cannot grow from {from} to {to} blocks")]
    NotGrowing {
        /// Blocks before.
        from: NumBlocks,
        /// Blocks after.
        to: NumBlocks,
    },
    /// An index outside a tensor's shape.
    #[error("index {index:?} is outside shape {shape:?}")]
    IndexOutOfRange {
        /// The index.
        index: Vec<u64>,
        /// The shape.
        shape: Vec<u64>,
    },
}
