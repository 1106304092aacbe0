//! Blocks for requests: allocation, reuse of cached prefixes, and release.
//!
//! A block becomes findable only when the step that filled it was reported, so a failed or
//! cancelled step leaves nothing behind. Blocks are released last first: the end of a prefix is
//! reused before its beginning, and a cached block is never found without those before it.

use crate::block_pool::BlockPool;
use crate::error::{Result, ensure};
use crate::ids::{BlockId, BlockSize, NumBlocks, NumTokens, saturating_u32};
use crate::prefix_cache::{BlockContent, BlockHashFn, ChainEnd, PrefixCache};
use crate::request::Request;

/// A cached prefix of a request: whole blocks, at most all tokens but the last.
#[derive(Debug)]
pub(crate) struct PrefixHit {
    pub(crate) block_ids: Vec<BlockId>,
    chain_end: ChainEnd,
}

/// The pool, and what its blocks hold.
#[derive(Debug)]
pub(crate) struct KvBlocks {
    pool: BlockPool,
    cache: PrefixCache,
    block_size: BlockSize,
    hash: BlockHashFn,
    is_caching: bool,
}

impl KvBlocks {
    pub(crate) fn new(
        num_blocks: NumBlocks,
        block_size: BlockSize,
        hash: BlockHashFn,
        is_caching: bool,
    ) -> Result<Self> {
        let pool = BlockPool::new(num_blocks)?;
        Ok(Self { pool, cache: PrefixCache::new(num_blocks), block_size, hash, is_caching })
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub(crate) fn num_cached_blocks(&self) -> NumBlocks {
        self.cache.num_cached_blocks()
    }

    /// The longest cached prefix that leaves at least one token to compute.
    pub(crate) fn find_prefix(&self, request: &mut Request) -> PrefixHit {
        let mut hit = PrefixHit { block_ids: Vec::new(), chain_end: request.root() };
        if !self.is_caching || request.skip_reading_prefix_cache {
            return hit;
        }
        let most = request.num_tokens().saturating_sub(NumTokens(1));
        for index in 0..most.num_full_blocks(self.block_size).0 as usize {
            request.extend_hashes(index + 1, self.block_size, self.hash);
            let Some((hash, token_ids)) = request.hashed_block(index, self.block_size) else {
                break;
            };
            let content = BlockContent { parent: &hit.chain_end, hash, token_ids };
            let Some(node) = self.cache.find(content) else {
                break;
            };
            let Some(block_id) = self.cache.block_of(node) else {
                break;
            };
            hit.block_ids.push(block_id);
            hit.chain_end = ChainEnd::Node(node);
        }
        hit
    }

    /// Tokens of a prefix hit.
    pub(crate) fn num_hit_tokens(&self, hit: &PrefixHit) -> NumTokens {
        NumTokens(saturating_u32(hit.block_ids.len()) * self.block_size.get())
    }

    /// Gives a request that holds nothing its cached prefix and blocks up to `num_slots` tokens,
    /// or nothing when they are not free.
    pub(crate) fn try_admit(
        &mut self,
        request: &mut Request,
        hit: &PrefixHit,
        num_slots: NumTokens,
    ) -> Result<bool> {
        let num_hit = saturating_u32(hit.block_ids.len());
        let num_new = num_slots.num_blocks(self.block_size).0.saturating_sub(num_hit);
        let mut num_revived = 0;
        for &block_id in &hit.block_ids {
            num_revived += u32::from(self.pool.num_refs(block_id)? == 0);
        }
        if num_new + num_revived > self.pool.num_free().0 {
            return Ok(false);
        }
        for &block_id in &hit.block_ids {
            self.pool.acquire(block_id)?;
        }
        request.block_ids.clear();
        request.block_ids.extend_from_slice(&hit.block_ids);
        request.num_registered_blocks = hit.block_ids.len();
        request.chain_end = hit.chain_end.clone();
        request.num_computed_tokens = self.num_hit_tokens(hit);
        self.try_extend(request, num_slots)
    }

    /// Gives a request blocks up to `num_slots` tokens, or nothing when they are not free.
    pub(crate) fn try_extend(
        &mut self,
        request: &mut Request,
        num_slots: NumTokens,
    ) -> Result<bool> {
        let num_held = saturating_u32(request.block_ids.len());
        let num_new = num_slots.num_blocks(self.block_size).0.saturating_sub(num_held);
        if num_new > self.pool.num_free().0 {
            return Ok(false);
        }
        for _ in 0..num_new {
            let Some(block_id) = self.pool.try_allocate() else {
                break;
            };
            self.cache.forget(block_id)?;
            request.block_ids.push(block_id);
        }
        Ok(true)
    }

    /// Makes the request's computed full blocks findable.
    pub(crate) fn register(&mut self, request: &mut Request) -> Result<()> {
        let num_full = request.num_computed_tokens.num_full_blocks(self.block_size).0 as usize;
        if !self.is_caching || num_full <= request.num_registered_blocks {
            return Ok(());
        }
        request.extend_hashes(num_full, self.block_size, self.hash);
        for index in request.num_registered_blocks..num_full {
            let hashed = request.hashed_block(index, self.block_size);
            let block_id = request.block_ids.get(index).copied();
            let (Some((hash, token_ids)), Some(block_id)) = (hashed, block_id) else {
                break;
            };
            let content = BlockContent { parent: &request.chain_end, hash, token_ids };
            let node = self.cache.insert(content, block_id)?;
            request.chain_end = ChainEnd::Node(node);
            request.num_registered_blocks = index + 1;
        }
        Ok(())
    }

    /// Takes all blocks of a request; cached ones stay findable.
    pub(crate) fn release(&mut self, request: &mut Request) -> Result<()> {
        while let Some(block_id) = request.block_ids.pop() {
            self.pool.release(block_id)?;
        }
        request.num_registered_blocks = 0;
        request.chain_end = request.root();
        Ok(())
    }

    pub(crate) fn grow(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        self.pool.grow(new_num_blocks)?;
        self.cache.resize(new_num_blocks);
        Ok(())
    }

    pub(crate) fn shrink(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        let num_blocks = self.pool.num_blocks();
        self.pool.shrink(new_num_blocks)?;
        for id in (new_num_blocks.0..num_blocks.0).rev() {
            self.cache.forget(BlockId(id))?;
        }
        self.cache.resize(new_num_blocks);
        Ok(())
    }

    /// Forgets all cached content. No request may hold a block.
    pub(crate) fn forget_all(&mut self) -> Result<()> {
        for id in (0..self.pool.num_blocks().0).rev() {
            self.cache.forget(BlockId(id))?;
        }
        Ok(())
    }

    /// Checks pool and cache, each alone. O(blocks).
    pub(crate) fn check_integrity(&self) -> Result<()> {
        self.pool.check_integrity()?;
        self.cache.check_integrity()
    }

    /// Checks that a request's blocks cover its computed tokens and hold what it registered.
    pub(crate) fn check_request(&self, request: &Request) -> Result<()> {
        let id = request.id().0;
        let num_needed = request.num_computed_tokens.num_blocks(self.block_size);
        let is_covered = request.block_ids.len() >= num_needed.0 as usize;
        ensure(is_covered, "blocks cover the computed tokens", id)?;
        let mut parent = request.root();
        for (index, &block_id) in request.block_ids.iter().enumerate() {
            let node = self.cache.node_of(block_id);
            let is_registered = index < request.num_registered_blocks;
            let agree = node.is_some() == is_registered;
            ensure(agree, "registered blocks, and they alone, are cached", block_id.0)?;
            let hashed = request.hashed_block(index, self.block_size);
            if let (Some(node), Some((hash, token_ids))) = (node, hashed) {
                let content = BlockContent { parent: &parent, hash, token_ids };
                self.cache.check_content(node, content)?;
                parent = ChainEnd::Node(node);
            }
        }
        let is_at_end = parent == request.chain_end;
        ensure(is_at_end, "the chain ends at the last registered block", id)
    }
}
