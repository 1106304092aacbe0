//! Refusals of settings and requests: condition, data, text, and that nothing changed.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{
    BlockPool, BlockSize, ChunkedPrefill, Error, NewRequest, NumBlocks, NumTokens, RequestId,
    Scheduler, SchedulerConfig, TokenId,
};
use support::scheduler;

const ONE: RequestId = RequestId(1);
const MAX_INT32: u32 = 0x7FFF_FFFF;

fn refused(change: impl FnOnce(&mut SchedulerConfig)) -> Error {
    let mut config = support::config();
    change(&mut config);
    Scheduler::new(config).unwrap_err()
}

fn refused_request(change: impl FnOnce(&mut NewRequest)) -> Error {
    let mut scheduler = scheduler(|_| {});
    let mut new = support::request(1, 0, 4);
    change(&mut new);
    let error = scheduler.add_request(new).unwrap_err();
    assert!(!scheduler.has_unfinished_requests());
    error
}

#[test]
fn rejects_block_size_zero() {
    let error = BlockSize::new(0).unwrap_err();
    assert_eq!(error, Error::ZeroBlockSize);
    assert_eq!(error.to_string(), "block_size is 0: a block holds at least 1 token");
}

#[test]
fn rejects_budgets_of_zero() {
    for name in ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size"] {
        let error = refused(|config| match name {
            "max_num_seqs" => config.max_num_seqs = 0,
            "max_num_batched_tokens" => config.max_num_batched_tokens = NumTokens(0),
            "max_model_len" => config.max_model_len = NumTokens(0),
            _ => config.vocab_size = 0,
        });
        assert_eq!(error, Error::ZeroBudget { name });
    }
    let name = "num_blocks";
    assert_eq!(refused(|config| config.num_blocks = NumBlocks(0)), Error::ZeroBudget { name });
    assert_eq!(BlockPool::new(NumBlocks(0)).unwrap_err(), Error::ZeroBudget { name });
    let name = "long_prefill_token_threshold";
    let error = refused(|config| {
        let zero = Some(NumTokens(0));
        config.chunked_prefill = ChunkedPrefill::Enabled { long_prefill_token_threshold: zero };
    });
    assert_eq!(error, Error::ZeroBudget { name });
    assert_eq!(error.to_string(), "long_prefill_token_threshold is 0: at least 1 is needed");
}

#[test]
fn rejects_a_budget_beyond_int32() {
    let asked = MAX_INT32 + 1;
    let error = refused(|config| config.max_model_len = NumTokens(asked));
    assert_eq!(error, Error::BudgetTooLarge { name: "max_model_len", asked, limit: MAX_INT32 });
    let text = "max_model_len is 2147483648: at most 2147483647 fits an int32 array";
    assert_eq!(error.to_string(), text);
    let error = scheduler(|_| {}).grow(NumBlocks(asked)).unwrap_err();
    assert_eq!(error, Error::BudgetTooLarge { name: "num_blocks", asked, limit: MAX_INT32 });
}

#[test]
fn rejects_a_token_budget_below_one_token_per_sequence() {
    let error = refused(|config| config.max_num_batched_tokens = NumTokens(7));
    let expected = Error::InconsistentBudgets {
        max_num_batched_tokens: NumTokens(7),
        max_num_seqs: 8,
        num_speculative_tokens: NumTokens(3),
    };
    assert_eq!(error, expected);
    let text = "max_num_batched_tokens = 7 is too small: max_num_seqs = 8 needs one token each, \
                and num_speculative_tokens = 3 needs 3 + 1 for one request";
    assert_eq!(error.to_string(), text);
}

#[test]
fn rejects_a_token_budget_below_one_request_with_its_drafts() {
    let error = refused(|config| config.num_speculative_tokens = NumTokens(64));
    assert!(matches!(error, Error::InconsistentBudgets { .. }));
}

#[test]
fn rejects_whole_prompts_beyond_the_token_budget() {
    let error = refused(|config| {
        config.chunked_prefill = ChunkedPrefill::Disabled;
        config.max_model_len = NumTokens(65);
    });
    let (max_num_batched_tokens, max_model_len) = (NumTokens(64), NumTokens(65));
    assert_eq!(error, Error::BudgetBelowModelLen { max_num_batched_tokens, max_model_len });
    let text = "max_num_batched_tokens = 64 is below max_model_len = 65: without chunked prefill \
                a long prompt could never run";
    assert_eq!(error.to_string(), text);
}

