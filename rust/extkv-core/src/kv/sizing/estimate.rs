//! How many blocks will fit, from a model's facts alone, before anything is loaded.
//!
//! The same arithmetic as [`SizingPlan`] on a trace in which every measured number is assumed.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::error::{RecordError, SizingError};
use super::facts::CacheFacts;
use super::plan::SizingPlan;
use super::reservation_blocks;
use super::table::{gib, grouped};
use super::trace::{MemoryReading, Phase, PhaseReading, SizingMode, Trace};
use super::utilization::Utilization;
use crate::units::Bytes;

/// What only a run can measure. The defaults are round guesses for a model of some 8 billion
/// parameters on one device; they are printed with the estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Assumptions {
    /// Context, libraries and their workspaces.
    pub workspace_bytes: u64,
    /// Captured graphs.
    pub graphs_bytes: u64,
    /// Transient peak of the worst step.
    pub transient_bytes: u64,
    /// Left free on purpose.
    pub reserve_bytes: u64,
}

impl Default for Assumptions {
    fn default() -> Self {
        Self {
            workspace_bytes: 1 << 30,
            graphs_bytes: 1 << 30,
            transient_bytes: 1 << 30,
            reserve_bytes: 256 << 20,
        }
    }
}

/// What is known of a model and a device without loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFacts {
    /// Memory of the device.
    pub device_total_bytes: u64,
    /// Bytes of all parameters on it.
    pub parameter_bytes: u64,
    /// Bytes of the encoder caches.
    #[serde(default)]
    pub encoder_cache_bytes: u64,
    /// The cache.
    pub cache: CacheFacts,
    /// Granularity of physical memory.
    pub granule_bytes: u64,
    /// Tokens of the longest request.
    pub max_model_len: u64,
    /// Requests at once.
    pub max_num_seqs: u64,
    /// Share of the device that the engine may use.
    pub gpu_memory_utilization: Utilization,
}

/// A plan whose measured parts are assumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// The plan.
    pub plan: SizingPlan,
    /// Requests at once that were asked for.
    pub max_num_seqs: u64,
    /// What was assumed.
    pub assumptions: Assumptions,
}

#[derive(Serialize)]
struct Written<'a> {
    summary: Summary,
    #[serde(flatten)]
    estimate: &'a Estimate,
}

#[derive(Serialize)]
struct Summary {
    concurrency: f64,
    bytes_per_token: u64,
    all_sequences_fit: bool,
}

impl Estimate {
    /// Estimates the size of a cache.
    ///
    /// # Errors
    /// [`SizingError::ModelTooLarge`]; otherwise as [`SizingPlan::new`].
    pub fn new(facts: &ModelFacts, assumptions: Assumptions) -> Result<Self, SizingError> {
        let plan = SizingPlan::new(&assumed_trace(facts, &assumptions)?)?;
        Ok(Self { plan, max_num_seqs: facts.max_num_seqs, assumptions })
    }

    /// Estimates from facts and assumptions in JSON; assumptions left out have their defaults.
    ///
    /// # Errors
    /// [`RecordError::Json`], [`RecordError::Sizing`].
    pub fn from_json(facts: &str, assumptions: &str) -> Result<Self, RecordError> {
        let facts = serde_json::from_str(facts)?;
        Ok(Self::new(&facts, serde_json::from_str(assumptions)?)?)
    }

    /// Writes the estimate as indented JSON, with what follows from it.
    ///
    /// # Errors
    /// [`RecordError::Json`].
    pub fn to_json(&self) -> Result<String, RecordError> {
        let summary = Summary {
            concurrency: self.plan.concurrency(),
            bytes_per_token: self.plan.cache.bytes_per_token(),
            all_sequences_fit: self.all_sequences_fit(),
        };
        let estimate = self;
        Ok(serde_json::to_string_pretty(&Written { summary, estimate })?)
    }

    /// Whether `max_num_seqs` requests of `max_model_len` tokens fit at once.
    #[must_use]
    pub fn all_sequences_fit(&self) -> bool {
        self.blocks_for_all() <= self.plan.blocks.0
    }

    fn blocks_for_all(&self) -> u64 {
        self.max_num_seqs.saturating_mul(self.plan.blocks_per_request)
    }

    /// The table of the plan, what all sequences need, and what was assumed.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = self.plan.table();
        let blocks = self.blocks_for_all();
        let bytes = blocks.saturating_mul(self.plan.cache.bytes_per_block);
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            table,
            "max_num_seqs = {} such requests need {} blocks ({} GiB): {}",
            grouped(self.max_num_seqs),
            grouped(blocks),
            gib(bytes),
            if self.all_sequences_fit() { "they fit" } else { "they do not all fit" },
        );
        let assumed = &self.assumptions;
        let _ = writeln!(
            table,
            "assumed, not measured: workspace {}, graphs {}, transient peak {}, reserve {} GiB",
            gib(assumed.workspace_bytes),
            gib(assumed.graphs_bytes),
            gib(assumed.transient_bytes),
            gib(assumed.reserve_bytes),
        );
        table
    }
}

/// The trace of a start in which each phase takes what is assumed of it.
fn assumed_trace(facts: &ModelFacts, assumed: &Assumptions) -> Result<Trace, SizingError> {
    let (total, utilization) = (facts.device_total_bytes, facts.gpu_memory_utilization);
    let reserved = reservation_blocks(total, utilization, facts.cache.bytes_per_block)?;
    Ok(Trace {
        device_total_bytes: total,
        phases: assumed_phases(facts, assumed)?,
        committed_bytes: 0,
        transient_peak_bytes: assumed.transient_bytes,
        reserve_bytes: assumed.reserve_bytes,
        foreign_bytes: 0,
        encoder_cache_bytes: facts.encoder_cache_bytes,
        granule_bytes: facts.granule_bytes,
        cache: facts.cache,
        reserved_blocks: Some(reserved),
        max_model_len: facts.max_model_len,
        gpu_memory_utilization: utilization,
        kv_cache_memory_bytes: None,
        mode: SizingMode::Extensible,
    })
}

fn assumed_phases(
    facts: &ModelFacts,
    assumed: &Assumptions,
) -> Result<Vec<PhaseReading>, SizingError> {
    let taken = [
        (Phase::Start, assumed.workspace_bytes),
        (Phase::WeightsLoaded, facts.parameter_bytes),
        (Phase::Profiled, facts.encoder_cache_bytes),
        (Phase::Captured, assumed.graphs_bytes),
        (Phase::Measured, 0),
    ];
    let total = facts.device_total_bytes;
    let needed = taken.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
    if needed > total {
        return Err(SizingError::ModelTooLarge { needed: Bytes(needed), total: Bytes(total) });
    }
    let mut now = MemoryReading { driver_free_bytes: total, ..MemoryReading::default() };
    let phases = taken.into_iter().map(|(phase, bytes)| {
        let before = now;
        now.driver_free_bytes -= bytes;
        // Tensors come from the allocator; context and graphs do not.
        if matches!(phase, Phase::WeightsLoaded | Phase::Profiled) {
            now.allocated_bytes += bytes;
            now.reserved_bytes += bytes;
        }
        PhaseReading { phase, before, after: now }
    });
    Ok(phases.collect())
}
