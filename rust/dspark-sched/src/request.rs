//! One request: its tokens, how many of them are in the cache, its drafts and what it holds.
//!
//! `token_ids` are committed tokens only: prompt and output, append-only. Drafts stand after them
//! and are never part of them. Positions `0..num_computed_tokens` have their keys and values in
//! `block_ids`; while a step is in flight that count already includes what the step computes.

use std::sync::Arc;

use crate::ids::{BlockId, BlockSize, NumTokens, RequestId, SlotId, TokenId, saturating_u32};
use crate::prefix_cache::{BlockHash, BlockHashFn, CacheKeys, ChainEnd, root_hash};
use crate::stop::{Finished, Stopping};

/// A draft: a token to verify, or `None` for a placeholder, whose token only the runner knows or
/// which does not exist.
pub type Draft = Option<TokenId>;

/// A request as the engine hands it in.
#[derive(Debug, Clone)]
pub struct NewRequest {
    /// Its id; unique among live requests.
    pub request_id: RequestId,
    /// Its prompt; at least one token.
    pub prompt_token_ids: Vec<TokenId>,
    /// When it ends.
    pub stopping: Stopping,
    /// Rank under the priority policy: a lower value is served first.
    pub priority: i32,
    /// What besides the tokens decides its blocks' content.
    pub cache_keys: CacheKeys,
    /// Whether to compute the whole prompt (for prompt logprobs) though a prefix is cached.
    pub skip_reading_prefix_cache: bool,
}

impl NewRequest {
    /// A request that ends after `max_tokens`, with defaults for the rest.
    #[must_use]
    pub fn new(request_id: RequestId, prompt: Vec<TokenId>, max_tokens: NumTokens) -> Self {
        Self {
            request_id,
            prompt_token_ids: prompt,
            stopping: Stopping::at_length(max_tokens),
            priority: 0,
            cache_keys: CacheKeys::default(),
            skip_reading_prefix_cache: false,
        }
    }
}

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStatus {
    /// Not admitted yet; holds nothing.
    Waiting,
    /// Holds a slot and blocks.
    Running,
    /// Was running, lost everything it held, and will compute its tokens again.
    Preempted,
    /// Ended and no longer live; holds nothing.
    Finished(Finished),
}

/// Order of service: smaller is served first and preempted last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// 0 for all under first-come-first-served.
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
}

/// A request, live or ended.
#[derive(Debug)]
pub struct Request {
    id: RequestId,
    token_ids: Vec<TokenId>,
    num_prompt_tokens: NumTokens,
    pub(crate) stopping: Stopping,
    pub(crate) rank: Rank,
    pub(crate) skip_reading_prefix_cache: bool,
    pub(crate) status: RequestStatus,
    pub(crate) slot: Option<SlotId>,
    pub(crate) num_computed_tokens: NumTokens,
    pub(crate) num_cached_tokens: NumTokens,
    pub(crate) num_preemptions: u32,
    pub(crate) drafts: Vec<Draft>,
    pub(crate) block_ids: Vec<BlockId>,
    /// How many of `block_ids`, from the first, are in the prefix cache, and their last node.
    pub(crate) num_registered_blocks: usize,
    pub(crate) chain_end: ChainEnd,
    /// Row of the plan in flight.
    pub(crate) row_in_flight: Option<usize>,
    cache_keys: Arc<CacheKeys>,
    block_hashes: Vec<BlockHash>,
}

