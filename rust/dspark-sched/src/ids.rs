//! Typed ids and counts, so that a block cannot be passed for a token or a slot for a block.
//!
//! All are plain numbers: creating one checks nothing. Ids are checked where they are used.

use std::fmt;
use std::num::NonZeroU32;

use crate::error::{Error, Result};

/// The largest value of any count or id that appears in an int32 array of a plan.
pub const MAX_INT32: u32 = i32::MAX.unsigned_abs();

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

number!(
    /// A request, named by the engine. Unique among live requests.
    RequestId(u64)
);
number!(
    /// A vocabulary entry.
    TokenId(u32)
);
number!(
    /// A block of the KV cache: `0..num_blocks`.
    BlockId(u32)
);
number!(
    /// A row of the persistent batch: `0..max_num_seqs`. A running request keeps its slot.
    SlotId(u32)
);
number!(
    /// How many occupants a slot has had. Tells a new occupant from the one before.
    Generation(u32)
);
number!(
    /// A step: one call of `schedule`. Counts from 1.
    StepId(u64)
);
number!(
    /// A number of tokens, or of the KV slots they take.
    NumTokens(u32)
);
number!(
    /// A number of KV blocks.
    NumBlocks(u32)
);

impl TokenId {
    /// The id as an element of an int32 array. Ids below the vocabulary size always fit.
    #[must_use]
    pub fn as_int32(self) -> i32 {
        self.0.cast_signed()
    }
}

impl BlockId {
    /// The id as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NumTokens {
    /// Counts the elements of a slice of tokens. Saturates far above any legal length.
    #[must_use]
    pub fn of<T>(tokens: &[T]) -> Self {
        Self(saturating_u32(tokens.len()))
    }

    /// Blocks that hold this many tokens, the last one perhaps in part.
    #[must_use]
    pub fn num_blocks(self, block_size: BlockSize) -> NumBlocks {
        NumBlocks(self.0.div_ceil(block_size.get()))
    }

    /// Blocks that this many tokens fill to the end.
    #[must_use]
    pub fn num_full_blocks(self, block_size: BlockSize) -> NumBlocks {
        NumBlocks(self.0 / block_size.get())
    }

    /// The sum, or the largest count.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, or zero.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// Tokens per block; never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// A block of `num_tokens` tokens.
    ///
    /// # Errors
    /// [`Error::ZeroBlockSize`].
    pub fn new(num_tokens: u32) -> Result<Self> {
        NonZeroU32::new(num_tokens).map(Self).ok_or(Error::ZeroBlockSize)
    }

    /// Tokens per block.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A length as a count. Lengths near the limit are refused before they get here.
pub(crate) fn saturating_u32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
