//! A step's results as a runner has them: flat arrays, checked to fit each other.

use std::collections::BTreeSet;

use dspark_sched::{RequestId, RequestResult, RowOutcome, TokenId};

use super::args::{Arg, ArgumentError, Refusal, TokenIds};

/// Tokens of each request, and who failed.
pub(super) struct FlatResults {
    request_ids: Vec<u64>,
    token_offsets: Vec<u32>,
    token_ids: Vec<TokenId>,
    failed: BTreeSet<u64>,
}

impl FlatResults {
    pub(super) fn parse(
        request_ids: Arg<Vec<u64>>,
        token_offsets: Arg<Vec<u32>>,
        token_ids: Arg<TokenIds>,
        failed_request_ids: Arg<Vec<u64>>,
    ) -> Result<Self, ArgumentError> {
        let results = Self {
            request_ids: request_ids.named("request_ids")?,
            token_offsets: token_offsets.named("token_offsets")?,
            token_ids: token_ids.named("token_ids")?.0,
            failed: failed_request_ids.named("failed_request_ids")?.into_iter().collect(),
        };
        results.check_offsets()?;
        Ok(results)
    }

    fn check_offsets(&self) -> Result<(), ArgumentError> {
        let (num_request_ids, num_token_ids) = (self.request_ids.len(), self.token_ids.len());
        let end = self.token_offsets.last().map(|&end| end as usize);
        let fits = self.token_offsets.first() == Some(&0)
            && end == Some(num_token_ids)
            && self.token_offsets.is_sorted()
            && self.token_offsets.len() == num_request_ids + 1;
        let refusal = Refusal::Offsets { num_request_ids, num_token_ids };
        if fits { Ok(()) } else { Err(ArgumentError { name: "token_offsets", refusal }) }
    }

    /// One result per request; tokens of a failed one are left out.
    pub(super) fn results(&self) -> Vec<RequestResult<'_>> {
        let result = |id, outcome| RequestResult { request_id: RequestId(id), outcome };
        let tokens = |&[start, end]: &[u32; 2]| {
            self.token_ids.get(start as usize..end as usize).unwrap_or_default()
        };
        let rows = self.request_ids.iter().zip(self.token_offsets.array_windows());
        let sampled = rows
            .filter(|(id, _)| !self.failed.contains(id))
            .map(|(&id, span)| result(id, RowOutcome::Sampled(tokens(span))));
        let failed = self.failed.iter().map(|&id| result(id, RowOutcome::Failed));
        sampled.chain(failed).collect()
    }
}
