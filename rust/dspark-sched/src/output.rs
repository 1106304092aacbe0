//! What a step's result is and what the scheduler makes of it.

use std::ops::Range;

use crate::ids::{NumTokens, RequestId, StepId, TokenId};
use crate::stop::Finished;

/// A request's result, as the runner reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestResult<'a> {
    /// A request of the step.
    pub request_id: RequestId,
    /// What came of it.
    pub outcome: RowOutcome<'a>,
}

/// What came of one row of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOutcome<'a> {
    /// Accepted drafts in order, then the one token sampled after them. Empty for a row that
    /// samples nothing; such a row may also have no result at all.
    Sampled(&'a [TokenId]),
    /// The row cannot be used, for example because its logits hold NaN.
    Failed,
}

/// What one step brought one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestOutput {
    /// The request.
    pub request_id: RequestId,
    /// Its new tokens, within [`StepOutput::token_ids`].
    pub token_range: Range<usize>,
    /// Its end, if this step was its last.
    pub finished: Option<Finished>,
    /// Drafts that the step verified.
    pub num_draft_tokens: NumTokens,
    /// Drafts that were accepted, those past a stop included.
    pub num_accepted_tokens: NumTokens,
    /// Tokens whose keys and values count from here on: rejected drafts and what was computed past
    /// a stop do not.
    pub num_computed_tokens: NumTokens,
    /// Prompt tokens that the prefix cache saved at the first admission.
    pub num_cached_tokens: NumTokens,
}

/// What one step brought, for each request with a new token or an end, in row order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepOutput {
    /// The step.
    pub step_id: StepId,
    /// One entry per request.
    pub requests: Vec<RequestOutput>,
    /// New tokens of all requests.
    pub token_ids: Vec<TokenId>,
}

impl StepOutput {
    /// New tokens of one of `requests`.
    #[must_use]
    pub fn new_token_ids(&self, output: &RequestOutput) -> &[TokenId] {
        self.token_ids.get(output.token_range.clone()).unwrap_or_default()
    }

    pub(crate) fn begin(&mut self, step_id: StepId) {
        self.step_id = step_id;
        self.requests.clear();
        self.token_ids.clear();
    }
}
