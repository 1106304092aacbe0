//! What sizing knows of a cache: how many bytes a block has, and how many a request needs.

use serde::{Deserialize, Serialize};

use super::error::{RecordError, SizingError};
use crate::dtype::Dtype;
use crate::kv::checked::product;
use crate::kv::error::LayoutError;
use crate::kv::spec::NumBlocks;

/// What sizing needs to know of a cache; [`crate::kv::CachePlan::facts`] makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheFacts {
    /// Bytes of a block in all buffers.
    pub bytes_per_block: u64,
    /// Segments of all buffers; each may waste part of a granule.
    pub num_segments: u64,
    /// Tokens of a block.
    pub block_size: u64,
    /// Block tables of a request that grow with its length; more than 1 where layers share a pool.
    #[serde(default = "one")]
    pub num_block_tables: u64,
    /// Blocks that a request holds whatever its length: recurrent state, full sliding windows.
    #[serde(default)]
    pub fixed_blocks_per_request: u64,
}

const fn one() -> u64 {
    1
}

impl CacheFacts {
    /// Writes the facts as JSON, as a trace holds them.
    ///
    /// # Errors
    /// [`RecordError::Json`].
    pub fn to_json(&self) -> Result<String, RecordError> {
        Ok(serde_json::to_string(self)?)
    }

    /// Blocks that a request of `num_tokens` holds.
    ///
    /// # Errors
    /// [`SizingError::Overflow`].
    pub fn blocks_per_request(&self, num_tokens: u64) -> Result<u64, SizingError> {
        num_tokens
            .div_ceil(self.block_size.max(1))
            .checked_mul(self.num_block_tables)
            .and_then(|blocks| blocks.checked_add(self.fixed_blocks_per_request))
            .ok_or(SizingError::Overflow { what: "blocks per request" })
    }

    /// The least that any request holds; 0 would be a cache that no request uses.
    pub(super) fn blocks_at_least(&self) -> u64 {
        self.num_block_tables.saturating_add(self.fixed_blocks_per_request)
    }

    /// Tokens of the longest request that `blocks` blocks hold, at most `max_model_len`.
    #[must_use]
    pub fn longest_request(&self, blocks: NumBlocks, max_model_len: u64) -> u64 {
        match blocks.0.checked_sub(self.fixed_blocks_per_request) {
            None => 0,
            Some(growing) => match growing.checked_div(self.num_block_tables) {
                None => max_model_len,
                Some(per_table) => per_table.saturating_mul(self.block_size).min(max_model_len),
            },
        }
    }

    /// Tokens that `blocks` blocks hold, in all requests together.
    #[must_use]
    pub fn num_tokens(&self, blocks: NumBlocks) -> u64 {
        (blocks.0 / self.num_block_tables.max(1)).saturating_mul(self.block_size)
    }

    /// Bytes that one more token takes, rounded up.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        let bytes = self.bytes_per_block.saturating_mul(self.num_block_tables.max(1));
        bytes.div_ceil(self.block_size.max(1))
    }
}

/// Persistent bytes of an encoder cache of `cache_size` embeddings; 0, and nothing to hold, for an
/// empty one.
///
/// # Errors
/// [`LayoutError::Overflow`].
pub fn encoder_cache_bytes(
    cache_size: u64,
    embed_size: u64,
    dtype: Dtype,
) -> Result<u64, LayoutError> {
    product("bytes of an encoder cache", [cache_size, embed_size, dtype.size_bytes()])
}
