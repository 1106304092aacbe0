//! What one layer caches: attention keys and values, an MLA latent, or recurrent state.
//!
//! A spec knows the bytes of one block and of nothing else; where those bytes lie is a layout's
//! business ([`super::Layout`], [`super::StateBlock`]). Every size is checked when the spec is
//! made, so the getters cannot fail.

mod attention;
mod mamba;
mod state_block;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use attention::{AttentionSpec, FP8_DS_MLA_BYTES_PER_TOKEN, MlaFormat, MlaSpec};
pub use mamba::MambaSpec;
pub use state_block::{StateBlock, StateSpec, StateTensor};

use super::checked::non_zero;
use super::error::LayoutError;
use crate::dtype::Dtype;

/// A number of blocks.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct NumBlocks(pub u64);

/// The index of a block, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u64);

impl fmt::Display for NumBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The longest request an engine accepts, as far as it decides how many blocks one needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestShape {
    /// Tokens of the longest request.
    pub max_model_len: u64,
    /// Tokens that one step may add to it.
    pub max_num_batched_tokens: u64,
}

/// The sizes of one block in the field's `[.., H, N, C]` form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// H: heads.
    pub num_heads: u64,
    /// N: tokens of the block.
    pub num_tokens: u64,
    /// C: elements per head and token; keys, then values.
    pub content: u64,
    /// The element type.
    pub dtype: Dtype,
}

/// What one layer caches.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KvSpec {
    /// Keys and values of every token.
    FullAttention(AttentionSpec),
    /// Keys and values of the last `window` tokens.
    SlidingWindow {
        /// One block.
        attention: AttentionSpec,
        /// Tokens that a query may see.
        window: u64,
    },
    /// The latent of every token.
    Mla(MlaSpec),
    /// Recurrent state: one block per request (and per speculated token), whatever its length.
    Mamba(MambaSpec),
}

impl KvSpec {
    /// Describes a sliding-window layer.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`] for a window of 0.
    pub fn sliding_window(attention: AttentionSpec, window: u64) -> Result<Self, LayoutError> {
        Ok(Self::SlidingWindow { attention, window: non_zero("window", window)? })
    }

    /// The keys and values, of a layer that has them.
    ///
    /// # Errors
    /// [`LayoutError::SpecKind`].
    pub fn attention(&self) -> Result<&AttentionSpec, LayoutError> {
        match self {
            Self::FullAttention(attention) | Self::SlidingWindow { attention, .. } => Ok(attention),
            _ => Err(self.not_a("attention")),
        }
    }

    /// The latent, of a layer that has one.
    ///
    /// # Errors
    /// [`LayoutError::SpecKind`].
    pub fn mla(&self) -> Result<&MlaSpec, LayoutError> {
        match self {
            Self::Mla(mla) => Ok(mla),
            _ => Err(self.not_a("MLA")),
        }
    }

    fn not_a(&self, needed: &'static str) -> LayoutError {
        let found = match self {
            Self::FullAttention(_) | Self::SlidingWindow { .. } => "attention",
            Self::Mla(_) => "MLA",
            Self::Mamba(_) => "recurrent",
        };
        LayoutError::SpecKind { needed, found }
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> u64 {
        match self {
            Self::FullAttention(attention) | Self::SlidingWindow { attention, .. } => {
                attention.block_size()
            }
            Self::Mla(mla) => mla.block_size(),
            Self::Mamba(mamba) => mamba.block_size(),
        }
    }

    /// Bytes of one block of this layer.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        match self {
            Self::FullAttention(attention) | Self::SlidingWindow { attention, .. } => {
                attention.bytes_per_block()
            }
            Self::Mla(mla) => mla.bytes_per_block(),
            Self::Mamba(mamba) => mamba.bytes_per_block(),
        }
    }

    /// The alignment that every block start has and its readers rely on: one element, or 16 bytes
    /// for `fp8_ds_mla`, whose kernels read 16 bytes at a time (656 = 41 × 16).
    #[must_use]
    pub fn alignment_bytes(&self) -> u64 {
        match self {
            Self::FullAttention(attention) | Self::SlidingWindow { attention, .. } => {
                attention.dtype().size_bytes()
            }
            Self::Mla(mla) => match mla.format() {
                MlaFormat::Latent { dtype, .. } => dtype.size_bytes(),
                MlaFormat::Fp8DsMla => 16,
            },
            Self::Mamba(mamba) => mamba.alignment_bytes(),
        }
    }

    /// The block as heads, tokens and content; `None` for recurrent state, which has no tokens.
    #[must_use]
    pub fn block_shape(&self) -> Option<BlockShape> {
        match self {
            Self::FullAttention(spec) | Self::SlidingWindow { attention: spec, .. } => {
                Some(BlockShape {
                    num_heads: spec.num_kv_heads(),
                    num_tokens: spec.block_size(),
                    // Cannot overflow: the block's bytes, a multiple of it, did not.
                    content: spec.head_dim().saturating_add(spec.head_dim_v()),
                    dtype: spec.dtype(),
                })
            }
            Self::Mla(mla) => {
                let (content, dtype) = mla.content();
                Some(BlockShape { num_heads: 1, num_tokens: mla.block_size(), content, dtype })
            }
            Self::Mamba(_) => None,
        }
    }

    /// Blocks that one request of `max_model_len` tokens holds at most.
    ///
    /// A sliding window holds `window - 1` old tokens plus one step's new ones, in one block more
    /// than they fill because the window may start inside a block.
    #[must_use]
    pub fn blocks_per_request(&self, request: &RequestShape) -> u64 {
        let whole = request.max_model_len.div_ceil(self.block_size());
        match self {
            Self::FullAttention(_) | Self::Mla(_) => whole,
            Self::SlidingWindow { attention, window } => (window - 1)
                .saturating_add(request.max_num_batched_tokens)
                .div_ceil(attention.block_size())
                .saturating_add(1)
                .min(whole),
            Self::Mamba(mamba) => mamba.blocks_per_request(),
        }
    }

    /// Whether a request's blocks grow with its length without end.
    #[must_use]
    pub fn grows_with_length(&self) -> bool {
        matches!(self, Self::FullAttention(_) | Self::Mla(_))
    }
}
