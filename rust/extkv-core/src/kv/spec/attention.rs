//! Blocks of layers that keep something for every token: keys and values, or an MLA latent.

use crate::dtype::Dtype;
use crate::kv::checked::{add, mul, non_zero, product};
use crate::kv::error::LayoutError;

/// Keys and values of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionSpec {
    block_size: u64,
    num_kv_heads: u64,
    head_dim: u64,
    head_dim_v: u64,
    dtype: Dtype,
    bytes_per_block: u64,
}

impl AttentionSpec {
    /// Describes a layer whose keys and values have the same `head_dim`.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`] for a size of 0, [`LayoutError::Overflow`] for a block of 2^64
    /// bytes or more.
    pub fn new(
        block_size: u64,
        num_kv_heads: u64,
        head_dim: u64,
        dtype: Dtype,
    ) -> Result<Self, LayoutError> {
        let spec = Self {
            block_size: non_zero("block_size", block_size)?,
            num_kv_heads: non_zero("num_kv_heads", num_kv_heads)?,
            head_dim: non_zero("head_dim", head_dim)?,
            head_dim_v: head_dim,
            dtype,
            bytes_per_block: 0,
        };
        spec.with_head_dim_v(head_dim)
    }

    /// Gives the values another width than the keys.
    ///
    /// # Errors
    /// As [`AttentionSpec::new`].
    pub fn with_head_dim_v(self, head_dim_v: u64) -> Result<Self, LayoutError> {
        let what = "bytes per block of an attention layer";
        let head_dim_v = non_zero("head_dim_v", head_dim_v)?;
        let content = add(what, self.head_dim, head_dim_v)?;
        let sizes = [self.block_size, self.num_kv_heads, content, self.dtype.size_bytes()];
        Ok(Self { head_dim_v, bytes_per_block: product(what, sizes)?, ..self })
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Heads that have keys and values.
    #[must_use]
    pub fn num_kv_heads(&self) -> u64 {
        self.num_kv_heads
    }

    /// Elements of one key.
    #[must_use]
    pub fn head_dim(&self) -> u64 {
        self.head_dim
    }

    /// Elements of one value.
    #[must_use]
    pub fn head_dim_v(&self) -> u64 {
        self.head_dim_v
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `block_size * num_kv_heads * (head_dim + head_dim_v) * size of the dtype`.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_block
    }
}

/// How an MLA layer stores the latent of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlaFormat {
    /// Plain elements: the compressed latent, then the rotary part (DeepSeek: 512 + 64 = 576).
    Latent {
        /// Elements per token.
        latent_dim: u64,
        /// The element type.
        dtype: Dtype,
    },
    /// FlashMLA's packed FP8, 656 bytes per token: 512 fp8 values, 4 fp32 scales (one per 128
    /// values), 64 bf16 rotary values that are not quantised.
    Fp8DsMla,
}

/// Bytes per token of [`MlaFormat::Fp8DsMla`]: 512 × 1 + 4 × 4 + 64 × 2.
pub const FP8_DS_MLA_BYTES_PER_TOKEN: u64 = 656;

/// The latent of one multi-head latent attention layer; it has one head and no separate values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaSpec {
    block_size: u64,
    format: MlaFormat,
    bytes_per_block: u64,
}

impl MlaSpec {
    /// Describes a layer.
    ///
    /// # Errors
    /// [`LayoutError::ZeroSize`] for a size of 0, [`LayoutError::Overflow`] for a block of 2^64
    /// bytes or more.
    pub fn new(block_size: u64, format: MlaFormat) -> Result<Self, LayoutError> {
        let what = "bytes per block of an MLA layer";
        non_zero("block_size", block_size)?;
        let bytes_per_token = match format {
            MlaFormat::Latent { latent_dim, dtype } => {
                mul(what, non_zero("latent_dim", latent_dim)?, dtype.size_bytes())?
            }
            MlaFormat::Fp8DsMla => FP8_DS_MLA_BYTES_PER_TOKEN,
        };
        Ok(Self { block_size, format, bytes_per_block: mul(what, block_size, bytes_per_token)? })
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// The format of a token.
    #[must_use]
    pub fn format(&self) -> MlaFormat {
        self.format
    }

    /// `block_size` times the bytes of a token.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_block
    }

    /// Elements per token and their type: 576 × bf16, or 656 × uint8.
    #[must_use]
    pub fn content(&self) -> (u64, Dtype) {
        match self.format {
            MlaFormat::Latent { latent_dim, dtype } => (latent_dim, dtype),
            MlaFormat::Fp8DsMla => (FP8_DS_MLA_BYTES_PER_TOKEN, Dtype::UInt8),
        }
    }
}
