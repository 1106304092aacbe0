//! Growing and shrinking the pool while requests are live, together with the cache behind it.
//!
//! Order of calls: the cache grows first and then the pool; the pool shrinks first and then the
//! cache. Both are legal while a step is in flight, since its blocks are held by its requests;
//! those of a request aborted meanwhile are not, so memory goes only after the device passed them.

use crate::error::{Error, Result};
use crate::ids::{NumBlocks, saturating_u32};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Adds blocks to the pool, whose cache has grown.
    ///
    /// # Errors
    /// [`Error::GrowBelowCurrent`] or [`Error::BudgetTooLarge`].
    pub fn grow(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        self.kv.grow(new_num_blocks)
    }

    /// Removes the pool's last blocks, before the cache shrinks. They must be free (see
    /// [`Self::vacate`]), and what is left must hold each live request at its full length.
    ///
    /// # Errors
    /// [`Error::ShrinkBelowRequest`], [`Error::BlockInUse`], [`Error::ShrinkAboveCurrent`] or
    /// [`Error::ZeroBudget`].
    pub fn shrink(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        for (_, request) in self.requests.iter() {
            let max_tokens = request.stopping.max_tokens;
            let needed = self.config.num_blocks_needed(request.num_prompt_tokens(), max_tokens);
            if needed > new_num_blocks {
                let (request_id, asked) = (request.id(), new_num_blocks);
                return Err(Error::ShrinkBelowRequest { request_id, needed, asked });
            }
        }
        self.kv.shrink(new_num_blocks)
    }

    /// Preempts every request that holds a block at or past `new_num_blocks`, so that
    /// [`Self::shrink`] finds them free. Returns how many. Call between steps.
    ///
    /// # Errors
    /// [`Error::StepInFlight`].
    pub fn vacate(&mut self, new_num_blocks: NumBlocks) -> Result<u32> {
        self.ensure_idle()?;
        let mut victims = Vec::new();
        for &index in &self.running {
            let block_ids = self.requests.get(index)?.block_ids();
            if block_ids.iter().any(|block_id| block_id.0 >= new_num_blocks.0) {
                victims.push(index);
            }
        }
        for &index in &victims {
            self.preempt(index)?;
        }
        Ok(saturating_u32(victims.len()))
    }

    /// Forgets all cached prefixes, for example after the weights changed.
    ///
    /// # Errors
    /// [`Error::PrefixCacheInUse`] while requests run.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        let num_running = saturating_u32(self.running.len());
        if num_running > 0 {
            return Err(Error::PrefixCacheInUse { num_running });
        }
        self.kv.forget_all()
    }
}
