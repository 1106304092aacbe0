//! What the scheduler's tests share: a toy model, a paged toy cache, and an engine around them.

#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "numbers of tests are small"
)]

mod engine;
mod toy;

use dspark_sched::{
    BlockSize, ChunkedPrefill, NewRequest, NumBlocks, NumTokens, RequestId, RequestResult,
    RowOutcome, SchedulePlan, Scheduler, SchedulerConfig, SchedulingPolicy, TokenId,
};

pub(crate) use engine::{Ended, Engine};

/// Limits that no small test meets: block size 4, 64 blocks, 3 drafts.
pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: NumTokens(64),
        max_model_len: NumTokens(64),
        vocab_size: 50,
        block_size: BlockSize::new(4).unwrap(),
        num_blocks: NumBlocks(64),
        num_speculative_tokens: NumTokens(3),
        num_lookahead_tokens: NumTokens(3),
        policy: SchedulingPolicy::Fcfs,
        chunked_prefill: ChunkedPrefill::Enabled { long_prefill_token_threshold: None },
        enable_prefix_caching: true,
    }
}

pub(crate) fn scheduler(change: impl FnOnce(&mut SchedulerConfig)) -> Scheduler {
    let mut config = config();
    change(&mut config);
    Scheduler::new(config).unwrap()
}

pub(crate) fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    ids.into_iter().map(TokenId).collect()
}

/// A request for 8 tokens with the prompt `first, first + 1, …`.
pub(crate) fn request(id: u64, first: u32, len: u32) -> NewRequest {
    NewRequest::new(RequestId(id), tokens(first..first + len), NumTokens(8))
}

pub(crate) fn sampled(id: u64, tokens: &[TokenId]) -> RequestResult<'_> {
    RequestResult { request_id: RequestId(id), outcome: RowOutcome::Sampled(tokens) }
}

pub(crate) fn ids(ids: &[RequestId]) -> Vec<u64> {
    ids.iter().map(|id| id.0).collect()
}

/// Schedules, and answers every sampled row with token 1, so that drafts are rejected.
pub(crate) fn step(scheduler: &mut Scheduler) -> SchedulePlan {
    let plan = scheduler.schedule().unwrap().clone();
    scheduler.check_integrity().unwrap();
    if !plan.is_empty() {
        let one = [TokenId(1)];
        let results: Vec<RequestResult<'_>> = (0..plan.num_requests())
            .filter(|&row| plan.sample_start_loc[row] < plan.sample_start_loc[row + 1])
            .map(|row| sampled(plan.request_ids[row].0, &one))
            .collect();
        scheduler.update(&results).unwrap();
    }
    scheduler.check_integrity().unwrap();
    plan
}
