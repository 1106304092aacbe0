//! Every plan that is refused, with the values.

use super::*;

#[test]
fn rejects_a_plan_without_layers_or_blocks() {
    assert_eq!(refused(vec![]), PlanError::NoLayers);
    let none = CachePlan::new(vec![split_layer("a")], Capacity::Blocks(NumBlocks(0))).unwrap_err();
    assert_eq!(none, PlanError::Layout(LayoutError::ZeroSize { what: "max_blocks" }));
}

#[test]
fn rejects_a_capacity_that_overflows() {
    let huge = CachePlan::new(vec![split_layer("a")], Capacity::Blocks(NumBlocks(1 << 50)));
    assert!(matches!(huge, Err(PlanError::Layout(LayoutError::Overflow { .. }))));
    // Each buffer fits, their sum does not.
    let layers = vec![split_layer("a"), split_layer("b"), split_layer("c")];
    let huge = CachePlan::new(layers, Capacity::Blocks(NumBlocks((1 << 47) - 1)));
    assert!(matches!(huge, Err(PlanError::Layout(LayoutError::Overflow { .. }))));
}

#[test]
fn rejects_two_layers_of_one_name() {
    let error = refused(vec![split_layer("a"), mla_layer("a")]);
    assert_eq!(error, PlanError::DuplicateLayer { layer: "a".to_owned() });
}

#[test]
fn rejects_kinds_of_layout_that_do_not_fit_the_spec() {
    let kind = |layout| PlanError::LayoutKind { layer: "l".to_owned(), layout };
    let full = KvSpec::FullAttention(attention());
    let mamba = KvSpec::Mamba(small_mamba());
    let state = Layer::with_layout("l", full, LayerLayout::State);
    assert_eq!(refused(vec![state]), kind("state"));
    let stacked = Layer::stacked("l", mamba.clone(), CacheOrder::Lbhnc);
    assert_eq!(refused(vec![stacked]), kind("stacked"));
    let strided = Layer::strided("l", mamba, Layout::kv_split(&attention()).unwrap());
    assert_eq!(refused(vec![strided]), kind("strided"));
}

#[test]
fn rejects_a_layout_of_other_bytes_than_the_spec() {
    let other = AttentionSpec::new(16, 4, 128, BFloat16).unwrap();
    let layout = Layout::kv_split(&attention()).unwrap();
    let error = refused(vec![Layer::strided("l", KvSpec::FullAttention(other), layout)]);
    let (layout_bytes, spec_bytes) = (65_536, 32_768);
    assert_eq!(error, PlanError::LayoutBytes { layer: "l".to_owned(), layout_bytes, spec_bytes });
    let empty = LayerLayout::Strided(vec![]);
    let error = refused(vec![Layer::with_layout("l", KvSpec::FullAttention(other), empty)]);
    assert!(matches!(error, PlanError::LayoutBytes { layout_bytes: 0, .. }));
}

#[test]
fn rejects_parts_that_misalign_each_other() {
    let spec = AttentionSpec::new(1, 1, 3, UInt8).unwrap().with_head_dim_v(4).unwrap();
    let part = |size, dtype| {
        Layout::contiguous(vec![Dim::blocks(), Dim::new("content", size)], 0, dtype).unwrap()
    };
    let parts = LayerLayout::Strided(vec![part(3, UInt8), part(1, Float32)]);
    let error = refused(vec![Layer::with_layout("l", KvSpec::FullAttention(spec), parts)]);
    let layer = "l".to_owned();
    assert_eq!(error, PlanError::PartMisaligned { layer, offset: 3, dtype: Float32 });
}

/// `fp8_ds_mla` is read 16 bytes at a time, though its elements are single bytes.
#[test]
fn rejects_padding_that_misaligns_packed_latents() {
    let error = refused(vec![mla_layer("l").padded_to(41_992).unwrap()]);
    let (bytes, alignment) = (Bytes(41_992), Bytes(16));
    assert_eq!(error, PlanError::Layout(LayoutError::BlockMisaligned { bytes, alignment }));
    assert_eq!(plan(vec![mla_layer("l").padded_to(42_000).unwrap()], 1).bytes_per_block(), 42_000);
}

#[test]
fn rejects_padding_and_restriding_of_scattered_blocks() {
    let not_one = |layer: &str| PlanError::NotOneSegment { layer: layer.to_owned() };
    assert_eq!(split_layer("a").padded_to(1 << 20), Err(not_one("a")));
    let full = KvSpec::FullAttention(attention());
    let stacked = Layer::stacked("s", full.clone(), CacheOrder::Blhnc);
    assert_eq!(stacked.padded_to(1 << 20), Err(not_one("s")));
    let keys_and_values = LayerLayout::Strided(vec![
        Layout::split_keys(&attention()).unwrap(),
        Layout::split_values(&attention()).unwrap(),
    ]);
    let parts = Layer::with_layout("p", full, keys_and_values);
    assert_eq!(hybrid_layers(vec![parts, Layer::state("m", small_mamba())]), Err(not_one("p")));
}

