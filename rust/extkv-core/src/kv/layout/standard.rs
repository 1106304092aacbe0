//! The layouts that attention backends use most, from a layer's spec.

use super::{Dim, Layout};
use crate::dtype::Dtype;
use crate::kv::error::LayoutError;
use crate::kv::spec::{AttentionSpec, MlaSpec};

impl Layout {
    /// Keys of all blocks, then values of all blocks: `(2, N, tokens, heads, head_dim)`, 2
    /// segments.
    ///
    /// # Errors
    /// [`LayoutError::UnequalHeadDims`] where keys and values have different widths; use
    /// [`Layout::split_keys`] and [`Layout::split_values`], or [`Layout::fused`].
    pub fn kv_split(spec: &AttentionSpec) -> Result<Self, LayoutError> {
        let mut dims = token_dims(spec, equal_head_dim(spec)?);
        dims.splice(0..0, [Dim::new("kv", 2), Dim::blocks()]);
        Self::contiguous(dims, 1, spec.dtype())
    }

    /// Keys and values of a block side by side: `(N, 2, tokens, heads, head_dim)`, 1 segment.
    ///
    /// # Errors
    /// As [`Layout::kv_split`].
    pub fn block_major(spec: &AttentionSpec) -> Result<Self, LayoutError> {
        let mut dims = token_dims(spec, equal_head_dim(spec)?);
        dims.splice(0..0, [Dim::blocks(), Dim::new("kv", 2)]);
        Self::contiguous(dims, 0, spec.dtype())
    }

    /// Key and value of a head side by side: `(N, tokens, heads, head_dim + head_dim_v)`, 1
    /// segment; the widths may differ.
    ///
    /// # Errors
    /// [`LayoutError::Overflow`].
    pub fn fused(spec: &AttentionSpec) -> Result<Self, LayoutError> {
        let content = spec.head_dim().saturating_add(spec.head_dim_v());
        Self::block_first(token_dims(spec, content), spec.dtype())
    }

    /// The keys alone, `(N, tokens, heads, head_dim)`: the first part of a layer whose keys and
    /// values have different widths.
    ///
    /// # Errors
    /// [`LayoutError::Overflow`].
    pub fn split_keys(spec: &AttentionSpec) -> Result<Self, LayoutError> {
        Self::block_first(token_dims(spec, spec.head_dim()), spec.dtype())
    }

    /// The values alone, `(N, tokens, heads, head_dim_v)`: the second part.
    ///
    /// # Errors
    /// [`LayoutError::Overflow`].
    pub fn split_values(spec: &AttentionSpec) -> Result<Self, LayoutError> {
        Self::block_first(token_dims(spec, spec.head_dim_v()), spec.dtype())
    }

    /// The latents of an MLA layer: `(N, tokens, content)`, 1 segment.
    ///
    /// # Errors
    /// [`LayoutError::Overflow`].
    pub fn mla(spec: &MlaSpec) -> Result<Self, LayoutError> {
        let (content, dtype) = spec.content();
        let dims = vec![Dim::new("tokens", spec.block_size()), Dim::new("content", content)];
        Self::block_first(dims, dtype)
    }

    fn block_first(mut dims: Vec<Dim>, dtype: Dtype) -> Result<Self, LayoutError> {
        dims.insert(0, Dim::blocks());
        Self::contiguous(dims, 0, dtype)
    }
}

fn equal_head_dim(spec: &AttentionSpec) -> Result<u64, LayoutError> {
    let (head_dim, head_dim_v) = (spec.head_dim(), spec.head_dim_v());
    if head_dim == head_dim_v {
        return Ok(head_dim);
    }
    Err(LayoutError::UnequalHeadDims { head_dim, head_dim_v })
}

fn token_dims(spec: &AttentionSpec, content: u64) -> Vec<Dim> {
    vec![
        Dim::new("tokens", spec.block_size()),
        Dim::new("heads", spec.num_kv_heads()),
        Dim::new("content", content),
    ]
}
