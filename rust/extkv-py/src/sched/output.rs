//! What one step brought, as Python reads it.

use dspark_sched::{FinishReason, Finished, RequestOutput, StepOutput, TokenId};
use pyo3::prelude::*;

use super::arrays::{Array, array};

/// One step's outcome in arrays, copied; int32 where nothing else is said.
#[pyclass(frozen, get_all, name = "StepOutput", module = "extkv._extkv")]
pub(crate) struct PyStepOutput {
    step_id: u64,
    num_requests: usize,
    /// uint64.
    request_ids: Array,
    /// One more than requests.
    token_offsets: Array,
    token_ids: Array,
    /// int8: 0 stop, 1 length, 2 abort, 3 error, as vLLM counts them; -1 while it goes on.
    finish_reasons: Array,
    /// -1 where none of `stop_token_ids` ended the request.
    stop_token_ids: Array,
    num_draft_tokens: Array,
    num_accepted_tokens: Array,
    num_computed_tokens: Array,
    num_cached_tokens: Array,
}

impl PyStepOutput {
    pub(super) fn copy(py: Python<'_>, output: &StepOutput) -> PyResult<Self> {
        let rows = || output.requests.iter();
        let counts = |count: fn(&RequestOutput) -> u32| array(py, rows().map(count));
        Ok(Self {
            step_id: output.step_id.0,
            num_requests: rows().len(),
            request_ids: array(py, rows().map(|row| row.request_id))?,
            token_offsets: array(py, offsets(output).into_iter())?,
            token_ids: array(py, output.token_ids.iter().copied())?,
            finish_reasons: array(py, rows().map(|row| finish_code(row.finished)))?,
            stop_token_ids: array(py, rows().map(|row| stop_token(row.finished)))?,
            num_draft_tokens: counts(|row| row.num_draft_tokens.0)?,
            num_accepted_tokens: counts(|row| row.num_accepted_tokens.0)?,
            num_computed_tokens: counts(|row| row.num_computed_tokens.0)?,
            num_cached_tokens: counts(|row| row.num_cached_tokens.0)?,
        })
    }
}

/// Where each row's tokens begin, and the end. A step has fewer tokens than int32 has numbers.
fn offsets(output: &StepOutput) -> Vec<i32> {
    let ends = output.requests.iter().map(|row| row.token_range.end);
    let int32 = |end: usize| i32::try_from(end).unwrap_or(i32::MAX);
    std::iter::once(0).chain(ends).map(int32).collect()
}

fn finish_code(finished: Option<Finished>) -> i8 {
    match finished.map(|end| end.reason) {
        None => -1,
        Some(FinishReason::Stop) => 0,
        Some(FinishReason::Length) => 1,
        Some(FinishReason::Abort) => 2,
        Some(FinishReason::Error) => 3,
    }
}

fn stop_token(finished: Option<Finished>) -> i32 {
    finished.and_then(|end| end.stop_token_id).map_or(-1, TokenId::as_int32)
}
