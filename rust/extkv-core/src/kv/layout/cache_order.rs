//! The six physical orders of a cache whose layers share one tensor `[L, B, H, N, C]`.
//!
//! L layers, B blocks, H heads, N tokens of a block, C content of a head and token (keys, then
//! values; the latent of MLA). The logical shape is always LBHNC; the name is the order in memory,
//! as in vLLM's `KVCacheLayout` (RFC 42082).

use std::fmt;
use std::str::FromStr;

use thiserror::Error as ThisError;

use super::{Dim, Layout};
use crate::kv::error::LayoutError;
use crate::kv::spec::BlockShape;

/// Order of the dims in memory, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheOrder {
    /// Layer by layer; heads outside tokens. One segment per layer.
    Lbhnc,
    /// Layer by layer; tokens outside heads. One segment per layer.
    Lbnhc,
    /// Head by head in each layer. One segment per layer and head.
    Lhbnc,
    /// Block by block, layers inside. One segment.
    Blhnc,
    /// Block by block, layers inside, tokens outside heads. One segment.
    Blnhc,
    /// Block by block, then head by head over all layers. One segment.
    Bhlnc,
}

/// A name that is no cache order.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("unknown cache order {name:?}; use LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC")]
pub struct UnknownCacheOrder {
    /// The name as given.
    pub name: String,
}

/// The layer dim of the logical shape.
pub(crate) const LAYER_DIM: usize = 0;
const BLOCK_DIM: usize = 1;

impl CacheOrder {
    /// Every order.
    pub const ALL: [Self; 6] =
        [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The stride order of the logical dims `[L, B, H, N, C]`.
    #[must_use]
    pub const fn stride_order(self) -> [usize; 5] {
        match self {
            Self::Lbhnc => [0, 1, 2, 3, 4],
            Self::Lbnhc => [0, 1, 3, 2, 4],
            Self::Lhbnc => [0, 2, 1, 3, 4],
            Self::Blhnc => [1, 0, 2, 3, 4],
            Self::Blnhc => [1, 0, 3, 2, 4],
            Self::Bhlnc => [1, 2, 0, 3, 4],
        }
    }

    /// The name in capitals.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// Whether the bytes that one layer has in a block are one run.
    #[must_use]
    pub const fn is_layer_contiguous_in_block(self) -> bool {
        !matches!(self, Self::Lhbnc | Self::Bhlnc)
    }

    /// The layout of `num_layers` layers that all have this block.
    ///
    /// # Errors
    /// [`LayoutError::ZeroDim`], [`LayoutError::Overflow`].
    pub fn layout(self, num_layers: u64, block: &BlockShape) -> Result<Layout, LayoutError> {
        let dims = vec![
            Dim::new("layers", num_layers),
            Dim::blocks(),
            Dim::new("heads", block.num_heads),
            Dim::new("tokens", block.num_tokens),
            Dim::new("content", block.content),
        ];
        Layout::new(dims, self.stride_order().to_vec(), BLOCK_DIM, block.dtype)
    }
}

impl fmt::Display for CacheOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheOrder {
    type Err = UnknownCacheOrder;

    fn from_str(name: &str) -> Result<Self, UnknownCacheOrder> {
        Self::ALL
            .into_iter()
            .find(|order| order.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownCacheOrder { name: name.to_owned() })
    }
}