#[test]
fn rejects_a_live_id_and_accepts_an_ended_one() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
    let error = scheduler.add_request(support::request(1, 0, 4)).unwrap_err();
    assert_eq!(error, Error::DuplicateRequest { request_id: ONE });
    assert_eq!(error.to_string(), "request 1 is already live");
    scheduler.abort(ONE).unwrap();
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
}

#[test]
fn rejects_an_unknown_id() {
    let mut scheduler = scheduler(|_| {});
    let unknown = Error::UnknownRequest { request_id: ONE };
    assert_eq!(scheduler.abort(ONE).unwrap_err(), unknown);
    assert_eq!(scheduler.set_drafts(ONE, &[]).unwrap_err(), unknown);
    assert_eq!(unknown.to_string(), "request 1 is not live");
}

#[test]
fn rejects_an_empty_prompt() {
    let error = refused_request(|new| new.prompt_token_ids.clear());
    assert_eq!(error, Error::EmptyPrompt { request_id: ONE });
    let text = "request 1 has an empty prompt: at least 1 token is needed";
    assert_eq!(error.to_string(), text);
}

#[test]
fn rejects_a_prompt_that_leaves_no_room_for_output() {
    let prompt =
        |len: usize| move |new: &mut NewRequest| new.prompt_token_ids = vec![TokenId(1); len];
    let error = refused_request(prompt(64));
    let (num_prompt_tokens, max_model_len) = (NumTokens(64), NumTokens(64));
    let request_id = ONE;
    assert_eq!(error, Error::PromptTooLong { request_id, num_prompt_tokens, max_model_len });
    let text = "request 1 has a prompt of 64 tokens: max_model_len = 64 must hold it and at \
                least 1 output token";
    assert_eq!(error.to_string(), text);
    let mut new = support::request(1, 0, 1);
    prompt(63)(&mut new);
    scheduler(|_| {}).add_request(new).unwrap();
}

#[test]
fn rejects_a_token_outside_the_vocabulary() {
    let error = refused_request(|new| new.prompt_token_ids[2] = TokenId(50));
    let (request_id, token_id, vocab_size) = (ONE, TokenId(50), 50);
    assert_eq!(error, Error::TokenOutOfVocabulary { request_id, token_id, vocab_size });
    assert_eq!(error.to_string(), "request 1 has token 50: the vocabulary ends at 50");
}

#[test]
fn rejects_a_request_for_no_output() {
    let error = refused_request(|new| new.stopping.max_tokens = NumTokens(0));
    assert_eq!(error, Error::ZeroMaxTokens { request_id: ONE });
    assert_eq!(error.to_string(), "request 1 has max_tokens = 0: at least 1 is needed");
}

#[test]
fn rejects_min_tokens_above_max_tokens() {
    let error = refused_request(|new| new.stopping.min_tokens = NumTokens(9));
    let (min_tokens, max_tokens) = (NumTokens(9), NumTokens(8));
    assert_eq!(error, Error::MinTokensAboveMax { request_id: ONE, min_tokens, max_tokens });
    assert_eq!(error.to_string(), "request 1 has min_tokens = 9 above max_tokens = 8");
}

#[test]
fn rejects_a_request_that_can_never_fit_the_pool() {
    // 11 tokens are computed at most, with 3 drafts and 3 lookahead slots: 17 slots, 5 blocks.
    let mut scheduler = scheduler(|config| config.num_blocks = NumBlocks(4));
    let error = scheduler.add_request(support::request(1, 0, 4)).unwrap_err();
    let (needed, num_blocks) = (NumBlocks(5), NumBlocks(4));
    assert_eq!(error, Error::NeverFits { request_id: ONE, needed, num_blocks });
    assert_eq!(error.to_string(), "request 1 may need 5 blocks: the pool has 4");
    scheduler.grow(NumBlocks(5)).unwrap();
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
}
