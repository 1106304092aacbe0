//! The device's memory at the moment of measuring, split into what is taken and what is left.

use super::error::SizingError;
use super::parts::{Limit, Parts};
use super::trace::{Phase, PhaseReading, Trace};
use super::warning::{MeasuredPart, Warning};

/// What a cache may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// Bytes of other processes.
    foreign_bytes: u64,
    /// Bytes of this process outside the cache.
    own_bytes: u64,
    /// Free bytes and those that the cache has already.
    pub(super) physical_bytes: u64,
    transient_bytes: u64,
    rounding_bytes: u64,
    /// Bytes for blocks.
    pub(super) kv_bytes: u64,
    /// Bytes by which margin and rounding exceed what is there; 0 unless `kv_bytes` is 0.
    pub(super) shortfall_bytes: u64,
    /// Which of the two bounds is the lower.
    pub(super) limit: Limit,
}

impl Room {
    pub(super) fn new(trace: &Trace, measured: &PhaseReading) -> Result<Self, SizingError> {
        let physical_bytes = measured.after.driver_free_bytes.saturating_add(trace.committed_bytes);
        let used = trace.device_total_bytes.saturating_sub(physical_bytes);
        let foreign_bytes = trace.foreign_bytes.min(used);
        let own_bytes = used - foreign_bytes;
        let allowed = trace.gpu_memory_utilization.of(trace.device_total_bytes);
        let by_utilization = allowed.saturating_sub(own_bytes);
        let transient_bytes = transient_still_due(trace, measured);
        let rounding_bytes = trace
            .cache
            .num_segments
            .checked_mul(trace.granule_bytes)
            .ok_or(SizingError::Overflow { what: "rounding to granules" })?;
        let usable = physical_bytes.min(by_utilization);
        let taken =
            transient_bytes.saturating_add(trace.reserve_bytes).saturating_add(rounding_bytes);
        Ok(Self {
            foreign_bytes,
            own_bytes,
            physical_bytes,
            transient_bytes,
            rounding_bytes,
            kv_bytes: usable.saturating_sub(taken),
            shortfall_bytes: taken.saturating_sub(usable),
            limit: if by_utilization < physical_bytes {
                Limit::Utilization
            } else {
                Limit::FreeMemory
            },
        })
    }

    /// Explains every byte. Measured parts are trimmed to what is used, in turn, so that the sum
    /// is exact even where another process disturbed a measurement.
    pub(super) fn parts(&self, trace: &Trace, kv_bytes: u64, warnings: &mut Vec<Warning>) -> Parts {
        if trace.foreign_bytes > self.foreign_bytes {
            warnings.push(Warning::PartTrimmed {
                part: MeasuredPart::Foreign,
                measured_bytes: trace.foreign_bytes,
                counted_bytes: self.foreign_bytes,
            });
        }
        let mut rest = self.own_bytes;
        let mut take = |part, measured_bytes: u64| {
            let counted_bytes = measured_bytes.min(rest);
            rest -= counted_bytes;
            if counted_bytes < measured_bytes {
                warnings.push(Warning::PartTrimmed { part, measured_bytes, counted_bytes });
            }
            counted_bytes
        };
        let weights_bytes = take(MeasuredPart::Weights, weights(trace));
        let graphs_bytes = take(MeasuredPart::Graphs, graphs(trace));
        let encoder_cache_bytes = take(MeasuredPart::EncoderCache, trace.encoder_cache_bytes);
        let free_parts =
            self.transient_bytes + trace.reserve_bytes + self.rounding_bytes + kv_bytes;
        Parts {
            foreign_bytes: self.foreign_bytes,
            weights_bytes,
            graphs_bytes,
            encoder_cache_bytes,
            workspace_bytes: rest,
            transient_bytes: self.transient_bytes,
            reserve_bytes: trace.reserve_bytes,
            rounding_bytes: self.rounding_bytes,
            kv_bytes,
            unused_bytes: self.physical_bytes - free_parts,
        }
    }
}

/// The transient peak less what the measured step left in the allocator's cache: those bytes are
/// no longer free, and the next such step uses them again. Counting both would count them twice.
///
/// Only what this phase added is trusted: older cached bytes may belong to a graph's private pool.
fn transient_still_due(trace: &Trace, measured: &PhaseReading) -> u64 {
    let (before, after) = (&measured.before, &measured.after);
    let held = after.reserved_bytes.saturating_sub(before.reserved_bytes);
    let live = after.allocated_bytes.saturating_sub(before.allocated_bytes);
    trace.transient_peak_bytes.saturating_sub(held.saturating_sub(live))
}

/// Live tensors that loading left, which other processes cannot disturb; the fall of free memory
/// where the engine has no allocator.
fn weights(trace: &Trace) -> u64 {
    let Some(loaded) = trace.reading(Phase::WeightsLoaded) else {
        return 0;
    };
    let (before, after) = (&loaded.before, &loaded.after);
    match after.allocated_bytes.saturating_sub(before.allocated_bytes) {
        0 => before.driver_free_bytes.saturating_sub(after.driver_free_bytes),
        live => live,
    }
}

/// What capture keeps once caches are emptied, that is when measuring begins; 0 if memory came
/// free meanwhile.
fn graphs(trace: &Trace) -> u64 {
    match (trace.reading(Phase::Captured), trace.reading(Phase::Measured)) {
        (Some(captured), Some(measured)) => {
            captured.before.driver_free_bytes.saturating_sub(measured.before.driver_free_bytes)
        }
        _ => 0,
    }
}
