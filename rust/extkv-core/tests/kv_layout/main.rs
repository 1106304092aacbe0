//! Layouts: the algebra against brute force, named layouts against hand-computed numbers, and
//! every refusal.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::collections::BTreeSet;
use std::ops::Range;

use extkv_core::dtype::Dtype::{self, BFloat16, Float32, UInt8};
use extkv_core::kv::{
    AttentionSpec, BlockId, CacheOrder, Dim, KvSpec, Layout, LayoutError, MAX_SEGMENTS, MlaFormat,
    MlaSpec, NumBlocks, SizedLayout, UnknownCacheOrder, block_outermost,
};
use extkv_core::units::Bytes;
use proptest::prelude::*;

mod algebra;
mod named;
mod refusals;

fn dims(sizes: &[u64]) -> Vec<Dim> {
    sizes.iter().enumerate().map(|(i, &size)| Dim::new(format!("d{i}"), size)).collect()
}

fn qwen3_8b() -> AttentionSpec {
    AttentionSpec::new(16, 8, 128, BFloat16).unwrap()
}

/// Every index of a shape, row-major.
fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![Vec::new()], |prefixes, &size| {
        let longer = |prefix: &Vec<u64>| {
            let prefix = prefix.clone();
            (0..size).map(move |i| prefix.iter().copied().chain([i]).collect::<Vec<u64>>())
        };
        prefixes.iter().flat_map(longer).collect()
    })
}

fn bytes_of(ranges: &[Range<u64>]) -> BTreeSet<u64> {
    ranges.iter().cloned().flatten().collect()
}

fn only(ranges: &[Range<u64>]) -> Range<u64> {
    assert_eq!(ranges.len(), 1);
    ranges[0].clone()
}

#[derive(Debug, Clone)]
struct Case {
    sizes: Vec<u64>,
    stride_order: Vec<usize>,
    block_dim: usize,
    dtype: Dtype,
    capacity: u64,
    padding: u64,
}

impl Case {
    fn sized(&self) -> SizedLayout {
        let order = self.stride_order.clone();
        let layout = Layout::new(dims(&self.sizes), order, self.block_dim, self.dtype).unwrap();
        let bytes = layout.bytes_per_block_per_segment() + self.padding * self.dtype.size_bytes();
        layout.padded_to(bytes).unwrap().at(NumBlocks(self.capacity)).unwrap()
    }
}

fn cases() -> impl Strategy<Value = Case> {
    (1_usize..5).prop_flat_map(|num_dims| {
        let sizes = prop::collection::vec(1_u64..4, num_dims);
        let order = Just((0..num_dims).collect::<Vec<_>>()).prop_shuffle();
        let dtype = prop::sample::select(Dtype::ALL.to_vec());
        (sizes, order, 0..num_dims, dtype, 1_u64..6, 0_u64..3).prop_map(
            |(sizes, stride_order, block_dim, dtype, capacity, padding)| Case {
                sizes,
                stride_order,
                block_dim,
                dtype,
                capacity,
                padding,
            },
        )
    })
}
