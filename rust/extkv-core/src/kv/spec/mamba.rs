//! Recurrent state (Mamba, linear attention, short convolutions): several tensors in one block.
//!
//! [`MambaSpec`] is the one place where the state's shapes, the speculative widening and the block
//! size come from, so that a planner and a layer cannot disagree. [`StateBlock`] says where each
//! state lies in the block. Other engines call such a block a Mamba page.

use super::state_block::{StateBlock, StateSpec};
use crate::kv::checked::non_zero;
use crate::kv::error::LayoutError;
use crate::units::Bytes;

/// What one recurrent layer caches.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MambaSpec {
    block_size: u64,
    num_speculative_tokens: u64,
    needed_bytes: u64,
    block: StateBlock,
}

impl MambaSpec {
    /// Describes a layer. The states are widened for `num_speculative_tokens` here and nowhere
    /// else; `block_size` is the number of tokens after which a state is kept, usually
    /// `max_model_len`.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`], [`LayoutError::NoStates`], [`LayoutError::Overflow`].
    pub fn new(
        block_size: u64,
        states: &[StateSpec],
        num_speculative_tokens: u64,
    ) -> Result<Self, LayoutError> {
        non_zero("block_size", block_size)?;
        let block = StateBlock::pack(states, num_speculative_tokens)?;
        let needed_bytes = block.bytes_per_block();
        Ok(Self { block_size, num_speculative_tokens, needed_bytes, block })
    }

    /// Takes the states of one block from offsets that a layer reports, already widened.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`].
    pub fn from_block(
        block_size: u64,
        block: StateBlock,
        num_speculative_tokens: u64,
    ) -> Result<Self, LayoutError> {
        non_zero("block_size", block_size)?;
        let needed_bytes = block.bytes_per_block();
        Ok(Self { block_size, num_speculative_tokens, needed_bytes, block })
    }

    /// Pads the block to `bytes`, for a pool that other layers share.
    ///
    /// # Errors
    /// [`LayoutError::BlockTooSmall`] names `bytes`, the bytes needed and the speculative tokens
    /// that were counted; [`LayoutError::BlockMisaligned`].
    pub fn padded_to(mut self, bytes: u64) -> Result<Self, LayoutError> {
        if bytes < self.needed_bytes {
            return Err(LayoutError::BlockTooSmall {
                bytes: Bytes(bytes),
                needed: Bytes(self.needed_bytes),
                num_speculative_tokens: self.num_speculative_tokens,
            });
        }
        self.block = self.block.padded_to(bytes)?;
        Ok(self)
    }

    /// Compares with the block size that another part of an engine planned.
    ///
    /// # Errors
    /// [`LayoutError::BlockMismatch`] names both sizes.
    pub fn check_planned_bytes(&self, planned: u64) -> Result<(), LayoutError> {
        if planned == self.bytes_per_block() {
            return Ok(());
        }
        Err(LayoutError::BlockMismatch {
            planned: Bytes(planned),
            actual: Bytes(self.bytes_per_block()),
            num_speculative_tokens: self.num_speculative_tokens,
        })
    }

    /// Tokens after which a state is kept.
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Speculated tokens that the states have room for.
    #[must_use]
    pub fn num_speculative_tokens(&self) -> u64 {
        self.num_speculative_tokens
    }

    /// Blocks that one request holds: its state, and one more per speculated token.
    #[must_use]
    pub fn blocks_per_request(&self) -> u64 {
        self.num_speculative_tokens.saturating_add(1)
    }

    /// Where the states lie.
    #[must_use]
    pub fn block(&self) -> &StateBlock {
        &self.block
    }

    /// Bytes of one block, padding included.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.block.bytes_per_block()
    }

    /// The largest element size; every block starts at a multiple of it.
    #[must_use]
    pub fn alignment_bytes(&self) -> u64 {
        self.block.alignment_bytes()
    }
}
