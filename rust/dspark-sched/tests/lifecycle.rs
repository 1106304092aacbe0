//! Slots, aborts, cancelled steps and ends of requests, and what the arrays of a plan hold.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    FinishReason, Generation, NumBlocks, NumTokens, RequestId, RequestStatus, SchedulerConfig,
    SlotId, TokenId,
};
use support::{ids, request, sampled, scheduler, step, tokens};

fn without_drafts(config: &mut SchedulerConfig) {
    config.num_speculative_tokens = NumTokens(0);
    config.num_lookahead_tokens = NumTokens(0);
}

#[test]
fn a_slot_is_kept_while_running_and_its_generation_tells_occupants_apart() {
    let mut scheduler = scheduler(|_| {});
    for id in [1, 2, 3] {
        scheduler.add_request(request(id, 0, 2)).unwrap();
    }
    let plan = step(&mut scheduler);
    assert_eq!((plan.request_slots, plan.slot_generations), (vec![0, 1, 2], vec![1, 1, 1]));
    scheduler.abort(RequestId(2)).unwrap();
    scheduler.add_request(request(4, 0, 2)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(ids(&plan.request_ids), [1, 3, 4]);
    assert_eq!((plan.request_slots, plan.slot_generations), (vec![0, 2, 1], vec![1, 1, 2]));
    assert_eq!(scheduler.request(RequestId(4)).unwrap().slot(), Some(SlotId(1)));
    assert_eq!(Generation(2).to_string(), "2");
}

#[test]
fn an_abort_in_flight_frees_at_once_and_its_result_is_ignored() {
    let mut scheduler = scheduler(|_| {});
    for id in [1, 2] {
        scheduler.add_request(request(id, 0, 6)).unwrap();
    }
    scheduler.schedule().unwrap();
    let ended = scheduler.abort(RequestId(1)).unwrap();
    assert_eq!(ended.status(), RequestStatus::Finished(FinishReason::Abort.into()));
    scheduler.check_integrity().unwrap();
    let one = tokens([5]);
    let output = scheduler.update(&[sampled(1, &one), sampled(2, &one)]).unwrap();
    assert_eq!(output.requests.len(), 1);
    assert_eq!(output.requests[0].request_id, RequestId(2));
    scheduler.check_integrity().unwrap();
}

#[test]
fn an_id_reused_in_flight_does_not_get_the_old_result() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 6)).unwrap();
    scheduler.schedule().unwrap();
    scheduler.abort(RequestId(1)).unwrap();
    scheduler.add_request(request(1, 20, 3)).unwrap();
    assert!(scheduler.update(&[sampled(1, &tokens([5]))]).unwrap().requests.is_empty());
    let plan = step(&mut scheduler);
    assert_eq!(ids(&plan.finished_request_ids), [1]);
    assert_eq!(plan.input_token_ids, [20, 21, 22]);
}

#[test]
fn a_cancelled_step_is_planned_again() {
    let mut scheduler = scheduler(|_| {});
    for id in [1, 2] {
        scheduler.add_request(request(id, 0, 6)).unwrap();
    }
    let plan = scheduler.schedule().unwrap().clone();
    scheduler.cancel_step().unwrap();
    scheduler.check_integrity().unwrap();
    let again = scheduler.schedule().unwrap();
    assert_eq!(plan.input_token_ids, again.input_token_ids);
    assert_eq!(plan.slot_mapping, again.slot_mapping);
    assert_eq!(plan.slot_generations, again.slot_generations);
}

#[test]
fn end_of_sequence_counts_from_min_tokens_and_unless_ignored() {
    for (min_tokens, ignore_eos, expected) in
        [(0, false, 1), (1, false, 1), (3, false, 3), (0, true, 8)]
    {
        let mut scheduler = scheduler(|_| {});
        let mut new = request(1, 0, 4);
        new.stopping.eos_token_id = Some(TokenId(1));
        new.stopping.min_tokens = NumTokens(min_tokens);
        new.stopping.ignore_eos = ignore_eos;
        scheduler.add_request(new).unwrap();
        let mut num_steps = 0;
        while scheduler.has_unfinished_requests() {
            step(&mut scheduler);
            num_steps += 1;
        }
        assert_eq!(num_steps, expected);
    }
}

