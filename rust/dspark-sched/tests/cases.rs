//! Public failures of other engines as named tests; the numbers are those of the case list.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    ChunkedPrefill, DraftUse, FinishReason, NewRequest, NumBlocks, NumTokens, RequestId, Scheduler,
    SchedulerConfig, TokenId, default_block_hash, survival,
};
use support::{Engine, ids, sampled, scheduler, step, tokens};

const PLACEHOLDERS: [Option<TokenId>; 3] = [None; 3];

/// B22: request 2 is preempted with placeholders outstanding and comes back beside request 1.
#[test]
fn b22_placeholders_of_a_preempted_request_reach_no_embedding() {
    let mut config = support::config();
    config.num_blocks = NumBlocks(9);
    config.enable_prefix_caching = false;
    let mut engine = Engine::new(config, default_block_hash, 22);
    engine.draft_percent = (0, 100);
    for (id, first) in [(1, 0), (2, 20)] {
        let mut new = support::request(id, first, 9);
        new.stopping.max_tokens = NumTokens(18);
        engine.add(new);
    }
    let mut num_preempted_with_drafts = 0;
    while !engine.live_ids().is_empty() {
        let has_drafts = engine.scheduler.requests().any(|request| !request.drafts().is_empty());
        engine.step(|_| {}, None);
        let plan = engine.plans.last().unwrap();
        num_preempted_with_drafts += usize::from(has_drafts) * plan.preempted_request_ids.len();
    }
    // The toy embedding refuses every id outside the vocabulary but a draft's -1, and `step`
    // compares each output with the unconstrained run.
    assert!(num_preempted_with_drafts > 0);
    assert_eq!(engine.ended.len(), 2);
}

/// B22: the plan in which it comes back holds its own tokens and no placeholder.
#[test]
fn b22_a_preempted_request_comes_back_without_drafts() {
    let mut scheduler = scheduler(|config| {
        config.num_blocks = NumBlocks(7);
        config.enable_prefix_caching = false;
    });
    for (id, first) in [(1, 0), (2, 20)] {
        scheduler.add_request(support::request(id, first, 8)).unwrap();
    }
    step(&mut scheduler);
    for id in [1, 2] {
        assert_eq!(scheduler.set_drafts(RequestId(id), &PLACEHOLDERS), Ok(DraftUse::Held));
    }
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.preempted_request_ids), ids(&plan.request_ids)), (vec![2], vec![1]));
    assert_eq!(scheduler.set_drafts(RequestId(2), &PLACEHOLDERS), Ok(DraftUse::Dropped));
    scheduler.abort(RequestId(1)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.input_token_ids, [20, 21, 22, 23, 24, 25, 26, 27, 1]);
    assert_eq!((plan.num_draft_tokens, plan.sample_rows), (vec![0], vec![8]));
}

/// B23: the budget lets only one of two requests with three drafts run.
#[test]
fn b23_drafts_are_dropped_when_their_request_misses_a_step() {
    let mut scheduler = scheduler(|config| {
        config.max_num_seqs = 2;
        config.max_num_batched_tokens = NumTokens(4);
    });
    for (id, first) in [(1, 0), (2, 20)] {
        scheduler.add_request(support::request(id, first, 2)).unwrap();
    }
    step(&mut scheduler);
    for id in [1, 2] {
        scheduler.set_drafts(RequestId(id), &PLACEHOLDERS).unwrap();
    }
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), plan.num_draft_tokens), (vec![1], vec![3]));
    assert!(scheduler.request(RequestId(2)).unwrap().drafts().is_empty());
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), plan.num_draft_tokens), (vec![1, 2], vec![0, 0]));
}

fn b28_config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 512,
        max_num_batched_tokens: NumTokens(2_048),
        max_model_len: NumTokens(4_096),
        num_blocks: NumBlocks(4_096),
        num_speculative_tokens: NumTokens(5),
        num_lookahead_tokens: NumTokens(5),
        ..support::config()
    }
}

