//! The limits a scheduler works under, checked once, and the sizes that follow from them.

use crate::error::{Error, Result};
use crate::ids::{BlockSize, MAX_INT32, NumBlocks, NumTokens};

/// Who is served first, and who is preempted last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower priority value first, then first come.
    Priority,
}

/// Whether a prompt may be computed over several steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkedPrefill {
    /// A prompt is computed in one step; the token budget holds the longest.
    Disabled,
    /// A prompt is cut at the token budget.
    Enabled {
        /// Most tokens of one request in one step, so that a long prompt leaves room for others.
        long_prefill_token_threshold: Option<NumTokens>,
    },
}

/// Limits of a [`crate::Scheduler`], with vLLM's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most running requests, and number of slots.
    pub max_num_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: NumTokens,
    /// Longest sequence, prompt and output.
    pub max_model_len: NumTokens,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// KV blocks at the start.
    pub num_blocks: NumBlocks,
    /// Most drafts of a request in a step (γ); 0 without a drafter.
    pub num_speculative_tokens: NumTokens,
    /// KV slots kept ready after a request's scheduled tokens: γ for an anchor-first drafter,
    /// γ + 1 for a fill-in one, 0 for none.
    pub num_lookahead_tokens: NumTokens,
    /// Order of service.
    pub policy: SchedulingPolicy,
    /// Whether prompts are cut.
    pub chunked_prefill: ChunkedPrefill,
    /// Whether full blocks are found again.
    pub enable_prefix_caching: bool,
}

impl SchedulerConfig {
    /// Checks the limits against each other.
    ///
    /// # Errors
    /// [`Error::ZeroBudget`], [`Error::BudgetTooLarge`], [`Error::InconsistentBudgets`] or
    /// [`Error::BudgetBelowModelLen`].
    pub fn validate(&self) -> Result<()> {
        let threshold = self.long_prefill_token_threshold();
        let limits = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens.0),
            ("max_model_len", self.max_model_len.0),
            ("vocab_size", self.vocab_size),
            ("block_size", self.block_size.get()),
            ("num_blocks", self.num_blocks.0),
            ("long_prefill_token_threshold", threshold.map_or(1, |threshold| threshold.0)),
        ];
        for (name, asked) in limits {
            if asked == 0 {
                return Err(Error::ZeroBudget { name });
            }
            if asked > MAX_INT32 {
                return Err(Error::BudgetTooLarge { name, asked, limit: MAX_INT32 });
            }
        }
        self.check_token_budget()
    }

    fn check_token_budget(&self) -> Result<()> {
        let max_num_batched_tokens = self.max_num_batched_tokens;
        let max_num_seqs = self.max_num_seqs;
        let num_speculative_tokens = self.num_speculative_tokens;
        let least = max_num_seqs.max(num_speculative_tokens.0.saturating_add(1));
        if max_num_batched_tokens.0 < least {
            return Err(Error::InconsistentBudgets {
                max_num_batched_tokens,
                max_num_seqs,
                num_speculative_tokens,
            });
        }
        let max_model_len = self.max_model_len;
        if self.chunked_prefill == ChunkedPrefill::Disabled
            && max_num_batched_tokens < max_model_len
        {
            return Err(Error::BudgetBelowModelLen { max_num_batched_tokens, max_model_len });
        }
        Ok(())
    }

    /// Most requests of a draft batch in which each has all its drafts: the batch that start-up
    /// profiles and captures. A step with more requests trims the drafts that do not fit.
    #[must_use]
    pub fn max_num_draft_requests(&self) -> u32 {
        let per_request = self.num_speculative_tokens.0.max(1);
        self.max_num_seqs.min(self.max_num_batched_tokens.0 / per_request)
    }

    /// Most rows that a step samples: one per request and one per draft, within the budget.
    #[must_use]
    pub fn max_num_sample_rows(&self) -> u32 {
        let per_request = self.num_speculative_tokens.0.saturating_add(1);
        self.max_num_seqs.saturating_mul(per_request).min(self.max_num_batched_tokens.0)
    }

    /// Most blocks of one request: the width of a block table that never has to grow.
    #[must_use]
    pub fn max_num_blocks_per_request(&self) -> NumBlocks {
        self.max_model_len.num_blocks(self.block_size)
    }

    /// Most blocks that a request may need: all its tokens but the last, drafts and lookahead.
    #[must_use]
    pub fn num_blocks_needed(&self, num_prompt: NumTokens, max_tokens: NumTokens) -> NumBlocks {
        let num_tokens = num_prompt.saturating_add(max_tokens).min(self.max_model_len);
        num_tokens
            .saturating_sub(NumTokens(1))
            .saturating_add(self.num_speculative_tokens)
            .saturating_add(self.num_lookahead_tokens)
            .min(self.max_model_len)
            .num_blocks(self.block_size)
    }

    pub(crate) fn is_chunking(&self) -> bool {
        self.chunked_prefill != ChunkedPrefill::Disabled
    }

    pub(crate) fn long_prefill_token_threshold(&self) -> Option<NumTokens> {
        match self.chunked_prefill {
            ChunkedPrefill::Disabled => None,
            ChunkedPrefill::Enabled { long_prefill_token_threshold } => {
                long_prefill_token_threshold
            }
        }
    }
}
