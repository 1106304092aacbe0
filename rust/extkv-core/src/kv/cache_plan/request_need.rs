//! How many blocks one request takes from a cache whose layers may use several block tables.

use super::buffer::Buffer;
use super::error::PlanError;
use super::layer::Layer;
use crate::kv::spec::RequestShape;

/// Blocks of one request: `num_block_tables` per `block_size` tokens, and `fixed_blocks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RequestNeed {
    pub(super) num_block_tables: u64,
    pub(super) fixed_blocks: u64,
}

/// The need of the buffer that needs most. Buffers do not add up: block `b` exists in each, so one
/// block id can serve a layer in every buffer.
pub(super) fn request_need(
    layers: &[Layer],
    buffers: &[Buffer],
    request: &RequestShape,
    block_size: u64,
) -> RequestNeed {
    let tokens = request.max_model_len.div_ceil(block_size.max(1));
    let blocks = |need: &RequestNeed| {
        need.num_block_tables.saturating_mul(tokens).saturating_add(need.fixed_blocks)
    };
    let needs = buffers.iter().map(|buffer| buffer_need(layers, buffer, request));
    // Of equal needs the one that grows with the length.
    needs.max_by_key(|need| (blocks(need), need.num_block_tables)).unwrap_or_default()
}

/// The groups of a buffer draw different block ids from one pool, so their needs add up.
fn buffer_need(layers: &[Layer], buffer: &Buffer, request: &RequestShape) -> RequestNeed {
    let mut need = RequestNeed::default();
    for group in &buffer.groups {
        let mut specs = group.iter().filter_map(|&index| layers.get(index)).map(|l| &l.spec);
        if specs.clone().any(|spec| spec.grows_with_length()) {
            need.num_block_tables += 1;
        } else {
            let most = specs.by_ref().map(|spec| spec.blocks_per_request(request)).max();
            need.fixed_blocks = need.fixed_blocks.saturating_add(most.unwrap_or(0));
        }
    }
    need
}

/// The `block_size` of the layers that hold tokens; of a recurrent layer if none does.
pub(super) fn block_size(layers: &[Layer]) -> Result<u64, PlanError> {
    let mut of_tokens = layers.iter().filter(|layer| layer.spec.block_shape().is_some());
    let Some(first) = of_tokens.next() else {
        return layers.first().map(|layer| layer.spec.block_size()).ok_or(PlanError::NoLayers);
    };
    let block_size = first.spec.block_size();
    match of_tokens.find(|layer| layer.spec.block_size() != block_size) {
        None => Ok(block_size),
        Some(other) => Err(PlanError::MixedBlockSizes {
            layer: first.name.clone(),
            block_size,
            other: other.name.clone(),
            other_block_size: other.spec.block_size(),
        }),
    }
}
