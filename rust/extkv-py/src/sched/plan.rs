//! What one step computes, as Python reads it.

use dspark_sched::{RequestId, SchedulePlan};
use pyo3::prelude::*;

use super::arrays::{Array, array};

/// One step's arrays, copied; int32 where nothing else is said.
#[pyclass(frozen, get_all, name = "Plan", module = "extkv._extkv")]
pub(crate) struct PyPlan {
    step_id: u64,
    num_requests: usize,
    num_tokens: usize,
    num_decode_requests: u32,
    block_table_width: u32,
    is_empty: bool,
    is_pure_decode: bool,
    preempted_request_ids: Vec<u64>,
    finished_request_ids: Vec<u64>,
    /// uint64.
    request_ids: Array,
    request_slots: Array,
    /// uint32.
    slot_generations: Array,
    num_scheduled_tokens: Array,
    num_computed_tokens: Array,
    seq_lens: Array,
    num_draft_tokens: Array,
    query_start_loc: Array,
    input_token_ids: Array,
    /// int64.
    positions: Array,
    /// int64.
    slot_mapping: Array,
    sample_rows: Array,
    sample_start_loc: Array,
    block_tables: Array,
}

impl PyPlan {
    pub(super) fn copy(py: Python<'_>, plan: &SchedulePlan) -> PyResult<Self> {
        let int32s = |items: &[i32]| array(py, items.iter().copied());
        let int64s = |items: &[i64]| array(py, items.iter().copied());
        Ok(Self {
            step_id: plan.step_id.0,
            num_requests: plan.num_requests(),
            num_tokens: plan.num_tokens(),
            num_decode_requests: plan.num_decode_requests,
            block_table_width: plan.block_table_width,
            is_empty: plan.is_empty(),
            is_pure_decode: plan.is_pure_decode(),
            preempted_request_ids: numbers(&plan.preempted_request_ids),
            finished_request_ids: numbers(&plan.finished_request_ids),
            request_ids: array(py, plan.request_ids.iter().copied())?,
            request_slots: int32s(&plan.request_slots)?,
            slot_generations: array(py, plan.slot_generations.iter().copied())?,
            num_scheduled_tokens: int32s(&plan.num_scheduled_tokens)?,
            num_computed_tokens: int32s(&plan.num_computed_tokens)?,
            seq_lens: int32s(&plan.seq_lens)?,
            num_draft_tokens: int32s(&plan.num_draft_tokens)?,
            query_start_loc: int32s(&plan.query_start_loc)?,
            input_token_ids: int32s(&plan.input_token_ids)?,
            positions: int64s(&plan.positions)?,
            slot_mapping: int64s(&plan.slot_mapping)?,
            sample_rows: int32s(&plan.sample_rows)?,
            sample_start_loc: int32s(&plan.sample_start_loc)?,
            block_tables: int32s(&plan.block_tables)?,
        })
    }
}

fn numbers(request_ids: &[RequestId]) -> Vec<u64> {
    request_ids.iter().map(|request_id| request_id.0).collect()
}
