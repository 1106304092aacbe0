//! A trace and its plan in one JSON document, for a bug report or a replay without a device.

use serde::{Deserialize, Serialize};

use super::error::{RecordError, SizingError};
use super::plan::SizingPlan;
use super::trace::Trace;
use crate::kv::spec::NumBlocks;

/// The format that this version writes and reads.
const FORMAT: u32 = 1;

/// What was measured and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizingRecord {
    /// The input.
    pub trace: Trace,
    /// The output.
    pub plan: SizingPlan,
}

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    summary: Summary,
    plan: &'a SizingPlan,
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
        let plan = SizingPlan::new(&trace)?;
        Ok(Self { trace, plan })
    }

    /// Sizes a cache from a trace in JSON.
    ///
    /// # Errors
    /// [`RecordError::Json`], [`RecordError::Sizing`].
    pub fn from_trace_json(text: &str) -> Result<Self, RecordError> {
        Ok(Self::new(serde_json::from_str(text)?)?)
    }

    /// Makes the plan again from the trace alone.
    ///
    /// # Errors
    /// As [`SizingPlan::new`].
    pub fn replay(&self) -> Result<SizingPlan, SizingError> {
        SizingPlan::new(&self.trace)
    }

    /// Writes the record as indented JSON, with a summary for people.
    ///
    /// # Errors
    /// [`RecordError::Json`].
    pub fn to_json(&self) -> Result<String, RecordError> {
        let (plan, trace) = (&self.plan, &self.trace);
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
            return Err(RecordError::Format {
                found: format,
                expected: FORMAT,
            });
        }
        let Read {
            plan: stored,
            trace,
        } = serde_json::from_str(text)?;
        let record = Self::new(trace)?;
        if serde_json::to_value(&record.plan)? != stored {
            let BlocksOnly { blocks } = serde_json::from_value(stored)?;
            let (stored, replayed) = (blocks, record.plan.blocks);
            return Err(RecordError::PlanDiffers { stored, replayed });
        }
        Ok(record)
    }
}
