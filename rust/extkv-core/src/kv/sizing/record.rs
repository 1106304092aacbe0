//! A trace and its plan in one JSON document, for a bug report or a replay without a device.

use serde::{Deserialize, Serialize};

use super::error::{RecordError, SizingError};
use super::parts::Limit;
use super::plan::SizingPlan;
use super::trace::Trace;
use crate::kv::spec::NumBlocks;

/// The format that this version writes and reads.
const FORMAT: u32 = 1;

/// What made a plan smaller after it was sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Adjustment {
    /// Another rank has fewer blocks.
    OtherRank {
        /// Blocks that all ranks have.
        blocks: NumBlocks,
    },
    /// The device was looked at once more just before committing.
    AtCommit {
        /// Free memory at that moment.
        driver_free_bytes: u64,
        /// Physical bytes that the cache had then.
        committed_bytes: u64,
    },
}

impl Adjustment {
    fn apply(self, plan: &SizingPlan) -> Result<SizingPlan, SizingError> {
        match self {
            Self::OtherRank { blocks } => plan.at_blocks(blocks, Limit::OtherRank),
            Self::AtCommit { driver_free_bytes, committed_bytes } => {
                plan.at_commit(driver_free_bytes, committed_bytes)
            }
        }
    }
}

/// What was measured and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizingRecord {
    /// The input.
    pub trace: Trace,
    /// What changed the plan since, in order.
    pub adjustments: Vec<Adjustment>,
    /// The output.
    pub plan: SizingPlan,
}

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    summary: Summary,
    plan: &'a SizingPlan,
    adjustments: &'a [Adjustment],
    trace: &'a Trace,
}

/// For readers of the file; not read back.
#[derive(Serialize)]
struct Summary {
    sentence: String,
    concurrency: f64,
    bytes_per_block: u64,
    bytes_per_token: u64,
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

#[derive(Deserialize)]
struct Read {
    plan: serde_json::Value,
    #[serde(default)]
    adjustments: Vec<Adjustment>,
    trace: Trace,
}

#[derive(Deserialize)]
struct BlocksOnly {
    blocks: NumBlocks,
}

impl SizingRecord {
    /// Sizes a cache and keeps the trace.
    ///
    /// # Errors
    /// As [`SizingPlan::new`].
    pub fn new(trace: Trace) -> Result<Self, SizingError> {
        Self::adjusted_from(trace, Vec::new())
    }

    /// Sizes a cache from a trace in JSON.
    ///
    /// # Errors
    /// [`RecordError::Json`], [`RecordError::Sizing`].
    pub fn from_trace_json(text: &str) -> Result<Self, RecordError> {
        Ok(Self::new(serde_json::from_str(text)?)?)
    }

    /// Changes the plan and keeps why.
    ///
    /// # Errors
    /// As [`SizingPlan::at_blocks`] and [`SizingPlan::at_commit`].
    pub fn adjusted(mut self, adjustment: Adjustment) -> Result<Self, SizingError> {
        self.plan = adjustment.apply(&self.plan)?;
        self.adjustments.push(adjustment);
        Ok(self)
    }

    /// Makes the plan again from the trace and the adjustments alone.
    ///
    /// # Errors
    /// As [`SizingPlan::new`] and [`SizingRecord::adjusted`].
    pub fn replay(&self) -> Result<SizingPlan, SizingError> {
        Ok(Self::adjusted_from(self.trace.clone(), self.adjustments.clone())?.plan)
    }

    fn adjusted_from(trace: Trace, adjustments: Vec<Adjustment>) -> Result<Self, SizingError> {
        let sized = SizingPlan::new(&trace)?;
        let plan = (adjustments.iter()).try_fold(sized, |plan, step| step.apply(&plan))?;
        Ok(Self { trace, adjustments, plan })
    }

    /// Writes the record as indented JSON, with a summary for people.
    ///
    /// # Errors
    /// [`RecordError::Json`].
    pub fn to_json(&self) -> Result<String, RecordError> {
        let (plan, adjustments, trace) = (&self.plan, &self.adjustments, &self.trace);
        let summary = Summary {
            sentence: plan.sentence(),
            concurrency: plan.concurrency(),
            bytes_per_block: plan.cache.bytes_per_block,
            bytes_per_token: plan.cache.bytes_per_token(),
        };
        Ok(serde_json::to_string_pretty(&Written {
            format: FORMAT,
            summary,
            plan,
            adjustments,
            trace,
        })?)
    }

    /// Reads a record and makes its plan again, which must be the one stored.
    ///
    /// # Errors
    /// [`RecordError::Json`]; [`RecordError::Format`] for another format than this version's;
    /// [`RecordError::Sizing`]; [`RecordError::PlanDiffers`].
    pub fn from_json(text: &str) -> Result<Self, RecordError> {
        let FormatOnly { format } = serde_json::from_str(text)?;
        if format != FORMAT {
            return Err(RecordError::Format { found: format, expected: FORMAT });
        }
        let Read { plan: stored, adjustments, trace } = serde_json::from_str(text)?;
        let record = Self::adjusted_from(trace, adjustments)?;
        if serde_json::to_value(&record.plan)? != stored {
            let BlocksOnly { blocks } = serde_json::from_value(stored)?;
            let (stored, replayed) = (blocks, record.plan.blocks);
            return Err(RecordError::PlanDiffers { stored, replayed });
        }
        Ok(record)
    }
}
