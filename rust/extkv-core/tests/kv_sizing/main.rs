//! Sizing: public cases by number, the rules as properties, replay from JSON, and every refusal.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use extkv_core::dtype::Dtype::BFloat16;
use extkv_core::kv::{
    Adjustment, Agreement, CacheFacts, Limit, MeasuredPart, MemoryReading, NumBlocks, Phase,
    PhaseReading, RecordError, SizingError, SizingMode, SizingPlan, SizingRecord, Trace,
    Utilization, Warning, agree, encoder_cache_bytes, reservation_blocks,
};
use extkv_core::units::Bytes;
use proptest::prelude::*;

mod bug_cases;
mod estimate;
mod meaning;
mod properties;
mod record;
mod refusals;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// 36 layers of 8 heads × 128, bf16, 16 tokens: the block of B78.
const QWEN3_8B_BLOCK: u64 = 2_359_296;

fn facts() -> CacheFacts {
    CacheFacts {
        bytes_per_block: QWEN3_8B_BLOCK,
        num_segments: 72,
        block_size: 16,
        num_block_tables: 1,
        fixed_blocks_per_request: 0,
    }
}

fn free(driver_free_bytes: u64) -> MemoryReading {
    MemoryReading { driver_free_bytes, ..MemoryReading::default() }
}

fn held(driver_free_bytes: u64, allocated_bytes: u64, reserved_bytes: u64) -> MemoryReading {
    let peak_allocated_bytes = allocated_bytes;
    MemoryReading { driver_free_bytes, allocated_bytes, reserved_bytes, peak_allocated_bytes }
}

fn phase(phase: Phase, before: MemoryReading, after: MemoryReading) -> PhaseReading {
    PhaseReading { phase, before, after }
}

/// A start on 80 GiB: context 0.5, weights 15, libraries 0.5, first commit 1, graphs 1.5 GiB, and
/// a worst step of 1 GiB whose memory the allocator keeps.
fn healthy() -> Trace {
    let half = GIB / 2;
    let at = |halves_free: u64, reserved: u64| {
        held(halves_free * half, 15 * GIB.min(reserved), reserved)
    };
    let weights = 15 * GIB;
    Trace {
        device_total_bytes: 80 * GIB,
        phases: vec![
            phase(Phase::Start, at(160, 0), at(159, 0)),
            phase(Phase::WeightsLoaded, at(159, 0), at(129, weights)),
            phase(Phase::Profiled, at(129, weights), at(128, weights)),
            phase(Phase::Reserved, at(128, weights), at(126, weights)),
            phase(Phase::Captured, at(126, weights), at(123, weights)),
            phase(Phase::Measured, at(123, weights), at(121, weights + GIB)),
        ],
        committed_bytes: GIB,
        transient_peak_bytes: GIB,
        reserve_bytes: 256 * MIB,
        foreign_bytes: 0,
        encoder_cache_bytes: 0,
        granule_bytes: 2 * MIB,
        cache: facts(),
        reserved_blocks: Some(NumBlocks(36_408)),
        max_model_len: 4096,
        gpu_memory_utilization: Utilization::FULL,
        kv_cache_memory_bytes: None,
        mode: SizingMode::Extensible,
    }
}

/// A trace that went through nothing but `start` and `measured`, with so much free.
fn bare(total: u64, free_bytes: u64) -> Trace {
    Trace {
        device_total_bytes: total,
        phases: vec![
            phase(Phase::Start, free(free_bytes), free(free_bytes)),
            phase(Phase::Measured, free(free_bytes), free(free_bytes)),
        ],
        committed_bytes: 0,
        transient_peak_bytes: 0,
        reserve_bytes: 0,
        granule_bytes: 1,
        ..healthy()
    }
}

fn fixed(manual: Option<u64>) -> Trace {
    Trace {
        mode: SizingMode::Fixed,
        reserved_blocks: None,
        kv_cache_memory_bytes: manual,
        ..healthy()
    }
}

fn plan(trace: &Trace) -> SizingPlan {
    SizingPlan::new(trace).unwrap()
}

fn refused(trace: &Trace) -> SizingError {
    SizingPlan::new(trace).unwrap_err()
}