#[test]
fn a_stop_token_wins_over_a_length_limit_at_the_same_token() {
    let mut scheduler = scheduler(|_| {});
    let mut new = request(1, 0, 4);
    new.stopping.max_tokens = NumTokens(1);
    new.stopping.stop_token_ids = tokens([9]);
    scheduler.add_request(new).unwrap();
    scheduler.schedule().unwrap();
    let output = scheduler.update(&[sampled(1, &tokens([9]))]).unwrap();
    let finished = output.requests[0].finished.unwrap();
    assert_eq!((finished.reason, finished.stop_token_id), (FinishReason::Stop, Some(TokenId(9))));
}

#[test]
fn vacated_blocks_can_be_shrunk_away_and_the_requests_go_on() {
    let mut scheduler = scheduler(|config| config.num_blocks = NumBlocks(12));
    for (id, first) in [(1, 0), (2, 20)] {
        scheduler.add_request(request(id, first, 6)).unwrap();
    }
    step(&mut scheduler);
    // Request 1 holds blocks 0..3, request 2 blocks 3..6.
    assert!(scheduler.shrink(NumBlocks(5)).is_err());
    assert_eq!(scheduler.vacate(NumBlocks(6)), Ok(0));
    assert_eq!(scheduler.vacate(NumBlocks(5)), Ok(1));
    scheduler.shrink(NumBlocks(5)).unwrap();
    scheduler.check_integrity().unwrap();
    let plan = step(&mut scheduler);
    assert_eq!((ids(&plan.request_ids), ids(&plan.preempted_request_ids)), (vec![1], vec![2]));
    while scheduler.has_unfinished_requests() {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.pool().num_free(), NumBlocks(5));
}

#[test]
fn an_empty_scheduler_plans_nothing() {
    let mut scheduler = scheduler(|_| {});
    let plan = step(&mut scheduler);
    assert!(plan.is_empty() && !plan.is_pure_decode());
    assert_eq!((plan.query_start_loc, plan.sample_start_loc), (vec![0], vec![0]));
    assert_eq!(scheduler.step_in_flight(), None);
}

#[test]
fn plan_arrays_of_a_mixed_step_are_those_worked_out_by_hand() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = NumTokens(9));
    scheduler.add_request(request(1, 10, 5)).unwrap();
    step(&mut scheduler);
    scheduler.add_request(request(2, 30, 7)).unwrap();
    scheduler.set_drafts(RequestId(1), &[Some(TokenId(5)), None]).unwrap();
    let plan = scheduler.schedule().unwrap();
    // Request 1: 5 of 6 tokens computed; 8 slots used and 3 ahead are blocks 0, 1, 2 (block size
    // 4). Request 2: 6 of 7 tokens fit the budget; with 3 ahead they take blocks 3, 4, 5.
    assert_eq!(ids(&plan.request_ids), [1, 2]);
    assert_eq!(plan.num_decode_requests, 1);
    assert_eq!(plan.num_scheduled_tokens, [3, 6]);
    assert_eq!(plan.num_computed_tokens, [5, 0]);
    assert_eq!(plan.seq_lens, [8, 6]);
    assert_eq!(plan.num_draft_tokens, [2, 0]);
    assert_eq!(plan.query_start_loc, [0, 3, 9]);
    assert_eq!(plan.input_token_ids, [1, 5, -1, 30, 31, 32, 33, 34, 35]);
    assert_eq!(plan.positions, [5, 6, 7, 0, 1, 2, 3, 4, 5]);
    assert_eq!(plan.slot_mapping, [5, 6, 7, 12, 13, 14, 15, 16, 17]);
    assert_eq!((&plan.sample_rows, &plan.sample_start_loc), (&vec![0, 1, 2], &vec![0, 3, 3]));
    assert_eq!((plan.block_table_width, &plan.block_tables), (3, &vec![0, 1, 2, 3, 4, 5]));
}

#[test]
fn block_tables_are_padded_to_the_longest_row() {
    let mut scheduler = scheduler(without_drafts);
    for (id, first, len) in [(1, 0, 2), (2, 20, 9)] {
        scheduler.add_request(request(id, first, len)).unwrap();
    }
    let plan = step(&mut scheduler);
    assert_eq!((plan.block_table_width, plan.block_tables), (3, vec![0, 0, 0, 1, 2, 3]));
}
