//! Who runs when: queues, budgets, chunks, priorities and preemption.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    ChunkedPrefill, NumBlocks, NumTokens, RequestId, RequestStatus, Scheduler, SchedulerConfig,
    SchedulingPolicy,
};
use support::{ids, request, scheduler, step, tokens};

fn without_drafts(config: &mut SchedulerConfig) {
    config.num_speculative_tokens = NumTokens(0);
    config.num_lookahead_tokens = NumTokens(0);
}

fn with_priority(id: u64, first: u32, len: u32, priority: i32) -> dspark_sched::NewRequest {
    let mut new = request(id, first, len);
    new.priority = priority;
    new
}

#[test]
fn the_sequence_budget_bounds_running_requests() {
    let mut scheduler = scheduler(|config| config.max_num_seqs = 2);
    for id in 1..=3 {
        scheduler.add_request(request(id, 0, 2)).unwrap();
    }
    assert_eq!(ids(&step(&mut scheduler).request_ids), [1, 2]);
    scheduler.abort(RequestId(1)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), ids(&plan.finished_request_ids)), (vec![2, 3], vec![1]));
}

#[test]
fn a_prompt_is_cut_at_the_token_budget() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = NumTokens(8));
    scheduler.add_request(request(1, 0, 19)).unwrap();
    for (num_computed, num_scheduled, num_samples) in [(0, 8, 0), (8, 8, 0), (16, 3, 1), (19, 1, 1)]
    {
        let plan = step(&mut scheduler);
        assert_eq!(plan.num_computed_tokens, [num_computed]);
        assert_eq!(plan.num_scheduled_tokens, [num_scheduled]);
        assert_eq!(plan.sample_rows.len(), num_samples);
    }
}

#[test]
fn the_threshold_leaves_room_for_others() {
    let mut scheduler = scheduler(|config| {
        let threshold = Some(NumTokens(5));
        config.chunked_prefill =
            ChunkedPrefill::Enabled { long_prefill_token_threshold: threshold };
        config.max_num_batched_tokens = NumTokens(9);
    });
    scheduler.add_request(request(1, 0, 12)).unwrap();
    scheduler.add_request(request(2, 20, 3)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), plan.num_scheduled_tokens), (vec![1, 2], vec![5, 3]));
    // Decode rows come first.
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), plan.num_scheduled_tokens), (vec![2, 1], vec![1, 5]));
    assert_eq!(plan.num_decode_requests, 1);
}

#[test]
fn without_chunks_a_prompt_waits_for_a_whole_budget() {
    let mut scheduler = scheduler(|config| {
        config.chunked_prefill = ChunkedPrefill::Disabled;
        config.max_model_len = NumTokens(16);
        config.max_num_batched_tokens = NumTokens(16);
    });
    for (id, len) in [(1, 10), (2, 10), (3, 2)] {
        scheduler.add_request(request(id, 0, len)).unwrap();
    }
    // Request 3 would fit but does not overtake.
    assert_eq!(ids(&step(&mut scheduler).request_ids), [1]);
    let plan = step(&mut scheduler);
    assert_eq!(ids(&plan.request_ids), [1, 2, 3]);
}

#[test]
fn waiting_requests_are_served_by_priority_then_arrival() {
    let mut scheduler = scheduler(|config| {
        config.policy = SchedulingPolicy::Priority;
        config.max_num_seqs = 3;
    });
    for (id, priority) in [(1, 5), (2, 0), (3, -1), (4, 0)] {
        scheduler.add_request(with_priority(id, 0, 2, priority)).unwrap();
    }
    assert_eq!(ids(&step(&mut scheduler).request_ids), [3, 2, 4]);
}

#[test]
fn priority_is_ignored_first_come_first_served() {
    let mut scheduler = scheduler(|config| config.max_num_seqs = 2);
    for (id, priority) in [(7, 5), (2, 0), (3, -1)] {
        scheduler.add_request(with_priority(id, 0, 2, priority)).unwrap();
    }
    assert_eq!(ids(&step(&mut scheduler).request_ids), [7, 2]);
}

#[test]
fn the_latest_arrival_is_preempted_and_nobody_admitted_in_that_step() {
    let mut scheduler = scheduler(|config| {
        without_drafts(config);
        config.num_blocks = NumBlocks(4);
        config.enable_prefix_caching = false;
    });
    for (id, first) in [(1, 0), (2, 20), (3, 40)] {
        scheduler.add_request(request(id, first, 7)).unwrap();
    }
    assert_eq!(ids(&step(&mut scheduler).request_ids), [1, 2]);
    step(&mut scheduler);
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), ids(&plan.preempted_request_ids)), (vec![1], vec![2]));
    let preempted = scheduler.request(RequestId(2)).unwrap();
    assert_eq!(preempted.status(), RequestStatus::Preempted);
    assert_eq!((preempted.slot(), preempted.num_computed_tokens()), (None, NumTokens(0)));
    assert_eq!(preempted.output_token_ids(), tokens([1, 1]));
    // It comes back before request 3, with its output as part of what is computed.
    scheduler.abort(RequestId(1)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), plan.num_scheduled_tokens), (vec![2], vec![9]));
}

#[test]
fn the_lowest_priority_is_preempted_even_when_already_scheduled() {
    let mut scheduler = scheduler(|config| {
        without_drafts(config);
        config.policy = SchedulingPolicy::Priority;
        config.num_blocks = NumBlocks(4);
        config.enable_prefix_caching = false;
    });
    scheduler.add_request(with_priority(1, 0, 7, 9)).unwrap();
    step(&mut scheduler);
    scheduler.add_request(with_priority(2, 20, 8, 0)).unwrap();
    step(&mut scheduler);
    // Request 1 is first in the batch and takes its token; request 2 then needs a third block.
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), ids(&plan.preempted_request_ids)), (vec![2], vec![1]));
    assert_eq!(plan.num_tokens(), 1);
}

#[test]
fn tokens_of_a_preempted_row_return_to_the_budget_and_nobody_is_skipped() {
    let mut scheduler = scheduler(|config| {
        config.policy = SchedulingPolicy::Priority;
        config.max_num_seqs = 3;
        config.max_num_batched_tokens = NumTokens(5);
        config.num_lookahead_tokens = NumTokens(0);
        config.num_blocks = NumBlocks(4);
        config.enable_prefix_caching = false;
    });
    let add = |scheduler: &mut Scheduler, id, len, priority| {
        let mut new = with_priority(id, 0, len, priority);
        new.stopping.max_tokens = NumTokens(12);
        scheduler.add_request(new).unwrap();
    };
    add(&mut scheduler, 1, 1, 9);
    step(&mut scheduler);
    add(&mut scheduler, 2, 2, 0);
    add(&mut scheduler, 3, 2, 0);
    for _ in 0..3 {
        assert_eq!(ids(&step(&mut scheduler).request_ids).len(), 3);
    }
    for id in [1, 3] {
        scheduler.set_drafts(RequestId(id), &[None; 3]).unwrap();
    }
    // Each fills one block. Request 1 takes four of five tokens and the last block; request 2
    // then finds none and takes one of request 1's; request 3 has its four tokens again.
    let plan = step(&mut scheduler);
    assert_eq!(ids(&plan.preempted_request_ids), [1]);
    assert_eq!((ids(&plan.request_ids), plan.num_scheduled_tokens), (vec![2, 3], vec![1, 4]));
}
