//! The size of a cache as data, and the smaller sizes that later events may force.

use serde::Serialize;

use super::error::SizingError;
use super::facts::CacheFacts;
use super::parts::{Limit, Parts};
use super::warning::Warning;
use crate::kv::spec::NumBlocks;
use crate::units::Bytes;

/// The size of a cache, and why it is that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SizingPlan {
    /// Memory of the device; the sum of the parts.
    pub device_total_bytes: u64,
    /// Where it goes.
    pub parts: Parts,
    /// Blocks to commit.
    pub blocks: NumBlocks,
    /// Tokens that they hold.
    pub num_tokens: u64,
    /// Blocks that one request of `max_model_len` needs.
    pub blocks_per_request: u64,
    /// Tokens of the longest request.
    pub max_model_len: u64,
    /// The cache.
    pub cache: CacheFacts,
    /// Why there are not more blocks.
    pub limit: Limit,
    /// What looked odd on the way; none of it stopped the plan.
    pub warnings: Vec<Warning>,
}

impl SizingPlan {
    /// Requests of `max_model_len` tokens that fit at once.
    #[must_use]
    pub fn concurrency(&self) -> f64 {
        self.blocks.0 as f64 / self.blocks_per_request as f64
    }

    /// The plan with fewer blocks, as another rank or a later look at free memory demands.
    ///
    /// # Errors
    /// [`SizingError::AbovePlan`] for more blocks than the plan has.
    pub fn at_blocks(&self, blocks: NumBlocks, limit: Limit) -> Result<Self, SizingError> {
        if blocks > self.blocks {
            return Err(SizingError::AbovePlan { requested: blocks, blocks: self.blocks });
        }
        if blocks == self.blocks {
            return Ok(self.clone());
        }
        let mut plan = self.clone();
        let given_up = (self.blocks.0 - blocks.0) * self.cache.bytes_per_block;
        plan.parts.kv_bytes -= given_up;
        plan.parts.unused_bytes += given_up;
        plan.num_tokens = self.cache.num_tokens(blocks);
        (plan.blocks, plan.limit) = (blocks, limit);
        Ok(plan)
    }

    /// Looks at the device once more just before committing: the planned blocks, or fewer if
    /// memory is gone meanwhile.
    ///
    /// # Errors
    /// [`SizingError::ManualSizeTooLarge`] if a size set by hand no longer fits, which is not
    /// made smaller; [`SizingError::TooSmallForOneRequest`] if what is left does not hold one
    /// request.
    pub fn at_commit(
        &self,
        driver_free_bytes: u64,
        committed_bytes: u64,
    ) -> Result<Self, SizingError> {
        let parts = &self.parts;
        let taken = parts.margin_bytes().saturating_add(parts.rounding_bytes);
        let physical = driver_free_bytes.saturating_add(committed_bytes);
        let room = physical.saturating_sub(taken);
        let blocks = NumBlocks(room / self.cache.bytes_per_block).min(self.blocks);
        if self.limit == Limit::ManualSize && blocks < self.blocks {
            return Err(SizingError::ManualSizeTooLarge {
                requested: Bytes(parts.kv_bytes),
                free: Bytes(physical),
                available: Bytes(room),
            });
        }
        if blocks.0 < self.blocks_per_request {
            return Err(self.too_small_at_commit(blocks, physical, taken));
        }
        self.at_blocks(blocks, Limit::FreeMemory)
    }

    fn too_small_at_commit(&self, blocks: NumBlocks, physical: u64, taken: u64) -> SizingError {
        let needed = NumBlocks(self.blocks_per_request);
        let needed_bytes = needed.0.saturating_mul(self.cache.bytes_per_block);
        SizingError::TooSmallForOneRequest {
            max_model_len: self.max_model_len,
            needed,
            blocks,
            longest: self.cache.longest_request(blocks, self.max_model_len),
            missing: Bytes(needed_bytes.saturating_add(taken).saturating_sub(physical)),
            limit: Limit::FreeMemory,
        }
    }
}
