//! Models that mix attention with recurrent layers.
//!
//! A recurrent layer's block is one run of bytes. So that a block of an attention layer is one run
//! too, whatever shape its backend wants, its layout is re-strided: the block dim becomes the
//! outermost in memory and the others keep their order. A logical `(2, N, …)` tensor keeps its
//! shape; keys and values of a block then lie side by side.

use super::cache_plan::{Layer, LayerLayout, PlanError};
use super::checked::round_up;
use super::error::LayoutError;
use super::layout::{CacheOrder, Layout};
use super::spec::KvSpec;

/// Moves the block dim outermost in memory: 1 segment, the same logical shape. Padding is dropped.
///
/// # Errors
/// [`LayoutError::Overflow`].
pub fn block_outermost(layout: &Layout) -> Result<Layout, LayoutError> {
    let block_dim = layout.block_dim();
    let others = layout.stride_order().iter().copied().filter(|&dim| dim != block_dim);
    let stride_order = std::iter::once(block_dim).chain(others).collect();
    layout.clone().with_stride_order(stride_order)
}

/// Re-strides the attention layers of a hybrid model; returns other models unchanged.
///
/// Recurrent layers make a model hybrid. Blocks may have different sizes in different layers.
///
/// # Errors
/// [`PlanError::NotOneSegment`] for a layer of several tensors, [`PlanError::HybridOrder`] for a
/// stacked layer whose bytes in a block are not one run.
pub fn hybrid_layers(layers: Vec<Layer>) -> Result<Vec<Layer>, PlanError> {
    let is_hybrid = layers.iter().any(|layer| matches!(layer.spec, KvSpec::Mamba(_)));
    if is_hybrid { layers.into_iter().map(restride).collect() } else { Ok(layers) }
}

fn restride(mut layer: Layer) -> Result<Layer, PlanError> {
    match &mut layer.layout {
        LayerLayout::State => {}
        LayerLayout::Stacked(order) => check_order(&layer.name, *order)?,
        LayerLayout::Strided(parts) => match parts.as_mut_slice() {
            [only] if only.num_segments() > 1 => *only = block_outermost(only)?,
            [_] => {}
            _ => return Err(PlanError::NotOneSegment { layer: layer.name }),
        },
    }
    Ok(layer)
}

fn check_order(layer: &str, order: CacheOrder) -> Result<(), PlanError> {
    if order.is_layer_contiguous_in_block() {
        return Ok(());
    }
    Err(PlanError::HybridOrder { layer: layer.to_owned(), order })
}

/// The smallest block that each of these layers can be padded to, for a pool that they share.
///
/// # Errors
/// [`LayoutError::Overflow`].
pub fn common_block_bytes(specs: &[KvSpec]) -> Result<u64, LayoutError> {
    let largest = specs.iter().map(KvSpec::bytes_per_block).max().unwrap_or(0);
    // Alignments are powers of two, so a multiple of the largest is one of all.
    let alignment = specs.iter().map(KvSpec::alignment_bytes).max().unwrap_or(1);
    round_up("bytes per block of a shared pool", largest, alignment)
}
