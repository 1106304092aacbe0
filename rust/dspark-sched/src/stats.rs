//! Counters since the scheduler was made, and gauges of where it stands.

use crate::ids::{NumBlocks, NumTokens};

/// How much the prefix cache saved, counted at admission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    /// Admissions.
    pub num_requests: u64,
    /// Tokens of the admitted requests.
    pub num_query_tokens: u64,
    /// Tokens among them found in the cache.
    pub num_hit_tokens: u64,
}

impl PrefixCacheStats {
    /// Tokens found per token asked; 0 before the first admission.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        if self.num_query_tokens == 0 {
            return 0.0;
        }
        self.num_hit_tokens as f64 / self.num_query_tokens as f64
    }

    pub(crate) fn record(&mut self, num_query_tokens: NumTokens, num_hit_tokens: NumTokens) {
        self.num_requests += 1;
        self.num_query_tokens += u64::from(num_query_tokens.0);
        self.num_hit_tokens += u64::from(num_hit_tokens.0);
    }
}

/// Counters and gauges of a scheduler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests that hold a slot.
    pub num_running: u32,
    /// Requests in the queue, preempted ones included.
    pub num_waiting: u32,
    /// Blocks of the pool.
    pub num_blocks: NumBlocks,
    /// Blocks that no request holds.
    pub num_free_blocks: NumBlocks,
    /// Blocks, held or free, whose content can be found.
    pub num_cached_blocks: NumBlocks,
    /// Preemptions so far.
    pub num_preemptions: u64,
    /// Drafts verified so far.
    pub num_draft_tokens: u64,
    /// Drafts accepted so far.
    pub num_accepted_tokens: u64,
    /// Prefix reuse of new requests.
    pub prefix_cache: PrefixCacheStats,
    /// Prefix reuse of preempted requests that came back.
    pub prefix_cache_resumed: PrefixCacheStats,
}