/// B28: start-up succeeds, with the draft batch capped to what the token budget holds.
#[test]
fn b28_the_draft_batch_fits_the_token_budget() {
    let config = b28_config();
    assert!(Scheduler::new(config.clone()).is_ok());
    assert_eq!(config.max_num_draft_requests(), 409);
    assert_eq!(config.max_num_sample_rows(), 2_048);
}

/// B28: a budget that cannot work fails with the three numbers.
#[test]
fn b28_inconsistent_budgets_name_the_three_numbers() {
    let config = SchedulerConfig { max_num_batched_tokens: NumTokens(511), ..b28_config() };
    let text = Scheduler::new(config).unwrap_err().to_string();
    for number in ["511", "512", "5 + 1"] {
        assert!(text.contains(number), "{text}");
    }
}

const NUM_TOKENS_BEFORE: usize = 7;

/// Runs one request to the point where it verifies drafts 5, 9, 2 (end of sequence), 7.
fn b45_scheduler(change: impl FnOnce(&mut NewRequest)) -> Scheduler {
    let mut scheduler = scheduler(|config| {
        config.num_speculative_tokens = NumTokens(4);
        config.num_lookahead_tokens = NumTokens(4);
    });
    let mut new = support::request(1, 10, 6);
    change(&mut new);
    assert_eq!(new.prompt_token_ids.len() + 1, NUM_TOKENS_BEFORE);
    scheduler.add_request(new).unwrap();
    step(&mut scheduler);
    let drafts = [5, 9, 2, 7].map(|id| Some(TokenId(id)));
    scheduler.set_drafts(RequestId(1), &drafts).unwrap();
    scheduler.schedule().unwrap();
    scheduler
}

fn b45_output(scheduler: &mut Scheduler) -> (Vec<TokenId>, FinishReason, Option<TokenId>) {
    let block = tokens([5, 9, 2, 7, 8]);
    let output = scheduler.update(&[sampled(1, &block)]).unwrap();
    let finished = output.requests[0].finished.unwrap();
    let num_tokens = NUM_TOKENS_BEFORE + output.token_ids.len();
    assert_eq!(output.requests[0].num_computed_tokens.0 as usize, num_tokens, "counters roll back");
    let new_token_ids = output.new_token_ids(&output.requests[0]).to_vec();
    scheduler.check_integrity().unwrap();
    (new_token_ids, finished.reason, finished.stop_token_id)
}

/// B45: end of sequence in the middle of an accepted block.
#[test]
fn b45_an_accepted_block_is_cut_at_end_of_sequence() {
    let mut scheduler = b45_scheduler(|new| new.stopping.eos_token_id = Some(TokenId(2)));
    assert_eq!(b45_output(&mut scheduler), (tokens([5, 9, 2]), FinishReason::Stop, None));
    assert_eq!(scheduler.pool().num_free(), NumBlocks(64));
    // 6 prompt tokens, the first output and [5, 9, 2] fill two blocks and a half; 7 fills none.
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(2));
}

/// B45: a stop token at position 0.
#[test]
fn b45_an_accepted_block_is_cut_at_its_first_token() {
    let mut scheduler = b45_scheduler(|new| new.stopping.stop_token_ids = tokens([5]));
    let stop = Some(TokenId(5));
    assert_eq!(b45_output(&mut scheduler), (tokens([5]), FinishReason::Stop, stop));
}

/// B45: the length limit at position 1 (one output token came before the block).
#[test]
fn b45_an_accepted_block_is_cut_at_max_tokens() {
    let mut scheduler = b45_scheduler(|new| new.stopping.max_tokens = NumTokens(3));
    assert_eq!(b45_output(&mut scheduler), (tokens([5, 9]), FinishReason::Length, None));
}