#[test]
fn rejects_stacks_that_scatter_a_hybrid_layers_block() {
    for order in [CacheOrder::Lhbnc, CacheOrder::Bhlnc] {
        let layer = Layer::stacked("s", KvSpec::FullAttention(attention()), order);
        let error = hybrid_layers(vec![layer, Layer::state("m", small_mamba())]).unwrap_err();
        assert_eq!(error, PlanError::HybridOrder { layer: "s".to_owned(), order });
    }
}

#[test]
fn rejects_sharing_with_a_layer_that_is_not_before() {
    let error = refused(vec![split_layer("a").sharing_blocks("b"), split_layer("b")]);
    let (layer, with) = ("a".to_owned(), "b".to_owned());
    assert_eq!(error, PlanError::UnknownSharedLayer { layer, with });
    let error = refused(vec![split_layer("a").sharing_pool("a")]);
    let (layer, with) = ("a".to_owned(), "a".to_owned());
    assert_eq!(error, PlanError::UnknownSharedLayer { layer, with });
}

#[test]
fn rejects_sharing_blocks_of_another_spec_or_layout() {
    let error = refused(vec![split_layer("a"), mla_layer("b").sharing_blocks("a")]);
    let (layer, layer_bytes) = ("b".to_owned(), 41_984);
    let (other, other_bytes) = ("a".to_owned(), 65_536);
    assert_eq!(error, PlanError::SharedBlocksDiffer { layer, layer_bytes, other, other_bytes });
    let error = refused(vec![split_layer("a"), block_major_layer("b").sharing_blocks("a")]);
    assert!(matches!(error, PlanError::SharedBlocksDiffer { .. }));
}

#[test]
fn rejects_a_pool_of_unequal_blocks() {
    let mamba = Layer::state("m", small_mamba()).sharing_pool("a");
    let error = refused(vec![split_layer("a"), mamba]);
    let (layer, segments) = ("m".to_owned(), vec![(1, 80)]);
    let (other, other_segments) = ("a".to_owned(), vec![(2, 32_768)]);
    assert_eq!(error, PlanError::PoolsDiffer { layer, segments, other, other_segments });
}

/// As many bytes, but block 1 of one lies over the keys of block 2 and 3 of the other.
#[test]
fn rejects_a_pool_of_equal_bytes_in_other_segments() {
    let error = refused(vec![split_layer("a"), block_major_layer("b").sharing_pool("a")]);
    let (layer, segments) = ("b".to_owned(), vec![(1, 65_536)]);
    let (other, other_segments) = ("a".to_owned(), vec![(2, 32_768)]);
    assert_eq!(error, PlanError::PoolsDiffer { layer, segments, other, other_segments });
}

#[test]
fn rejects_a_pool_with_a_stacked_layer() {
    let full = KvSpec::FullAttention(attention());
    let stacked = Layer::stacked("s", full, CacheOrder::Blhnc);
    let error = refused(vec![stacked, block_major_layer("a").sharing_pool("s")]);
    let (layer, other) = ("a".to_owned(), "s".to_owned());
    assert_eq!(error, PlanError::StackHasNoPool { layer, other });
}

#[test]
fn rejects_facts_of_mixed_block_sizes() {
    let request = RequestShape { max_model_len: 4096, max_num_batched_tokens: 512 };
    let plan = plan(vec![split_layer("a"), Layer::state("m", small_mamba()), mla_layer("b")], 10);
    let (layer, other) = ("a".to_owned(), "b".to_owned());
    let (block_size, other_block_size) = (16, 64);
    let error = PlanError::MixedBlockSizes { layer, block_size, other, other_block_size };
    assert_eq!(plan.facts(&request), Err(error));
}

#[test]
fn rejects_questions_about_blocks_past_the_capacity() {
    let plan = plan(vec![split_layer("a")], 10);
    let too_many = LayoutError::TooManyBlocks { requested: NumBlocks(11), capacity: NumBlocks(10) };
    assert_eq!(plan.regions(NumBlocks(11)), Err(too_many.clone()));
    assert_eq!(plan.committed_bytes(NumBlocks(11)), Err(too_many.clone()));
    assert_eq!(plan.physical_bytes(NumBlocks(11), 1), Err(too_many));
    let zero = LayoutError::ZeroSize { what: "granule_bytes" };
    assert_eq!(plan.physical_bytes(NumBlocks(1), 0), Err(zero));
    let (block, capacity) = (BlockId(10), NumBlocks(10));
    assert_eq!(plan.block_regions(block), Err(LayoutError::BlockOutOfRange { block, capacity }));
    let (from, to) = (NumBlocks(3), NumBlocks(2));
    assert_eq!(plan.grown_regions(from, to), Err(LayoutError::NotGrowing { from, to }));
}
