//! Every way the crate can refuse, as data: what was asked, what was found, and the limit.
//!
//! A call that returns an error has changed nothing, except [`Error::Corrupt`], which reports a
//! broken invariant of the crate itself.

use crate::ids::{BlockId, NumBlocks, NumTokens, RequestId, StepId, TokenId};

/// Result of the crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A refused call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A block of no tokens.
    #[error("block_size is 0: a block holds at least 1 token")]
    ZeroBlockSize,
    /// A budget of zero at construction.
    #[error("{name} is 0: at least 1 is needed")]
    ZeroBudget {
        /// Name of the setting.
        name: &'static str,
    },
    /// A setting that does not fit the int32 arrays of a plan.
    #[error("{name} is {asked}: at most {limit} fits an int32 array")]
    BudgetTooLarge {
        /// Name of the setting.
        name: &'static str,
        /// Value asked.
        asked: u32,
        /// Largest legal value.
        limit: u32,
    },
    /// A token budget too small for one token of every sequence, or for one request's drafts.
    #[error(
        "max_num_batched_tokens = {max_num_batched_tokens} is too small: max_num_seqs = \
         {max_num_seqs} needs one token each, and num_speculative_tokens = \
         {num_speculative_tokens} needs {num_speculative_tokens} + 1 for one request"
    )]
    InconsistentBudgets {
        /// Tokens per step.
        max_num_batched_tokens: NumTokens,
        /// Sequences per step.
        max_num_seqs: u32,
        /// Drafts per request and step.
        num_speculative_tokens: NumTokens,
    },
    /// Whole prompts do not fit the token budget, and chunked prefill is off.
    #[error(
        "max_num_batched_tokens = {max_num_batched_tokens} is below max_model_len = \
         {max_model_len}: without chunked prefill a long prompt could never run"
    )]
    BudgetBelowModelLen {
        /// Tokens per step.
        max_num_batched_tokens: NumTokens,
        /// Longest sequence.
        max_model_len: NumTokens,
    },
    /// The id of a live request, given to another one.
    #[error("request {request_id} is already live")]
    DuplicateRequest {
        /// The id.
        request_id: RequestId,
    },
    /// No live request has this id.
    #[error("request {request_id} is not live")]
    UnknownRequest {
        /// The id.
        request_id: RequestId,
    },
    /// A prompt without tokens.
    #[error("request {request_id} has an empty prompt: at least 1 token is needed")]
    EmptyPrompt {
        /// The request.
        request_id: RequestId,
    },
    /// A prompt that leaves no room for one output token.
    #[error(
        "request {request_id} has a prompt of {num_prompt_tokens} tokens: \
         max_model_len = {max_model_len} must hold it and at least 1 output token"
    )]
    PromptTooLong {
        /// The request.
        request_id: RequestId,
        /// Length of its prompt.
        num_prompt_tokens: NumTokens,
        /// Longest sequence, output included.
        max_model_len: NumTokens,
    },
    /// A token outside the vocabulary, in a prompt, a draft or a sampled block.
    #[error("request {request_id} has token {token_id}: the vocabulary ends at {vocab_size}")]
    TokenOutOfVocabulary {
        /// The request.
        request_id: RequestId,
        /// The token.
        token_id: TokenId,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// A request for no output.
    #[error("request {request_id} has max_tokens = 0: at least 1 is needed")]
    ZeroMaxTokens {
        /// The request.
        request_id: RequestId,
    },
    /// Contradictory output lengths.
    #[error("request {request_id} has min_tokens = {min_tokens} above max_tokens = {max_tokens}")]
    MinTokensAboveMax {
        /// The request.
        request_id: RequestId,
        /// Shortest output.
        min_tokens: NumTokens,
        /// Longest output.
        max_tokens: NumTokens,
    },
    /// A request that the whole pool could not hold.
    #[error("request {request_id} may need {needed} blocks: the pool has {num_blocks}")]
    NeverFits {
        /// The request.
        request_id: RequestId,
        /// Blocks at its full length, lookahead included.
        needed: NumBlocks,
        /// Blocks of the pool.
        num_blocks: NumBlocks,
    },
    /// A call that must wait for the result of the step in flight.
    #[error("step {step_id} is in flight: update or cancel it first")]
    StepInFlight {
        /// The step.
        step_id: StepId,
    },
    /// An update or cancel without a step.
    #[error("no step is in flight")]
    NoStepInFlight,
    /// A result for a request that the step does not contain.
    #[error("request {request_id} was not scheduled in step {step_id}")]
    NotScheduled {
        /// The request.
        request_id: RequestId,
        /// The step.
        step_id: StepId,
    },
    /// Two results for one request.
    #[error("request {request_id} has more than one result in step {step_id}")]
    DuplicateResult {
        /// The request.
        request_id: RequestId,
        /// The step.
        step_id: StepId,
    },
    /// A request of the step that samples, without a result.
    #[error("request {request_id} has no result in step {step_id}, which samples it")]
    MissingResult {
        /// The request.
        request_id: RequestId,
        /// The step.
        step_id: StepId,
    },
    /// A sampled block of the wrong length.
    #[error(
        "request {request_id} has {found} sampled tokens: between {least} and {limit} expected"
    )]
    WrongTokenCount {
        /// The request.
        request_id: RequestId,
        /// Tokens given.
        found: NumTokens,
        /// 1 when the step samples the request, else 0.
        least: NumTokens,
        /// One more than the drafts verified, or 0.
        limit: NumTokens,
    },
    /// An accepted token that is not the draft whose key and value are in the cache.
    #[error(
        "request {request_id} accepts token {found} at index {index}: draft {draft} was verified"
    )]
    AcceptedTokenMismatch {
        /// The request.
        request_id: RequestId,
        /// Index within the accepted block.
        index: u32,
        /// The token given.
        found: TokenId,
        /// The draft verified there.
        draft: TokenId,
    },
    /// More drafts than the configuration allows.
    #[error("request {request_id} has {asked} drafts: num_speculative_tokens = {limit}")]
    TooManyDrafts {
        /// The request.
        request_id: RequestId,
        /// Drafts given.
        asked: NumTokens,
        /// Drafts allowed.
        limit: NumTokens,
    },
    /// A block id past the end of the pool.
    #[error("block {block_id} does not exist: the pool has {num_blocks} blocks")]
    BlockOutOfRange {
        /// The block.
        block_id: BlockId,
        /// Blocks of the pool.
        num_blocks: NumBlocks,
    },
    /// A release of a block that nobody holds.
    #[error("block {block_id} is free: it cannot be released")]
    BlockNotReferenced {
        /// The block.
        block_id: BlockId,
    },
    /// A growth to fewer blocks than there are.
    #[error("cannot grow to {asked} blocks: the pool has {num_blocks}")]
    GrowBelowCurrent {
        /// Blocks asked.
        asked: NumBlocks,
        /// Blocks of the pool.
        num_blocks: NumBlocks,
    },
    /// A shrink to more blocks than there are.
    #[error("cannot shrink to {asked} blocks: the pool has {num_blocks}")]
    ShrinkAboveCurrent {
        /// Blocks asked.
        asked: NumBlocks,
        /// Blocks of the pool.
        num_blocks: NumBlocks,
    },
    /// A shrink that would cut off a block in use.
    #[error(
        "cannot shrink from {num_blocks} to {asked} blocks: block {block_id} is in use \
         ({num_refs} references)"
    )]
    BlockInUse {
        /// The last block in use.
        block_id: BlockId,
        /// Its references.
        num_refs: u32,
        /// Blocks asked.
        asked: NumBlocks,
        /// Blocks of the pool.
        num_blocks: NumBlocks,
    },
    /// A shrink after which a live request could never finish.
    #[error("cannot shrink to {asked} blocks: request {request_id} may need {needed}")]
    ShrinkBelowRequest {
        /// The request.
        request_id: RequestId,
        /// Blocks at its full length, lookahead included.
        needed: NumBlocks,
        /// Blocks asked.
        asked: NumBlocks,
    },
    /// A reset of the prefix cache while requests hold its blocks.
    #[error("cannot reset the prefix cache: {num_running} requests are running")]
    PrefixCacheInUse {
        /// Requests that hold blocks.
        num_running: u32,
    },
    /// A broken invariant of this crate; a bug to report.
    #[error("invariant broken: {rule} (at {subject})")]
    Corrupt {
        /// The rule that does not hold.
        rule: &'static str,
        /// Number of the block, slot or request it was noticed at.
        subject: u64,
    },
}

/// `Ok` when the rule holds, else [`Error::Corrupt`].
pub(crate) fn ensure(holds: bool, rule: &'static str, subject: impl Into<u64>) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Corrupt { rule, subject: subject.into() }) }
}
