//! What looks odd in a trace without making it useless.

use std::fmt;

use serde::Serialize;

use super::trace::{MemoryReading, Phase, PhaseReading, Trace};
use crate::kv::spec::NumBlocks;
use crate::units::Bytes;

/// Free memory may rise, or fall between two phases, by this much unnoticed.
const DRIFT_TOLERANCE_BYTES: u64 = 32 << 20;

/// Free memory may fall by this much during a phase beyond what the allocator took: libraries
/// take their workspaces at first use.
const LIBRARY_ALLOWANCE_BYTES: u64 = 1 << 30;

/// A measured part of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredPart {
    /// Other processes.
    Foreign,
    /// Weights.
    Weights,
    /// Captured graphs.
    Graphs,
    /// Encoder caches.
    EncoderCache,
}

/// Something that the reader of a plan should know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Warning {
    /// Free memory rose during a phase by more than this process gave back.
    FreeRoseDuring {
        /// The phase.
        phase: Phase,
        /// By how much.
        bytes: u64,
    },
    /// Free memory fell during a phase by more than this process should take.
    FreeFellDuring {
        /// The phase.
        phase: Phase,
        /// By how much.
        bytes: u64,
    },
    /// Free memory rose between a phase and the one before it.
    FreeRoseBefore {
        /// The phase.
        phase: Phase,
        /// By how much.
        bytes: u64,
    },
    /// Free memory fell between a phase and the one before it.
    FreeFellBefore {
        /// The phase.
        phase: Phase,
        /// By how much.
        bytes: u64,
    },
    /// More memory was free after capture than before; the difference is not given to the cache
    /// as graph memory.
    NegativeGraphMemory {
        /// By how much.
        bytes: u64,
    },
    /// The allocator saw a higher peak while measuring than the transient peak that is stated.
    PeakAboveTransient {
        /// The transient peak of the trace.
        stated_bytes: u64,
        /// The allocator's peak above what was live before.
        seen_bytes: u64,
    },
    /// More blocks fit than were reserved.
    ClampedToReservation {
        /// Blocks that fit.
        fitting: NumBlocks,
        /// Blocks reserved.
        reserved: NumBlocks,
    },
    /// A size set by hand takes nearly all free memory.
    ManualSizeNearFree {
        /// The size.
        requested_bytes: u64,
        /// Free memory, the cache's own included.
        free_bytes: u64,
    },
    /// A part was measured larger than what is left of used memory.
    PartTrimmed {
        /// The part.
        part: MeasuredPart,
        /// As measured.
        measured_bytes: u64,
        /// As counted in the plan.
        counted_bytes: u64,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FreeRoseDuring { phase, bytes } => write!(
                f,
                "free memory rose by {} during {phase}: another process gave memory back",
                Bytes(*bytes)
            ),
            Self::FreeFellDuring { phase, bytes } => write!(
                f,
                "free memory fell by {} during {phase} beyond this process's allocator: another \
                 process may have taken it",
                Bytes(*bytes)
            ),
            Self::FreeRoseBefore { phase, bytes } => {
                write!(f, "free memory rose by {} before {phase}", Bytes(*bytes))
            }
            Self::FreeFellBefore { phase, bytes } => {
                write!(f, "free memory fell by {} before {phase}", Bytes(*bytes))
            }
            Self::NegativeGraphMemory { bytes } => write!(
                f,
                "{} more were free after capture than before; graphs are counted as 0",
                Bytes(*bytes)
            ),
            Self::PeakAboveTransient { stated_bytes, seen_bytes } => write!(
                f,
                "the allocator's peak rose by {} while measuring, {} are stated; was the peak \
                 reset before?",
                Bytes(*seen_bytes),
                Bytes(*stated_bytes)
            ),
            Self::ClampedToReservation { fitting, reserved } => {
                write!(f, "{fitting} blocks fit, the reservation holds {reserved}")
            }
            Self::ManualSizeNearFree { requested_bytes, free_bytes } => write!(
                f,
                "kv_cache_memory_bytes = {} takes nearly all of the {} free",
                Bytes(*requested_bytes),
                Bytes(*free_bytes)
            ),
            Self::PartTrimmed { part, measured_bytes, counted_bytes } => write!(
                f,
                "{part:?} measured as {}, but only {} are left of used memory",
                Bytes(*measured_bytes),
                Bytes(*counted_bytes)
            ),
        }
    }
}

/// Compares the readings of a trace with each other.
pub(super) fn drift_warnings(trace: &Trace) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut previous: Option<&MemoryReading> = None;
    for reading in &trace.phases {
        let phase = reading.phase;
        if let Some(previous) = previous {
            match Drift::between(previous, &reading.before) {
                Drift::Rose(bytes) if bytes > DRIFT_TOLERANCE_BYTES => {
                    warnings.push(Warning::FreeRoseBefore { phase, bytes });
                }
                Drift::Fell(bytes) if bytes > DRIFT_TOLERANCE_BYTES => {
                    warnings.push(Warning::FreeFellBefore { phase, bytes });
                }
                _ => {}
            }
        }
        match Drift::between(&reading.before, &reading.after) {
            Drift::Rose(bytes) if bytes > DRIFT_TOLERANCE_BYTES => {
                warnings.push(Warning::FreeRoseDuring { phase, bytes });
            }
            Drift::Fell(bytes) if bytes > LIBRARY_ALLOWANCE_BYTES && !takes_device(phase) => {
                warnings.push(Warning::FreeFellDuring { phase, bytes });
            }
            _ => {}
        }
        previous = Some(&reading.after);
    }
    warnings.extend(negative_graphs(trace));
    warnings.extend(peak_above_transient(trace));
    warnings
}

/// Phases whose purpose is to take memory past the allocator: the context, weights of an engine
/// without one, the committed part of the cache, graphs.
const fn takes_device(phase: Phase) -> bool {
    match phase {
        Phase::Start | Phase::WeightsLoaded | Phase::Reserved | Phase::Captured => true,
        Phase::Profiled | Phase::Measured => false,
    }
}

fn negative_graphs(trace: &Trace) -> Option<Warning> {
    let captured = trace.reading(Phase::Captured)?.before.driver_free_bytes;
    let measured = trace.reading(Phase::Measured)?.before.driver_free_bytes;
    match measured.saturating_sub(captured) {
        0 => None,
        bytes => Some(Warning::NegativeGraphMemory { bytes }),
    }
}

fn peak_above_transient(trace: &Trace) -> Option<Warning> {
    let PhaseReading { before, after, .. } = trace.reading(Phase::Measured)?;
    let seen_bytes = after.peak_allocated_bytes.saturating_sub(before.allocated_bytes);
    let stated_bytes = trace.transient_peak_bytes;
    let warning = Warning::PeakAboveTransient { stated_bytes, seen_bytes };
    (seen_bytes > stated_bytes).then_some(warning)
}

/// How free memory moved, apart from what the process's own allocator took or gave back.
enum Drift {
    Rose(u64),
    Fell(u64),
}

impl Drift {
    fn between(before: &MemoryReading, after: &MemoryReading) -> Self {
        // What is free or held by the allocator changes only through others.
        let had = before.driver_free_bytes.saturating_add(before.reserved_bytes);
        let has = after.driver_free_bytes.saturating_add(after.reserved_bytes);
        if has >= had { Self::Rose(has - had) } else { Self::Fell(had - has) }
    }
}
