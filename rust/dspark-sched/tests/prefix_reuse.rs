//! Reuse of cached prefixes: what is found, what must not be, and what it costs.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    BlockHash, BlockHashFn, CacheKeys, NewRequest, NumBlocks, NumTokens, RequestId, RequestResult,
    RowOutcome, Scheduler, TokenId,
};
use support::{request, sampled, scheduler, step, tokens};

fn constant_hash(_: BlockHash, _: &[TokenId]) -> BlockHash {
    BlockHash(1)
}

/// Adds a request, runs its first step, ends it, and returns how many tokens were found.
fn num_found(scheduler: &mut Scheduler, new: NewRequest) -> i32 {
    let request_id = new.request_id;
    scheduler.add_request(new).unwrap();
    let plan = step(scheduler);
    scheduler.abort(request_id).unwrap();
    scheduler.check_integrity().unwrap();
    plan.num_computed_tokens[0]
}

fn with_prompt(id: u64, prompt: &[u32]) -> NewRequest {
    NewRequest::new(RequestId(id), tokens(prompt.iter().copied()), NumTokens(8))
}

#[test]
fn a_hit_is_whole_blocks_and_leaves_one_token() {
    let mut scheduler = scheduler(|_| {});
    for (id, len, found) in [(1, 9, 0), (2, 9, 8), (3, 8, 4), (4, 5, 4), (5, 4, 0), (6, 1, 0)] {
        assert_eq!(num_found(&mut scheduler, request(id, 0, len)), found, "prompt of {len}");
    }
}

#[test]
fn output_tokens_are_found_as_part_of_a_longer_prompt() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 10, 3)).unwrap();
    for _ in 0..8 {
        step(&mut scheduler);
    }
    assert!(!scheduler.has_unfinished_requests());
    // 3 + 8 tokens, of which the last was never computed: two full blocks.
    assert_eq!(num_found(&mut scheduler, with_prompt(2, &[10, 11, 12, 1, 1, 1, 1, 1, 9])), 8);
}

#[test]
fn warm_plan_is_the_tail_of_the_cold_one() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 11)).unwrap();
    let cold = step(&mut scheduler);
    scheduler.add_request(request(2, 0, 11)).unwrap();
    scheduler.abort(RequestId(1)).unwrap();
    let warm = step(&mut scheduler);
    assert_eq!(warm.input_token_ids, cold.input_token_ids[8..]);
    assert_eq!(warm.positions, cold.positions[8..]);
    assert_eq!(warm.seq_lens, cold.seq_lens);
    assert_eq!(warm.block_tables[..2], cold.block_tables[..2]);
    assert_eq!((cold.sample_rows, warm.sample_rows), (vec![10], vec![2]));
}

#[test]
fn collisions_never_give_a_wrong_block() {
    let hash: BlockHashFn = constant_hash;
    let mut scheduler = Scheduler::with_block_hash(support::config(), hash).unwrap();
    assert_eq!(num_found(&mut scheduler, with_prompt(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9])), 0);
    // Other tokens.
    assert_eq!(num_found(&mut scheduler, with_prompt(2, &[4, 3, 2, 1, 5, 6, 7, 8, 9])), 0);
    // The second block's tokens at the beginning, where it has another parent.
    assert_eq!(num_found(&mut scheduler, with_prompt(3, &[5, 6, 7, 8, 9])), 0);
    // The same tokens still hit.
    assert_eq!(num_found(&mut scheduler, with_prompt(4, &[1, 2, 3, 4, 5, 6, 7, 8, 9])), 8);
}

