//! Cache plans: buffers, segments and tensors of whole models, hybrids, sharing, and every refusal.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::collections::BTreeMap;

use extkv_core::dtype::Dtype::{BFloat16, Float32, UInt8};
use extkv_core::kv::{
    AttentionSpec, BlockId, CacheOrder, CachePlan, Capacity, Dim, KvSpec, Layer, LayerLayout,
    Layout, LayoutError, MambaSpec, MlaFormat, MlaSpec, NumBlocks, Placement, PlanError, Region,
    RequestShape, SegmentPlan, StateSpec, TensorView, common_block_bytes, hybrid_layers,
    segments_of_placements,
};
use extkv_core::units::Bytes;
use proptest::prelude::*;

mod models;
mod ownership;
mod placements;
mod refusals;

const MIB: u64 = 1 << 20;

fn attention() -> AttentionSpec {
    AttentionSpec::new(16, 8, 128, BFloat16).unwrap()
}

fn split_layer(name: &str) -> Layer {
    let layout = Layout::kv_split(&attention()).unwrap();
    Layer::strided(name, KvSpec::FullAttention(attention()), layout)
}

fn block_major_layer(name: &str) -> Layer {
    let layout = Layout::block_major(&attention()).unwrap();
    Layer::strided(name, KvSpec::FullAttention(attention()), layout)
}

fn mla_layer(name: &str) -> Layer {
    let spec = MlaSpec::new(64, MlaFormat::Fp8DsMla).unwrap();
    Layer::strided(name, KvSpec::Mla(spec), Layout::mla(&spec).unwrap())
}

/// A recurrent state of 8 × 3 bf16 and 2 × 4 fp32, 80 bytes.
fn small_mamba() -> MambaSpec {
    let conv = StateSpec::new("conv", [8, 3], BFloat16).unwrap();
    let ssm = StateSpec::new("ssm", [2, 4], Float32).unwrap();
    MambaSpec::new(4096, &[conv, ssm], 0).unwrap()
}

fn plan(layers: Vec<Layer>, blocks: u64) -> CachePlan {
    CachePlan::new(layers, Capacity::Blocks(NumBlocks(blocks))).unwrap()
}

fn refused(layers: Vec<Layer>) -> PlanError {
    CachePlan::new(layers, Capacity::Blocks(NumBlocks(10))).unwrap_err()
}

/// The first byte of every element of a view whose block dim is given, with its block.
fn elements(view: &TensorView, block_dim: usize) -> Vec<(u64, u64)> {
    let size = view.dtype.size_bytes();
    let mut found = vec![(0, view.offset_bytes)];
    for (dim, (&count, &stride)) in view.shape.iter().zip(&view.strides).enumerate() {
        let step = |&(block, byte): &(u64, u64)| {
            (0..count)
                .map(move |i| (if dim == block_dim { i } else { block }, byte + i * stride * size))
        };
        found = found.iter().flat_map(step).collect();
    }
    found
}

/// Checks that every element of every layer has bytes of its own, inside its block's regions.
fn assert_owned(plan: &CachePlan, block_dims: &[Vec<usize>]) {
    let mut owners: BTreeMap<(usize, u64), String> = BTreeMap::new();
    for (layer, dims) in plan.layers().iter().zip(block_dims) {
        for (view, &block_dim) in layer.tensors.iter().zip(dims) {
            let size = view.dtype.size_bytes();
            for (block, byte) in elements(view, block_dim) {
                let regions = plan.block_regions(BlockId(block)).unwrap();
                let holds = |r: &Region| {
                    r.buffer == layer.buffer
                        && r.offset_bytes <= byte
                        && byte + size <= r.offset_bytes + r.length_bytes
                };
                assert!(regions.iter().any(holds), "{} block {block} byte {byte}", layer.name);
                for byte in byte..byte + size {
                    let owner = owners.insert((layer.buffer, byte), layer.name.clone());
                    assert_eq!(owner, None, "{} and another own byte {byte}", layer.name);
                }
            }
        }
    }
}
