//! Why a size cannot be given, with the numbers and what to change.

use thiserror::Error as ThisError;

use super::parts::Limit;
use super::trace::Phase;
use crate::kv::spec::NumBlocks;
use crate::units::Bytes;

/// A trace that gives no plan, or plans that do not agree.
#[derive(Debug, Clone, PartialEq, ThisError)]
pub enum SizingError {
    /// A number that must be at least 1.
    #[error("{field} is 0; it must be at least 1")]
    ZeroField {
        /// The field of the trace.
        field: &'static str,
    },
    /// A share of the device that is none.
    #[error("gpu_memory_utilization is {ratio}; it must be above 0 and at most 1")]
    Utilization {
        /// The share as given.
        ratio: f64,
    },
    /// A phase that sizing needs was not measured.
    #[error("the trace has no reading of phase {phase}")]
    MissingPhase {
        /// The phase.
        phase: Phase,
    },
    /// Phases out of order, or one twice.
    #[error("phase {phase} is listed after {after}")]
    PhaseOrder {
        /// The phase that comes too late.
        phase: Phase,
        /// The phase listed before it.
        after: Phase,
    },
    /// More free memory than there is memory.
    #[error("{free} free in phase {phase} on a device of {total}")]
    FreeExceedsTotal {
        /// The phase.
        phase: Phase,
        /// Free memory in the trace.
        free: Bytes,
        /// Memory of the device.
        total: Bytes,
    },
    /// Free and committed memory that exceed the device together.
    #[error("{committed} committed and {free} free on a device of {total}")]
    CommittedExceedsTotal {
        /// Committed bytes of the cache.
        committed: Bytes,
        /// Free memory.
        free: Bytes,
        /// Memory of the device.
        total: Bytes,
    },
    /// An extensible cache without a reservation.
    #[error("an extensible cache needs the number of blocks that its reservation holds")]
    NoReservation,
    /// A size set by hand for a cache whose size is measured.
    #[error(
        "kv_cache_memory_bytes = {requested} cannot be combined with the extensible cache, which \
         measures its size: drop it, or set enable_extensible_kv_cache=False"
    )]
    ManualSizeWithExtensible {
        /// The size set by hand.
        requested: Bytes,
    },
    /// A size set by hand that leaves too little for the engine itself.
    #[error(
        "kv_cache_memory_bytes = {requested} leaves too little: {free} are free and {available} of \
         them are left for the cache after the margin"
    )]
    ManualSizeTooLarge {
        /// The size set by hand.
        requested: Bytes,
        /// Free memory, the cache's own included.
        free: Bytes,
        /// What the cache may take of it.
        available: Bytes,
    },
    /// Too few blocks for one request of the longest length.
    #[error(
        "one request of max_model_len = {max_model_len} tokens needs {needed} blocks and {blocks} \
         fit: the longest request that fits has {longest} tokens; lower max_model_len to that, or \
         {}", .limit.remedy(*.missing)
    )]
    TooSmallForOneRequest {
        /// Tokens of the longest request.
        max_model_len: u64,
        /// Blocks it needs.
        needed: NumBlocks,
        /// Blocks that fit.
        blocks: NumBlocks,
        /// Tokens of the longest request that fits.
        longest: u64,
        /// Bytes that are missing.
        missing: Bytes,
        /// What bounds the number of blocks.
        limit: Limit,
    },
    /// A number that does not fit 64 bits.
    #[error("{what} overflows 64 bits")]
    Overflow {
        /// What was computed.
        what: &'static str,
    },
    /// An agreement among no ranks.
    #[error("no rank has a plan to agree on")]
    NoRanks,
    /// Ranks that were configured differently.
    #[error("rank {rank} has {field} = {found}, rank 0 has {expected}")]
    RanksDiffer {
        /// The rank that differs.
        rank: usize,
        /// The setting.
        field: &'static str,
        /// Its value on rank 0.
        expected: u64,
        /// Its value on that rank.
        found: u64,
    },
    /// More blocks than a plan found room for.
    #[error("{requested} blocks asked of a plan that has room for {blocks}")]
    AbovePlan {
        /// Blocks asked for.
        requested: NumBlocks,
        /// Blocks of the plan.
        blocks: NumBlocks,
    },
    /// A model that does not fit the device before any cache.
    #[error("the model needs {needed} without a cache, the device has {total}")]
    ModelTooLarge {
        /// Weights and what is assumed beside them.
        needed: Bytes,
        /// Memory of the device.
        total: Bytes,
    },
}

impl SizingError {
    pub(super) fn committed(committed: u64, free: u64, total: u64) -> Self {
        let (committed, free, total) = (Bytes(committed), Bytes(free), Bytes(total));
        Self::CommittedExceedsTotal { committed, free, total }
    }

    pub(super) fn manual_with_extensible(requested: u64) -> Self {
        Self::ManualSizeWithExtensible { requested: Bytes(requested) }
    }

    pub(super) fn free_exceeds_total(phase: Phase, free: u64, total: u64) -> Self {
        Self::FreeExceedsTotal { phase, free: Bytes(free), total: Bytes(total) }
    }
}

/// A stored sizing that cannot be read.
#[derive(Debug, ThisError)]
pub enum RecordError {
    /// Text that is no JSON, or not of this shape.
    #[error("cannot read the sizing record")]
    Json(#[from] serde_json::Error),
    /// A record of another format.
    #[error("sizing record has format {found}; this version reads {expected}")]
    Format {
        /// The format read.
        found: u32,
        /// The format known.
        expected: u32,
    },
    /// A plan that its own trace does not give: the file was changed, or the rules were.
    #[error("the stored plan of {stored} blocks differs from what its trace gives, {replayed}")]
    PlanDiffers {
        /// Blocks of the stored plan.
        stored: NumBlocks,
        /// Blocks of the plan made from the stored trace.
        replayed: NumBlocks,
    },
    /// A trace that gives no plan.
    #[error(transparent)]
    Sizing(#[from] SizingError),
}