/// B45: a cut inside a block that would fill a cache block caches only what was kept.
#[test]
fn b45_tokens_past_the_cut_are_not_cached() {
    let mut scheduler = b45_scheduler(|new| new.stopping.stop_token_ids = tokens([5]));
    // [10..14] is full; [14, 15, 1, 5] ends at the cut; [9, 2, 7] was computed past it.
    assert_eq!(b45_output(&mut scheduler).0, tokens([5]));
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(2));
    let prompt = tokens([10, 11, 12, 13, 14, 15, 1, 5, 9, 2, 7, 0, 0]);
    scheduler.add_request(NewRequest::new(RequestId(2), prompt, NumTokens(8))).unwrap();
    assert_eq!(step(&mut scheduler).num_computed_tokens, [8]);
}

/// B48: eight requests that grow to 12 blocks each share 40 blocks.
#[test]
fn b48_requests_beyond_the_pool_finish_by_queueing_or_preemption() {
    let mut config = support::config();
    config.num_blocks = NumBlocks(40);
    config.num_speculative_tokens = NumTokens(0);
    config.num_lookahead_tokens = NumTokens(0);
    let mut engine = Engine::new(config, default_block_hash, 48);
    for id in 0..8 {
        let first = u32::try_from(id).unwrap() * 5;
        let new = NewRequest::new(RequestId(id), tokens(first..first + 9), NumTokens(40));
        engine.add(new);
    }
    let mut most = 0;
    while !engine.live_ids().is_empty() {
        engine.step(|_| {}, None);
        let lengths = engine.scheduler.requests().map(|request| request.block_ids().len());
        most = most.max(lengths.max().unwrap_or(0));
    }
    assert_eq!(most, 12);
    assert!(engine.scheduler.stats().num_preemptions > 0);
    assert_eq!(engine.ended.len(), 8);
    assert_eq!(engine.scheduler.pool().num_free(), NumBlocks(40));
}

/// B50: survival of two requests, and the drafts that a budget of 4 and of 5 would take.
#[test]
fn b50_survival_orders_drafts_into_prefixes() {
    let rows = [[0.9, 0.8, 0.5], [0.6, 0.9, 0.9]];
    let survivals = rows.map(|row| survival(&row).collect::<Vec<f32>>());
    for (found, expected) in survivals.iter().flatten().zip([0.90, 0.72, 0.36, 0.60, 0.54, 0.486]) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }
    let lengths = |budget: usize| {
        let mut drafts: Vec<(f32, usize, usize)> = (0..2)
            .flat_map(|row| (0..3).map(move |index| (row, index)))
            .map(|(row, index)| (survivals[row][index], index, row))
            .collect();
        drafts.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let taken = &drafts[..budget];
        [0, 1].map(|row| taken.iter().filter(|draft| draft.2 == row).count())
    };
    assert_eq!((lengths(4), lengths(5)), ([2, 2], [2, 3]));
}

/// B50: what is no probability survives as none.
#[test]
fn b50_nan_and_infinity_survive_as_zero() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5] {
        let found: Vec<f32> = survival(&[0.5, bad, 1.0]).collect();
        assert_eq!(found, [0.5, 0.0, 0.0]);
    }
    assert_eq!(survival(&[1.5, 0.25]).collect::<Vec<f32>>(), [1.0, 0.25]);
    assert_eq!(survival(&[]).count(), 0);
}

/// B31: 1,025 tokens, block size 256: the second run reuses 1,024.
#[test]
fn b31_a_hit_leaves_one_token() {
    let mut scheduler = scheduler(|config| {
        config.block_size = dspark_sched::BlockSize::new(256).unwrap();
        config.max_model_len = NumTokens(2_048);
        config.max_num_batched_tokens = NumTokens(2_048);
        config.vocab_size = 4_096;
        config.chunked_prefill = ChunkedPrefill::Disabled;
    });
    for (id, len, expected) in [(1, 1_025, 0), (2, 1_025, 1_024), (3, 1_024, 768)] {
        scheduler.add_request(support::request(id, 0, len)).unwrap();
        let plan = step(&mut scheduler);
        assert_eq!(plan.num_computed_tokens, [expected]);
        scheduler.abort(RequestId(id)).unwrap();
    }
}
