//! How many blocks fit once everything else is in place, and what takes the rest.
//!
//! The size comes from the driver's free memory after capture, not from an estimate:
//!
//! `blocks = floor((free + committed - margin - rounding) / bytes_per_block)`,
//!
//! clamped to the reservation and to `gpu_memory_utilization`. `margin` is the transient peak of
//! the worst real step, as far as the allocator does not hold it already, plus a stated reserve;
//! `rounding` is one granule per segment. What the other phases measured only explains where the
//! rest went; it cannot change the number of blocks.

mod agreement;
mod error;
mod estimate;
mod facts;
mod parts;
mod plan;
mod record;
mod room;
mod table;
mod trace;
mod utilization;
mod warning;

pub use agreement::{Agreement, agree};
pub use error::{RecordError, SizingError};
pub use estimate::{Assumptions, Estimate, ModelFacts};
pub use facts::{CacheFacts, encoder_cache_bytes};
pub use parts::{Limit, Parts};
pub use plan::SizingPlan;
pub use record::{Adjustment, SizingRecord};
pub use trace::{MemoryReading, Phase, PhaseReading, SizingMode, Trace};
pub use utilization::Utilization;
pub use warning::{MeasuredPart, Warning};

use self::room::Room;
use self::warning::drift_warnings;
use super::spec::NumBlocks;
use crate::units::Bytes;

impl SizingPlan {
    /// Sizes a cache from what was measured.
    ///
    /// # Errors
    /// Errors of a trace that contradicts itself ([`SizingError::ZeroField`],
    /// [`SizingError::MissingPhase`], [`SizingError::PhaseOrder`],
    /// [`SizingError::FreeExceedsTotal`], [`SizingError::CommittedExceedsTotal`]);
    /// [`SizingError::NoReservation`]; [`SizingError::ManualSizeWithExtensible`];
    /// [`SizingError::ManualSizeTooLarge`]; [`SizingError::TooSmallForOneRequest`];
    /// [`SizingError::Overflow`].
    pub fn new(trace: &Trace) -> Result<Self, SizingError> {
        let measured = trace.check()?;
        let room = Room::new(trace, &measured)?;
        let mut warnings = drift_warnings(trace);
        let (blocks, limit) = fitting_blocks(trace, &room, &mut warnings)?;
        let blocks_per_request = one_request(trace, &room, blocks, limit)?;
        let kv_bytes = blocks
            .0
            .checked_mul(trace.cache.bytes_per_block)
            .ok_or(SizingError::Overflow { what: "bytes of the cache" })?;
        Ok(Self {
            device_total_bytes: trace.device_total_bytes,
            parts: room.parts(trace, kv_bytes, &mut warnings),
            blocks,
            num_tokens: trace.cache.num_tokens(blocks),
            blocks_per_request,
            max_model_len: trace.max_model_len,
            cache: trace.cache,
            limit,
            warnings,
        })
    }
}

/// A pinned size above this share of free memory is warned about.
const MANUAL_WARNING_PERCENT: u64 = 90;

fn fitting_blocks(
    trace: &Trace,
    room: &Room,
    warnings: &mut Vec<Warning>,
) -> Result<(NumBlocks, Limit), SizingError> {
    let bytes_per_block = trace.cache.bytes_per_block;
    let (fitting, limit) = match (trace.mode, trace.kv_cache_memory_bytes) {
        (SizingMode::Fixed, Some(requested)) => {
            check_manual(requested, room, warnings)?;
            (NumBlocks(requested / bytes_per_block), Limit::ManualSize)
        }
        _ => (NumBlocks(room.kv_bytes / bytes_per_block), room.limit),
    };
    match trace.reserved_blocks {
        Some(reserved) if reserved < fitting => {
            warnings.push(Warning::ClampedToReservation { fitting, reserved });
            Ok((reserved, Limit::Reservation))
        }
        _ => Ok((fitting, limit)),
    }
}

fn check_manual(
    requested: u64,
    room: &Room,
    warnings: &mut Vec<Warning>,
) -> Result<(), SizingError> {
    let free = room.physical_bytes;
    if requested > room.kv_bytes {
        let (requested, free, available) = (Bytes(requested), Bytes(free), Bytes(room.kv_bytes));
        return Err(SizingError::ManualSizeTooLarge { requested, free, available });
    }
    if u128::from(requested) * 100 > u128::from(free) * u128::from(MANUAL_WARNING_PERCENT) {
        let (requested_bytes, free_bytes) = (requested, free);
        warnings.push(Warning::ManualSizeNearFree { requested_bytes, free_bytes });
    }
    Ok(())
}

/// The blocks of one request of the longest length, or why they do not fit.
fn one_request(
    trace: &Trace,
    room: &Room,
    blocks: NumBlocks,
    limit: Limit,
) -> Result<u64, SizingError> {
    let (cache, max_model_len) = (&trace.cache, trace.max_model_len);
    let needed = cache.blocks_per_request(max_model_len)?;
    if blocks.0 >= needed {
        return Ok(needed);
    }
    let needed_bytes = needed.saturating_mul(cache.bytes_per_block);
    let missing = match limit {
        Limit::FreeMemory | Limit::Utilization | Limit::OtherRank => {
            needed_bytes.saturating_add(room.shortfall_bytes).saturating_sub(room.kv_bytes)
        }
        Limit::Reservation => (needed - blocks.0).saturating_mul(cache.bytes_per_block),
        Limit::ManualSize => needed_bytes.saturating_sub(trace.kv_cache_memory_bytes.unwrap_or(0)),
    };
    Err(SizingError::TooSmallForOneRequest {
        max_model_len,
        needed: NumBlocks(needed),
        blocks,
        longest: cache.longest_request(blocks, max_model_len),
        missing: Bytes(missing),
        limit,
    })
}

/// Blocks to reserve addresses for before anything is measured: no later plan can have more.
///
/// # Errors
/// [`SizingError::ZeroField`] for blocks of 0 bytes.
pub fn reservation_blocks(
    device_total_bytes: u64,
    gpu_memory_utilization: Utilization,
    bytes_per_block: u64,
) -> Result<NumBlocks, SizingError> {
    gpu_memory_utilization
        .of(device_total_bytes)
        .checked_div(bytes_per_block)
        .map(NumBlocks)
        .ok_or(SizingError::ZeroField { field: "bytes_per_block" })
}