#[test]
fn salt_and_extra_keys_separate_requests() {
    let mut scheduler = scheduler(|_| {});
    let salted = |id: u64, salt: Option<&str>, extra_keys: &[u64]| {
        let mut new = request(id, 0, 9);
        new.cache_keys =
            CacheKeys { cache_salt: salt.map(str::to_owned), extra_keys: extra_keys.to_vec() };
        new
    };
    assert_eq!(num_found(&mut scheduler, salted(1, None, &[])), 0);
    assert_eq!(num_found(&mut scheduler, salted(2, Some("a"), &[])), 0);
    assert_eq!(num_found(&mut scheduler, salted(3, Some("b"), &[])), 0);
    assert_eq!(num_found(&mut scheduler, salted(4, Some("a"), &[7])), 0);
    assert_eq!(num_found(&mut scheduler, salted(5, Some("a"), &[7, 8])), 0);
    assert_eq!(num_found(&mut scheduler, salted(6, Some("a"), &[7])), 8);
    assert_eq!(num_found(&mut scheduler, salted(7, None, &[])), 8);
}

#[test]
fn a_request_can_refuse_to_read_the_cache() {
    let mut scheduler = scheduler(|_| {});
    num_found(&mut scheduler, request(1, 0, 9));
    let mut new = request(2, 0, 9);
    new.skip_reading_prefix_cache = true;
    assert_eq!(num_found(&mut scheduler, new), 0);
    assert_eq!(num_found(&mut scheduler, request(3, 0, 9)), 8);
}

#[test]
fn nothing_is_found_when_caching_is_off() {
    let mut scheduler = scheduler(|config| config.enable_prefix_caching = false);
    assert_eq!(num_found(&mut scheduler, request(1, 0, 9)), 0);
    assert_eq!(num_found(&mut scheduler, request(2, 0, 9)), 0);
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(0));
}

#[test]
fn running_requests_share_the_blocks_of_a_prefix() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 9)).unwrap();
    step(&mut scheduler);
    scheduler.add_request(request(2, 0, 9)).unwrap();
    step(&mut scheduler);
    let blocks = |id| scheduler.request(RequestId(id)).unwrap().block_ids().to_vec();
    assert_eq!(blocks(1)[..2], blocks(2)[..2]);
    assert_ne!(blocks(1)[2], blocks(2)[2]);
    assert_eq!(scheduler.pool().num_refs(blocks(1)[0]), Ok(2));
}

#[test]
fn the_end_of_a_prefix_is_reused_before_its_beginning() {
    let mut scheduler = scheduler(|config| {
        config.num_blocks = NumBlocks(8);
        config.num_speculative_tokens = NumTokens(0);
        config.num_lookahead_tokens = NumTokens(0);
    });
    num_found(&mut scheduler, request(1, 0, 24));
    // Two blocks were never used; this one takes them and two from the end of the first prompt.
    num_found(&mut scheduler, request(2, 30, 15));
    assert_eq!(num_found(&mut scheduler, request(3, 0, 24)), 16);
}

#[test]
fn a_block_is_findable_only_after_its_step_was_reported() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 9)).unwrap();
    scheduler.schedule().unwrap();
    scheduler.cancel_step().unwrap();
    scheduler.check_integrity().unwrap();
    scheduler.abort(RequestId(1)).unwrap();
    assert_eq!(num_found(&mut scheduler, request(2, 0, 9)), 0);
}

#[test]
fn a_prompt_is_findable_chunk_by_chunk() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = NumTokens(8));
    scheduler.add_request(request(1, 0, 20)).unwrap();
    step(&mut scheduler);
    scheduler.abort(RequestId(1)).unwrap();
    assert_eq!(num_found(&mut scheduler, request(2, 0, 20)), 8);
}

#[test]
fn blocks_of_a_failed_step_are_never_found() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 9)).unwrap();
    scheduler.schedule().unwrap();
    let failed = RequestResult { request_id: RequestId(1), outcome: RowOutcome::Failed };
    scheduler.update(&[failed]).unwrap();
    assert_eq!(num_found(&mut scheduler, request(2, 0, 9)), 0);
}

