//! Refusals of steps, results and drafts: condition, data, text, and that nothing changed.
//! `Error::Corrupt` is tested beside the checks that raise it.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    Error, NumBlocks, NumTokens, RequestId, RequestResult, RowOutcome, Scheduler, StepId, TokenId,
};
use support::{sampled, scheduler, step, tokens};

const ONE: RequestId = RequestId(1);

/// A scheduler with request 1 verifying drafts 7 and a placeholder in step 2, still in flight.
fn verifying() -> Scheduler {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(ONE, &[Some(TokenId(7)), None]).unwrap();
    scheduler.schedule().unwrap();
    scheduler
}

/// Refuses the results, then proves that the step is still in flight and can be reported.
fn refused_update(results: &[RequestResult<'_>]) -> Error {
    let mut scheduler = verifying();
    let error = scheduler.update(results).unwrap_err();
    scheduler.check_integrity().unwrap();
    scheduler.update(&[sampled(1, &tokens([7, 8, 9]))]).unwrap();
    assert_eq!(scheduler.request(ONE).unwrap().output_token_ids(), tokens([1, 7, 8, 9]));
    error
}

#[test]
fn rejects_calls_that_must_wait_for_the_step_in_flight() {
    let mut scheduler = verifying();
    let error = Error::StepInFlight { step_id: StepId(2) };
    assert_eq!(scheduler.step_in_flight(), Some(StepId(2)));
    assert_eq!(scheduler.schedule().unwrap_err(), error);
    assert_eq!(scheduler.set_drafts(ONE, &[]).unwrap_err(), error);
    assert_eq!(scheduler.vacate(NumBlocks(1)).unwrap_err(), error);
    assert_eq!(error.to_string(), "step 2 is in flight: update or cancel it first");
}

#[test]
fn rejects_an_update_without_a_step() {
    let mut scheduler = scheduler(|_| {});
    assert_eq!(scheduler.update(&[]).unwrap_err(), Error::NoStepInFlight);
    assert_eq!(scheduler.cancel_step().unwrap_err(), Error::NoStepInFlight);
    assert!(scheduler.schedule().unwrap().is_empty());
    assert_eq!(scheduler.update(&[]).unwrap_err(), Error::NoStepInFlight);
    assert_eq!(Error::NoStepInFlight.to_string(), "no step is in flight");
}

#[test]
fn rejects_a_result_of_an_unscheduled_request() {
    let error = refused_update(&[sampled(1, &tokens([3])), sampled(2, &tokens([3]))]);
    let (request_id, step_id) = (RequestId(2), StepId(2));
    assert_eq!(error, Error::NotScheduled { request_id, step_id });
    assert_eq!(error.to_string(), "request 2 was not scheduled in step 2");
}

#[test]
fn rejects_two_results_of_one_request() {
    let error = refused_update(&[sampled(1, &tokens([3])), sampled(1, &tokens([3]))]);
    assert_eq!(error, Error::DuplicateResult { request_id: ONE, step_id: StepId(2) });
    assert_eq!(error.to_string(), "request 1 has more than one result in step 2");
}

#[test]
fn rejects_a_step_without_a_sampled_requests_result() {
    let error = refused_update(&[]);
    assert_eq!(error, Error::MissingResult { request_id: ONE, step_id: StepId(2) });
    assert_eq!(error.to_string(), "request 1 has no result in step 2, which samples it");
}

#[test]
fn rejects_a_sampled_block_of_the_wrong_length() {
    let (request_id, least, limit) = (ONE, NumTokens(1), NumTokens(3));
    let error = refused_update(&[sampled(1, &tokens([7, 8, 9, 10]))]);
    let found = NumTokens(4);
    assert_eq!(error, Error::WrongTokenCount { request_id, found, least, limit });
    let text = "request 1 has 4 sampled tokens: between 1 and 3 expected";
    assert_eq!(error.to_string(), text);
    let error = refused_update(&[sampled(1, &[])]);
    let found = NumTokens(0);
    assert_eq!(error, Error::WrongTokenCount { request_id, found, least, limit });
}

#[test]
fn rejects_tokens_for_a_row_that_samples_nothing() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = NumTokens(8));
    scheduler.add_request(support::request(1, 0, 12)).unwrap();
    assert!(scheduler.schedule().unwrap().sample_rows.is_empty());
    let error = scheduler.update(&[sampled(1, &tokens([3]))]).unwrap_err();
    let (found, none) = (NumTokens(1), NumTokens(0));
    let expected = Error::WrongTokenCount { request_id: ONE, found, least: none, limit: none };
    assert_eq!(error, expected);
    scheduler.update(&[sampled(1, &[])]).unwrap();
}

#[test]
fn rejects_an_accepted_token_that_is_not_the_draft() {
    let error = refused_update(&[sampled(1, &tokens([6, 8]))]);
    let (found, draft) = (TokenId(6), TokenId(7));
    assert_eq!(error, Error::AcceptedTokenMismatch { request_id: ONE, index: 0, found, draft });
    let text = "request 1 accepts token 6 at index 0: draft 7 was verified";
    assert_eq!(error.to_string(), text);
}

#[test]
fn rejects_more_drafts_than_configured() {
    let mut scheduler = verifying();
    scheduler.cancel_step().unwrap();
    let error = scheduler.set_drafts(ONE, &[None; 4]).unwrap_err();
    let (asked, limit) = (NumTokens(4), NumTokens(3));
    assert_eq!(error, Error::TooManyDrafts { request_id: ONE, asked, limit });
    assert_eq!(error.to_string(), "request 1 has 4 drafts: num_speculative_tokens = 3");
}

#[test]
fn a_failed_row_ends_its_request_alone_with_reason_error() {
    let mut scheduler = verifying();
    let failed = RequestResult { request_id: ONE, outcome: RowOutcome::Failed };
    let output = scheduler.update(&[failed]).unwrap();
    let reason = output.requests[0].finished.unwrap().reason;
    assert_eq!(reason, dspark_sched::FinishReason::Error);
    assert!(output.token_ids.is_empty());
    assert!(!scheduler.has_unfinished_requests());
    assert_eq!(scheduler.pool().num_free(), scheduler.pool().num_blocks());
}

#[test]
fn rejects_sampled_tokens_and_drafts_outside_the_vocabulary() {
    let (request_id, token_id, vocab_size) = (ONE, TokenId(50), 50);
    let expected = Error::TokenOutOfVocabulary { request_id, token_id, vocab_size };
    assert_eq!(refused_update(&[sampled(1, &tokens([50]))]), expected);
    let mut scheduler = verifying();
    scheduler.cancel_step().unwrap();
    assert_eq!(scheduler.set_drafts(ONE, &[None, Some(TokenId(50))]).unwrap_err(), expected);
}
