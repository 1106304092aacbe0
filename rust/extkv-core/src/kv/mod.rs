//! KV cache: what layers cache, where the bytes lie, and how many blocks fit.
//!
//! | question | type |
//! |---|---|
//! | what does a layer cache, and how many bytes is a block | [`KvSpec`] |
//! | where are the bytes of block *b* of one tensor | [`Layout`], [`SizedLayout`], [`StateBlock`] |
//! | which buffers does memory reserve, which tensors do layers see | [`CachePlan`] |
//! | how many blocks fit after capture, and what takes the rest | [`SizingPlan`] |
//! | how many blocks will fit, before anything is loaded | [`Estimate`] |
//!
//! Pure data and arithmetic: no driver, no device, no clock. A "block" is what other engines also
//! call a page.
//!
//! ```
//! use extkv_core::dtype::Dtype;
//! use extkv_core::kv::{AttentionSpec, CachePlan, Capacity, KvSpec, Layer, Layout, NumBlocks};
//!
//! let spec = AttentionSpec::new(16, 8, 128, Dtype::BFloat16)?;
//! let layer = Layer::strided("layers.0", KvSpec::FullAttention(spec), Layout::kv_split(&spec)?);
//! let plan = CachePlan::new(vec![layer], Capacity::Blocks(NumBlocks(100)))?;
//! assert_eq!(plan.buffers()[0].segments[1].offset_bytes, 100 * 32_768);
//! assert_eq!(plan.layers()[0].tensors[0].shape, [2, 100, 16, 8, 128]);
//! # Ok::<(), extkv_core::kv::PlanError>(())
//! ```

mod cache_plan;
mod checked;
mod error;
mod hybrid;
mod layout;
mod sizing;
mod spec;

pub use cache_plan::{
    BufferPlan, CachePlan, Capacity, Layer, LayerLayout, LayerView, Placement, PlanError, Region,
    SegmentPlan, Shared, segments_of_placements,
};
pub use error::LayoutError;
pub use hybrid::{block_outermost, common_block_bytes, hybrid_layers};
pub use layout::{
    CacheOrder, Dim, Layout, MAX_SEGMENTS, SizedLayout, TensorView, UnknownCacheOrder,
};
pub use sizing::{
    Adjustment, Agreement, Assumptions, CacheFacts, Estimate, Limit, MeasuredPart, MemoryReading,
    ModelFacts, Parts, Phase, PhaseReading, RecordError, SizingError, SizingMode, SizingPlan,
    SizingRecord, Trace, Utilization, Warning, agree, encoder_cache_bytes, reservation_blocks,
};
pub use spec::{
    AttentionSpec, BlockId, BlockShape, FP8_DS_MLA_BYTES_PER_TOKEN, KvSpec, MambaSpec, MlaFormat,
    MlaSpec, NumBlocks, RequestShape, StateBlock, StateSpec, StateTensor,
};