#[test]
fn rejected_drafts_never_enter_the_cache() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 10, 4)).unwrap();
    step(&mut scheduler);
    let drafts = [5, 6, 7].map(|id| Some(TokenId(id)));
    scheduler.set_drafts(RequestId(1), &drafts).unwrap();
    scheduler.schedule().unwrap();
    scheduler.update(&[sampled(1, &tokens([5, 9]))]).unwrap();
    assert_eq!(scheduler.request(RequestId(1)).unwrap().num_computed_tokens(), NumTokens(6));
    step(&mut scheduler);
    step(&mut scheduler);
    scheduler.abort(RequestId(1)).unwrap();
    assert_eq!(num_found(&mut scheduler, with_prompt(2, &[10, 11, 12, 13, 1, 5, 6, 7, 0])), 4);
    assert_eq!(num_found(&mut scheduler, with_prompt(3, &[10, 11, 12, 13, 1, 5, 9, 1, 0])), 8);
}

#[test]
fn a_preempted_request_finds_its_own_blocks_again() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 9)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.vacate(NumBlocks(0)), Ok(1));
    let plan = step(&mut scheduler);
    assert_eq!(plan.preempted_request_ids, [RequestId(1)]);
    assert_eq!((plan.num_computed_tokens, plan.input_token_ids), (vec![8], vec![8, 1]));
    let request = scheduler.request(RequestId(1)).unwrap();
    assert_eq!((request.num_preemptions(), request.num_cached_tokens()), (1, NumTokens(0)));
}

#[test]
fn hits_are_counted_in_tokens_at_admission() {
    let mut scheduler = scheduler(|_| {});
    num_found(&mut scheduler, request(1, 0, 9));
    scheduler.add_request(request(2, 0, 10)).unwrap();
    step(&mut scheduler);
    scheduler.vacate(NumBlocks(0)).unwrap();
    step(&mut scheduler);
    let stats = scheduler.stats();
    let fresh = stats.prefix_cache;
    assert_eq!((fresh.num_requests, fresh.num_query_tokens, fresh.num_hit_tokens), (2, 19, 8));
    assert!((fresh.hit_ratio() - 8.0 / 19.0).abs() < 1e-9);
    let resumed = stats.prefix_cache_resumed;
    assert_eq!((resumed.num_requests, resumed.num_query_tokens), (1, 11));
    assert_eq!(resumed.num_hit_tokens, 8);
    assert!(dspark_sched::PrefixCacheStats::default().hit_ratio().abs() < 1e-9);
}

#[test]
fn a_shrink_forgets_what_it_cuts_off() {
    let mut scheduler = scheduler(|config| {
        config.num_blocks = NumBlocks(8);
        config.num_speculative_tokens = NumTokens(0);
        config.num_lookahead_tokens = NumTokens(0);
    });
    num_found(&mut scheduler, request(1, 0, 20));
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(5));
    scheduler.shrink(NumBlocks(7)).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(5));
    scheduler.shrink(NumBlocks(2)).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(2));
    scheduler.grow(NumBlocks(8)).unwrap();
    assert_eq!(num_found(&mut scheduler, request(2, 0, 20)), 8);
}

#[test]
fn a_prefix_stays_whole_when_its_beginning_is_held_twice() {
    let mut scheduler = scheduler(|config| {
        config.num_blocks = NumBlocks(8);
        config.num_speculative_tokens = NumTokens(0);
        config.num_lookahead_tokens = NumTokens(0);
    });
    // Both compute the same first blocks in the same step, each in its own.
    scheduler.add_request(request(1, 0, 8)).unwrap();
    scheduler.add_request(request(2, 0, 9)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(4));
    scheduler.abort(RequestId(1)).unwrap();
    // Takes all free blocks, those of request 1 among them.
    let mut new = request(3, 30, 20);
    new.stopping.max_tokens = NumTokens(1);
    scheduler.add_request(new).unwrap();
    step(&mut scheduler);
    assert!(scheduler.request(RequestId(3)).is_none());
    scheduler.add_request(request(4, 0, 9)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.request_ids, [RequestId(2), RequestId(4)]);
    assert_eq!(plan.num_computed_tokens, [10, 8]);
}
