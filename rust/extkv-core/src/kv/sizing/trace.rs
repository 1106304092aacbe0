//! What is measured while an engine starts, as data: the whole input of [`super::SizingPlan`].
//!
//! A trace written to JSON and read again gives the same plan on any machine. All sizes are bytes.

use serde::{Deserialize, Serialize};

use super::error::SizingError;
use super::facts::CacheFacts;
use super::utilization::Utilization;
use crate::kv::spec::NumBlocks;

/// A step of an engine's start. The order here is the order in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The process has its device context and nothing else.
    Start,
    /// The weights of target and drafter are on the device.
    WeightsLoaded,
    /// One worst-case step was run; encoder caches are held.
    Profiled,
    /// The cache is reserved and what warm-up needs is committed.
    Reserved,
    /// Every graph is captured.
    Captured,
    /// The allocator's caches were emptied, then the worst real step was run again.
    Measured,
}

impl Phase {
    /// The name used in JSON and in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::WeightsLoaded => "weights_loaded",
            Self::Profiled => "profiled",
            Self::Reserved => "reserved",
            Self::Captured => "captured",
            Self::Measured => "measured",
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Memory at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryReading {
    /// Free memory as the driver says, other processes' use counted.
    pub driver_free_bytes: u64,
    /// Bytes in live tensors of the engine's allocator; 0 where there is none.
    #[serde(default)]
    pub allocated_bytes: u64,
    /// Bytes that the allocator holds from the driver, live or cached.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// The most bytes in live tensors since the last reset.
    #[serde(default)]
    pub peak_allocated_bytes: u64,
}

/// Memory before and after a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseReading {
    /// The phase.
    pub phase: Phase,
    /// When it began.
    pub before: MemoryReading,
    /// When it was over.
    pub after: MemoryReading,
}

/// Whether a cache can grow after it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizingMode {
    /// Reserved first, committed to the measured size later.
    Extensible,
    /// Committed once, at the size planned.
    Fixed,
}

/// Everything measured, stated and asked that decides a cache's size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Memory of the device.
    pub device_total_bytes: u64,
    /// The phases gone through, in order; `start` and `measured` are needed.
    pub phases: Vec<PhaseReading>,
    /// Physical bytes of the cache that were committed when `measured` was over.
    pub committed_bytes: u64,
    /// Rise of live tensors above the level before it, in the worst real step after capture.
    pub transient_peak_bytes: u64,
    /// Bytes left free on purpose.
    pub reserve_bytes: u64,
    /// Bytes of other processes on the device when `measured` was over; 0 if unknown.
    pub foreign_bytes: u64,
    /// Bytes of the encoder caches that have been held since `profiled`.
    pub encoder_cache_bytes: u64,
    /// Granularity of physical memory.
    pub granule_bytes: u64,
    /// The cache.
    pub cache: CacheFacts,
    /// Blocks that the reservation can hold; needed where the cache is extensible.
    pub reserved_blocks: Option<NumBlocks>,
    /// Tokens of the longest request.
    pub max_model_len: u64,
    /// Share of the device that this process may use.
    pub gpu_memory_utilization: Utilization,
    /// A size of the cache set by hand; only where it is fixed.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Whether the cache grows.
    pub mode: SizingMode,
}

impl Trace {
    /// The reading of a phase, if it was gone through.
    #[must_use]
    pub fn reading(&self, phase: Phase) -> Option<&PhaseReading> {
        self.phases.iter().find(|reading| reading.phase == phase)
    }

    /// Refuses a trace that contradicts itself; returns the reading to size from.
    pub(super) fn check(&self) -> Result<PhaseReading, SizingError> {
        self.check_fields()?;
        self.check_phases()?;
        let missing = |phase| SizingError::MissingPhase { phase };
        self.reading(Phase::Start).ok_or(missing(Phase::Start))?;
        let measured = *self.reading(Phase::Measured).ok_or(missing(Phase::Measured))?;
        let free = measured.after.driver_free_bytes;
        let fits = free.checked_add(self.committed_bytes);
        if fits.is_none_or(|bytes| bytes > self.device_total_bytes) {
            return Err(SizingError::committed(
                self.committed_bytes,
                free,
                self.device_total_bytes,
            ));
        }
        match (self.mode, self.kv_cache_memory_bytes, self.reserved_blocks) {
            (SizingMode::Extensible, Some(requested), _) => {
                Err(SizingError::manual_with_extensible(requested))
            }
            (SizingMode::Extensible, None, None) => Err(SizingError::NoReservation),
            _ => Ok(measured),
        }
    }

    fn check_fields(&self) -> Result<(), SizingError> {
        let fields = [
            ("device_total_bytes", self.device_total_bytes),
            ("bytes_per_block", self.cache.bytes_per_block),
            ("block_size", self.cache.block_size),
            ("max_model_len", self.max_model_len),
            ("num_block_tables", self.cache.blocks_at_least()),
            ("reserved_blocks", self.reserved_blocks.map_or(1, |blocks| blocks.0)),
            ("kv_cache_memory_bytes", self.kv_cache_memory_bytes.unwrap_or(1)),
        ];
        match fields.into_iter().find(|(_, value)| *value == 0) {
            Some((field, _)) => Err(SizingError::ZeroField { field }),
            None => Ok(()),
        }
    }

    fn check_phases(&self) -> Result<(), SizingError> {
        for pair in self.phases.windows(2) {
            if let [earlier, later] = pair
                && earlier.phase >= later.phase
            {
                let (phase, after) = (later.phase, earlier.phase);
                return Err(SizingError::PhaseOrder { phase, after });
            }
        }
        let total = self.device_total_bytes;
        for reading in &self.phases {
            let free = reading.before.driver_free_bytes.max(reading.after.driver_free_bytes);
            if free > total {
                return Err(SizingError::free_exceeds_total(reading.phase, free, total));
            }
        }
        Ok(())
    }
}
