//! Taking a step's result: accepted tokens in, rejected drafts rolled back, ends found.
//!
//! All results are checked before any is applied, so a refused update can be corrected or the
//! step cancelled.

use crate::error::{Error, Result};
use crate::ids::{NumTokens, RequestId, StepId, TokenId};
use crate::output::{RequestOutput, RequestResult, RowOutcome, StepOutput};
use crate::request::{Request, RequestStatus};
use crate::request_table::RequestIndex;
use crate::scheduler::Scheduler;
use crate::stop::{FinishReason, Finished};

impl Scheduler {
    /// Ends the step in flight with its results, in any order. Each request whose row samples
    /// needs one; those ended meanwhile may have one, which is ignored.
    ///
    /// # Errors
    /// [`Error::NoStepInFlight`], [`Error::NotScheduled`], [`Error::DuplicateResult`],
    /// [`Error::MissingResult`], [`Error::WrongTokenCount`], [`Error::TokenOutOfVocabulary`] or
    /// [`Error::AcceptedTokenMismatch`]; the step is then still in flight.
    pub fn update(&mut self, results: &[RequestResult<'_>]) -> Result<&StepOutput> {
        self.match_results(results)?;
        self.is_in_flight = false;
        self.output.begin(self.plan.step_id);
        for row in 0..self.rows.len() {
            let Some(index) = self.live_request(row) else {
                continue;
            };
            let result = self.result_of_row.get(row).copied().flatten();
            let outcome = result.and_then(|number| results.get(number));
            self.apply(index, outcome.map_or(RowOutcome::Sampled(&[]), |result| result.outcome))?;
        }
        Ok(&self.output)
    }

    /// Gives the step in flight up, as if it had not been scheduled; drafts are dropped. For a
    /// runner that failed or was interrupted: the next plan computes the same tokens again.
    ///
    /// # Errors
    /// [`Error::NoStepInFlight`].
    pub fn cancel_step(&mut self) -> Result<()> {
        if !self.is_in_flight {
            return Err(Error::NoStepInFlight);
        }
        self.is_in_flight = false;
        for row in 0..self.rows.len() {
            let Some(index) = self.live_request(row) else {
                continue;
            };
            let request = self.requests.get_mut(index)?;
            request.num_computed_tokens.0 -= self.rows[row].num_tokens;
            request.row_in_flight = None;
            request.drafts.clear();
        }
        Ok(())
    }

    /// Ends a live request and gives back all it holds.
    pub(crate) fn remove(&mut self, index: RequestIndex, end: Finished) -> Result<Request> {
        let mut request = self.requests.remove(index)?;
        self.waiting.remove(&(request.rank, index));
        self.running.retain(|&other| other != index);
        self.kv.release(&mut request)?;
        if let Some(slot) = request.slot.take() {
            self.slots.release(slot);
        }
        request.status = RequestStatus::Finished(end);
        request.drafts.clear();
        request.row_in_flight = None;
        self.newly_finished.push(request.id());
        Ok(request)
    }

    /// Finds each row's result and checks it.
    fn match_results(&mut self, results: &[RequestResult<'_>]) -> Result<()> {
        let step_id = self.step_in_flight().ok_or(Error::NoStepInFlight)?;
        self.result_of_row.clear();
        self.result_of_row.resize(self.rows.len(), None);
        for (number, result) in results.iter().enumerate() {
            let request_id = result.request_id;
            let row = self.row_of(request_id, number);
            let row = row.ok_or(Error::NotScheduled { request_id, step_id })?;
            if self.result_of_row[row].replace(number).is_some() {
                return Err(Error::DuplicateResult { request_id, step_id });
            }
            if let (Some(index), RowOutcome::Sampled(tokens)) =
                (self.live_request(row), result.outcome)
            {
                self.check_tokens(self.requests.get(index)?, self.rows[row].is_sampled, tokens)?;
            }
        }
        self.check_complete(step_id)
    }

    fn check_complete(&self, step_id: StepId) -> Result<()> {
        for (row, result) in self.result_of_row.iter().enumerate() {
            let is_wanted = self.rows[row].is_sampled && self.live_request(row).is_some();
            if is_wanted && result.is_none() {
                let request_id = self.plan.request_ids[row];
                return Err(Error::MissingResult { request_id, step_id });
            }
        }
        Ok(())
    }

    /// Row of a request in the step in flight; runners mostly report in row order.
    fn row_of(&self, request_id: RequestId, hint: usize) -> Option<usize> {
        if self.plan.request_ids.get(hint) == Some(&request_id) {
            return Some(hint);
        }
        self.plan.request_ids.iter().position(|&other| other == request_id)
    }

    /// The request of a row, unless it ended since. Its index or its id may belong to another by
    /// now, but that one is in no row.
    fn live_request(&self, row: usize) -> Option<RequestIndex> {
        let index = self.rows.get(row)?.index;
        let request = self.requests.get(index).ok()?;
        (request.row_in_flight == Some(row)).then_some(index)
    }

    fn check_tokens(&self, request: &Request, is_sampled: bool, tokens: &[TokenId]) -> Result<()> {
        let request_id = request.id();
        let found = NumTokens::of(tokens);
        let least = NumTokens(u32::from(is_sampled));
        let limit = if is_sampled { NumTokens(request.num_drafts() + 1) } else { least };
        if found < least || found > limit {
            return Err(Error::WrongTokenCount { request_id, found, least, limit });
        }
        self.check_vocabulary(request_id, tokens.iter().copied())?;
        match tokens.split_last() {
            Some((_, accepted)) => check_accepted(request, accepted),
            None => Ok(()),
        }
    }

    fn apply(&mut self, index: RequestIndex, outcome: RowOutcome<'_>) -> Result<()> {
        let request = self.requests.get_mut(index)?;
        request.row_in_flight = None;
        let num_drafts = request.num_drafts();
        request.drafts.clear();
        match outcome {
            RowOutcome::Failed => {
                self.push_output(index, &[], Some(FinishReason::Error.into()), [num_drafts, 0])
            }
            RowOutcome::Sampled([]) => self.kv.register(request),
            RowOutcome::Sampled(tokens) => {
                let num_accepted = NumTokens::of(tokens).0 - 1;
                request.num_computed_tokens.0 -= num_drafts - num_accepted;
                let (num_kept, end) = request.append(tokens, self.config.max_model_len);
                // After a cut, what was computed past the last token kept does not count.
                request.num_computed_tokens = request.num_computed_tokens.min(request.num_tokens());
                self.kv.register(request)?;
                self.push_output(index, &tokens[..num_kept], end, [num_drafts, num_accepted])
            }
        }
    }

    /// Reports a request's step, and removes the request when it was its last.
    fn push_output(
        &mut self,
        index: RequestIndex,
        tokens: &[TokenId],
        finished: Option<Finished>,
        [num_drafts, num_accepted]: [u32; 2],
    ) -> Result<()> {
        let request = self.requests.get(index)?;
        let start = self.output.token_ids.len();
        self.output.token_ids.extend_from_slice(tokens);
        self.output.requests.push(RequestOutput {
            request_id: request.id(),
            token_range: start..start + tokens.len(),
            finished,
            num_draft_tokens: NumTokens(num_drafts),
            num_accepted_tokens: NumTokens(num_accepted),
            num_computed_tokens: request.num_computed_tokens(),
            num_cached_tokens: request.num_cached_tokens(),
        });
        self.stats.num_draft_tokens += u64::from(num_drafts);
        self.stats.num_accepted_tokens += u64::from(num_accepted);
        match finished {
            Some(end) => self.remove(index, end).map(drop),
            None => Ok(()),
        }
    }
}

/// The cache holds keys and values of the drafts, so only those can be accepted. The token of a
/// placeholder is known to the runner alone.
fn check_accepted(request: &Request, accepted: &[TokenId]) -> Result<()> {
    for (index, (&found, draft)) in (0..).zip(accepted.iter().zip(request.drafts())) {
        if let Some(draft) = draft.filter(|&draft| draft != found) {
            return Err(Error::AcceptedTokenMismatch {
                request_id: request.id(),
                index,
                found,
                draft,
            });
        }
    }
    Ok(())
}