impl Request {
    pub(crate) fn new(new: NewRequest, rank: Rank) -> Self {
        let cache_keys = Arc::new(new.cache_keys);
        Self {
            id: new.request_id,
            num_prompt_tokens: NumTokens::of(&new.prompt_token_ids),
            token_ids: new.prompt_token_ids,
            stopping: new.stopping,
            rank,
            skip_reading_prefix_cache: new.skip_reading_prefix_cache,
            status: RequestStatus::Waiting,
            slot: None,
            num_computed_tokens: NumTokens(0),
            num_cached_tokens: NumTokens(0),
            num_preemptions: 0,
            drafts: Vec::new(),
            block_ids: Vec::new(),
            num_registered_blocks: 0,
            chain_end: ChainEnd::Root(Arc::clone(&cache_keys)),
            row_in_flight: None,
            cache_keys,
            block_hashes: Vec::new(),
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Where it stands.
    #[must_use]
    pub fn status(&self) -> RequestStatus {
        self.status
    }

    /// Its slot in the persistent batch, while it runs.
    #[must_use]
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// Committed tokens: prompt, then output.
    #[must_use]
    pub fn token_ids(&self) -> &[TokenId] {
        &self.token_ids
    }

    /// Output tokens so far.
    #[must_use]
    pub fn output_token_ids(&self) -> &[TokenId] {
        &self.token_ids[self.num_prompt_tokens.0 as usize..]
    }

    /// Number of committed tokens.
    #[must_use]
    pub fn num_tokens(&self) -> NumTokens {
        NumTokens::of(&self.token_ids)
    }

    /// Length of the prompt.
    #[must_use]
    pub fn num_prompt_tokens(&self) -> NumTokens {
        self.num_prompt_tokens
    }

    /// Tokens whose keys and values are in the cache, those of a step in flight included.
    #[must_use]
    pub fn num_computed_tokens(&self) -> NumTokens {
        self.num_computed_tokens
    }

    /// Tokens that the prefix cache saved at the first admission.
    #[must_use]
    pub fn num_cached_tokens(&self) -> NumTokens {
        self.num_cached_tokens
    }

    /// How often it was preempted.
    #[must_use]
    pub fn num_preemptions(&self) -> u32 {
        self.num_preemptions
    }

    /// Drafts that its next step will verify, or that the step in flight verifies.
    #[must_use]
    pub fn drafts(&self) -> &[Draft] {
        &self.drafts
    }

    /// Its blocks, in token order.
    #[must_use]
    pub fn block_ids(&self) -> &[BlockId] {
        &self.block_ids
    }

    /// Whether its next step computes the last committed token and so can verify drafts.
    #[must_use]
    pub fn is_decoding(&self) -> bool {
        self.status == RequestStatus::Running
            && self.num_computed_tokens.0 + 1 == self.num_tokens().0
    }

    /// Appends accepted tokens until one ends the request; returns how many were kept.
    pub(crate) fn append(
        &mut self,
        accepted: &[TokenId],
        max_model_len: NumTokens,
    ) -> (usize, Option<Finished>) {
        for (index, &token_id) in accepted.iter().enumerate() {
            self.token_ids.push(token_id);
            let num_output_tokens = NumTokens::of(self.output_token_ids());
            let num_free_tokens = max_model_len.saturating_sub(self.num_tokens());
            let end = self.stopping.check(token_id, num_output_tokens, num_free_tokens);
            if end.is_some() {
                return (index + 1, end);
            }
        }
        (accepted.len(), None)
    }

    /// Forgets all cached state, after its blocks and slot were given back.
    pub(crate) fn reset_for_recompute(&mut self) {
        self.status = RequestStatus::Preempted;
        self.slot = None;
        self.num_computed_tokens = NumTokens(0);
        self.num_preemptions += 1;
        self.drafts.clear();
    }

    /// The chain before its first block.
    pub(crate) fn root(&self) -> ChainEnd {
        ChainEnd::Root(Arc::clone(&self.cache_keys))
    }

    /// Makes sure that `block_hash` knows the first `num_blocks` blocks, all full.
    pub(crate) fn extend_hashes(
        &mut self,
        num_blocks: usize,
        block_size: BlockSize,
        hash: BlockHashFn,
    ) {
        let blocks = self.token_ids.chunks_exact(block_size.get() as usize);
        for tokens in blocks.take(num_blocks).skip(self.block_hashes.len()) {
            let root = || root_hash(&self.cache_keys);
            let parent = self.block_hashes.last().copied().unwrap_or_else(root);
            self.block_hashes.push(hash(parent, tokens));
        }
    }

    /// Hash and tokens of a full block covered by `extend_hashes`.
    pub(crate) fn hashed_block(
        &self,
        index: usize,
        block_size: BlockSize,
    ) -> Option<(BlockHash, &[TokenId])> {
        let hash = *self.block_hashes.get(index)?;
        let tokens = self.token_ids.chunks_exact(block_size.get() as usize).nth(index)?;
        Some((hash, tokens))
    }

    /// Drafts as elements of an int32 array, placeholders as -1.
    pub(crate) fn drafts_as_int32(&self) -> impl Iterator<Item = i32> + '_ {
        self.drafts.iter().map(|draft| draft.map_or(-1, TokenId::as_int32))
    }

    /// Number of drafts.
    pub(crate) fn num_drafts(&self) -> u32 {
        saturating_u32(self.drafts.len())
    }
}
