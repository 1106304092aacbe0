//! Drafts between steps and in them: held, trimmed, accepted, rejected, dropped; lookahead slots.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{DraftUse, FinishReason, NumTokens, RequestId, TokenId};
use support::{request, sampled, scheduler, step, tokens};

#[test]
fn drafts_are_trimmed_to_the_token_budget() {
    let mut scheduler = scheduler(|config| {
        config.max_num_seqs = 4;
        config.max_num_batched_tokens = NumTokens(6);
    });
    for (id, first) in [(1, 0), (2, 20)] {
        scheduler.add_request(request(id, first, 3)).unwrap();
    }
    step(&mut scheduler);
    for id in [1, 2] {
        let drafts = [5, 6, 7].map(|id| Some(TokenId(id)));
        assert_eq!(scheduler.set_drafts(RequestId(id), &drafts), Ok(DraftUse::Held));
    }
    let plan = scheduler.schedule().unwrap();
    assert_eq!((&plan.num_draft_tokens, plan.num_tokens()), (&vec![3, 1], 6));
    assert_eq!(plan.input_token_ids, [1, 5, 6, 7, 1, 5]);
    assert_eq!(plan.sample_start_loc, [0, 4, 6]);
}

#[test]
fn drafts_are_trimmed_at_the_model_length() {
    let mut scheduler = scheduler(|config| config.max_model_len = NumTokens(16));
    let mut new = request(1, 0, 13);
    new.stopping.max_tokens = NumTokens(100);
    scheduler.add_request(new).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(RequestId(1), &[Some(TokenId(5)); 3]).unwrap();
    // Position 15 is the last and never an input: 13 and 14 are.
    let plan = scheduler.schedule().unwrap();
    assert_eq!((&plan.positions, &plan.num_draft_tokens), (&vec![13, 14], &vec![1]));
    let output = scheduler.update(&[sampled(1, &tokens([5, 6]))]).unwrap();
    assert_eq!(output.requests[0].finished, Some(FinishReason::Length.into()));
}

#[test]
fn lookahead_slots_are_allocated_up_to_the_model_length() {
    let mut scheduler = scheduler(|config| config.max_model_len = NumTokens(10));
    for (id, len, expected) in [(1, 1, 1), (2, 2, 2), (3, 5, 2), (4, 6, 3), (5, 8, 3)] {
        scheduler.add_request(request(id, 0, len)).unwrap();
        assert_eq!(step(&mut scheduler).block_table_width, expected, "prompt of {len}");
        scheduler.abort(RequestId(id)).unwrap();
    }
}

#[test]
fn rejected_drafts_roll_the_computed_count_back() {
    let mut scheduler = scheduler(|_| {});
    let mut new = request(1, 0, 4);
    new.stopping.max_tokens = NumTokens(20);
    scheduler.add_request(new).unwrap();
    step(&mut scheduler);
    for (accepted, num_computed) in [(vec![5, 9], 6), (vec![5, 6, 7, 8], 10), (vec![9], 11)] {
        scheduler.set_drafts(RequestId(1), &[5, 6, 7].map(|id| Some(TokenId(id)))).unwrap();
        scheduler.schedule().unwrap();
        scheduler.update(&[sampled(1, &tokens(accepted))]).unwrap();
        let request = scheduler.request(RequestId(1)).unwrap();
        assert_eq!(request.num_computed_tokens(), NumTokens(num_computed));
        assert!(request.is_decoding() && request.drafts().is_empty());
    }
    let stats = scheduler.stats();
    assert_eq!((stats.num_draft_tokens, stats.num_accepted_tokens), (9, 4));
}

#[test]
fn drafts_that_the_runner_holds_can_be_accepted() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 4)).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(RequestId(1), &[None; 3]).unwrap();
    assert_eq!(scheduler.schedule().unwrap().input_token_ids, [1, -1, -1, -1]);
    let output = scheduler.update(&[sampled(1, &tokens([7, 8, 9]))]).unwrap();
    assert_eq!(output.requests[0].num_accepted_tokens, NumTokens(2));
    assert_eq!(scheduler.request(RequestId(1)).unwrap().num_computed_tokens(), NumTokens(7));
}

#[test]
fn drafts_are_dropped_while_the_prompt_is_computed() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = NumTokens(8));
    scheduler.add_request(request(1, 0, 12)).unwrap();
    assert_eq!(scheduler.set_drafts(RequestId(1), &[None]), Ok(DraftUse::Dropped));
    step(&mut scheduler);
    assert_eq!(scheduler.set_drafts(RequestId(1), &[None]), Ok(DraftUse::Dropped));
    assert_eq!(step(&mut scheduler).num_draft_tokens, [0]);
}

#[test]
fn a_cancelled_step_drops_its_drafts() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(request(1, 0, 6)).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(RequestId(1), &[None; 3]).unwrap();
    assert_eq!(scheduler.schedule().unwrap().num_draft_tokens, [3]);
    scheduler.cancel_step().unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((&plan.input_token_ids, &plan.num_draft_tokens), (&vec![1], &vec![0]));
}
