//! When a request ends: end-of-sequence, stop tokens, and the two length limits.
//!
//! Tokens are judged one by one, so a block of several accepted tokens is cut at the first that
//! ends the request. A stop token wins over a length limit reached by the same token.

use crate::ids::{NumTokens, TokenId};

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// End of sequence, a stop token, or a stop string found by the engine.
    Stop,
    /// `max_tokens` or `max_model_len`.
    Length,
    /// Ended from outside.
    Abort,
    /// Its step failed, for example with NaN logits.
    Error,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// The stop token, when one of `stop_token_ids` ended it.
    pub stop_token_id: Option<TokenId>,
}

impl From<FinishReason> for Finished {
    fn from(reason: FinishReason) -> Self {
        Self { reason, stop_token_id: None }
    }
}

/// The rules by which one request ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopping {
    /// Most output tokens; at least 1.
    pub max_tokens: NumTokens,
    /// Output tokens before which neither end-of-sequence nor a stop token ends the request.
    pub min_tokens: NumTokens,
    /// Tokens that end the request; the one that does is part of the output.
    pub stop_token_ids: Vec<TokenId>,
    /// The model's end-of-sequence token.
    pub eos_token_id: Option<TokenId>,
    /// Whether `eos_token_id` is an ordinary token.
    pub ignore_eos: bool,
}

impl Stopping {
    /// Ends at `max_tokens` only.
    #[must_use]
    pub fn at_length(max_tokens: NumTokens) -> Self {
        Self {
            max_tokens,
            min_tokens: NumTokens(0),
            stop_token_ids: Vec::new(),
            eos_token_id: None,
            ignore_eos: false,
        }
    }

    /// Whether a request ends with `last` as its output token number `num_output_tokens`, when
    /// `num_free_tokens` more would fit under `max_model_len`.
    #[must_use]
    pub(crate) fn check(
        &self,
        last: TokenId,
        num_output_tokens: NumTokens,
        num_free_tokens: NumTokens,
    ) -> Option<Finished> {
        if num_output_tokens >= self.min_tokens {
            if self.eos_token_id == Some(last) && !self.ignore_eos {
                return Some(FinishReason::Stop.into());
            }
            if self.stop_token_ids.contains(&last) {
                return Some(Finished { reason: FinishReason::Stop, stop_token_id: Some(last) });
            }
        }
        let is_at_limit = num_output_tokens >= self.max_tokens || num_free_tokens.0 == 0;
        is_at_limit.then(|| FinishReason::Length.into())
    }
}
