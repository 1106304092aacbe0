//! Sizes of a cache: JSON in, JSON out, so that a trace or a record is the same on any machine.

use extkv_core::kv::{Adjustment, Estimate, NumBlocks, RecordError, SizingRecord, Utilization};
use pyo3::prelude::*;

use crate::error::BindingResult;
use crate::kv::DtypeArg;

/// A record as JSON, its plan as a table, and as one sentence.
type Sizing = (String, String, String);

/// Size a cache from a trace.
#[pyfunction]
pub(crate) fn size_from_trace(trace_json: &str) -> BindingResult<Sizing> {
    Ok(written(&SizingRecord::from_trace_json(trace_json)?)?)
}

/// Make the plan of a record again, which must be the one stored.
#[pyfunction]
pub(crate) fn replay_record(record_json: &str) -> BindingResult<Sizing> {
    Ok(written(&SizingRecord::from_json(record_json)?)?)
}

/// The record with the blocks that all ranks have.
#[pyfunction]
pub(crate) fn limit_record(record_json: &str, num_blocks: u64) -> BindingResult<Sizing> {
    let blocks = NumBlocks(num_blocks);
    adjusted(record_json, Adjustment::OtherRank { blocks })
}

/// The record with the blocks that still fit just before committing.
#[pyfunction]
pub(crate) fn check_commit(
    record_json: &str,
    driver_free_bytes: u64,
    committed_bytes: u64,
) -> BindingResult<Sizing> {
    let now = Adjustment::AtCommit { driver_free_bytes, committed_bytes };
    adjusted(record_json, now)
}

/// The minimum of blocks over the records of all ranks, and the first rank that has it.
#[pyfunction]
pub(crate) fn agree(record_jsons: Vec<String>) -> BindingResult<(u64, usize)> {
    let plan = |text: &String| SizingRecord::from_json(text).map(|record| record.plan);
    let plans: Result<Vec<_>, _> = record_jsons.iter().map(plan).collect();
    let agreement = extkv_core::kv::agree(&plans?)?;
    Ok((agreement.blocks.0, agreement.limiting_rank))
}

/// Blocks to reserve addresses for before anything is measured.
#[pyfunction]
pub(crate) fn reservation_blocks(
    device_total_bytes: u64,
    gpu_memory_utilization: f64,
    bytes_per_block: u64,
) -> BindingResult<u64> {
    let utilization = Utilization::from_ratio(gpu_memory_utilization)?;
    let blocks =
        extkv_core::kv::reservation_blocks(device_total_bytes, utilization, bytes_per_block)?;
    Ok(blocks.0)
}

/// Persistent bytes of an encoder cache.
#[pyfunction]
pub(crate) fn encoder_cache_bytes(
    cache_size: u64,
    embed_size: u64,
    dtype: DtypeArg,
) -> BindingResult<u64> {
    let bytes = extkv_core::kv::encoder_cache_bytes(cache_size, embed_size, dtype.0)?;
    Ok(bytes)
}

/// Estimate a size from facts and assumptions: JSON and a table.
#[pyfunction]
pub(crate) fn estimate(
    model_facts_json: &str,
    assumptions_json: &str,
) -> BindingResult<(String, String)> {
    let estimate = Estimate::from_json(model_facts_json, assumptions_json)?;
    Ok((estimate.to_json()?, estimate.table()))
}

fn adjusted(record_json: &str, adjustment: Adjustment) -> BindingResult<Sizing> {
    let record = SizingRecord::from_json(record_json)?;
    Ok(written(&record.adjusted(adjustment)?)?)
}

fn written(record: &SizingRecord) -> Result<Sizing, RecordError> {
    let plan = &record.plan;
    Ok((record.to_json()?, plan.table(), plan.sentence()))
}
