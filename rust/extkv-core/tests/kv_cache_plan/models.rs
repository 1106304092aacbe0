//! Whole models: buffers, tensors, hybrids, sharing and what a request needs.

use super::*;

/// B89: segments 2, 1, 1, 1, 1; a reservation of N × P each; half of it per half where split.
#[test]
fn b89_segments_and_reservations_by_kind() {
    let hybrid = hybrid_layers(vec![split_layer("attention"), Layer::state("m", small_mamba())]);
    let hybrid = hybrid.unwrap().swap_remove(0);
    let kinds = [
        (split_layer("split"), 2),
        (block_major_layer("block-major"), 1),
        (mla_layer("latent"), 1),
        (Layer::state("recurrent", small_mamba()), 1),
        (hybrid, 1),
    ];
    for (layer, segments) in kinds {
        let bytes = layer.spec.bytes_per_block();
        let plan = plan(vec![layer], 1000);
        let buffer = &plan.buffers()[0];
        assert_eq!((plan.buffers().len(), buffer.segments.len()), (1, segments));
        assert_eq!(buffer.capacity_bytes, 1000 * bytes);
        for segment in &buffer.segments {
            assert_eq!(segment.capacity_bytes, 1000 * bytes / segments as u64);
        }
    }
}

/// B74 (its arithmetic): 2 MiB granules, two segments of 3 MiB, 1, 2 and 3 MiB of each.
#[test]
fn b74_granules_that_two_segments_touch_count_once() {
    let spec = AttentionSpec::new(1024, 8, 128, UInt8).unwrap();
    let layer = Layer::strided("l", KvSpec::FullAttention(spec), Layout::kv_split(&spec).unwrap());
    let plan = plan(vec![layer], 3);
    assert_eq!(plan.buffers()[0].segments[1].offset_bytes, 3 * MIB);
    let physical = [0, 1, 2, 3].map(|n| plan.physical_bytes(NumBlocks(n), 2 * MIB).unwrap());
    assert_eq!(physical, [0, 4 * MIB, 6 * MIB, 6 * MIB]);
    let grown = plan.grown_regions(NumBlocks(1), NumBlocks(2)).unwrap();
    let ranges: Vec<_> =
        grown.iter().map(|r| (r.offset_bytes / MIB, r.length_bytes / MIB)).collect();
    assert_eq!(ranges, [(1, 1), (4, 1)]);
}

#[test]
fn each_layer_has_its_own_buffer_in_order() {
    let plan = plan(vec![split_layer("a"), mla_layer("b"), block_major_layer("c")], 10);
    let names: Vec<_> = plan.buffers().iter().map(|buffer| buffer.layers.concat()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(plan.num_segments(), 4);
    assert_eq!(plan.bytes_per_block(), 65_536 + 41_984 + 65_536);
    assert_eq!(plan.layer("b").unwrap().buffer, 1);
    assert_eq!(plan.layer("d"), None);
}

#[test]
fn bytes_give_whole_blocks() {
    let layers = vec![split_layer("a"), split_layer("b")];
    let plan = CachePlan::new(layers.clone(), Capacity::Bytes(10 * 131_072 + 131_071)).unwrap();
    assert_eq!(plan.max_blocks(), NumBlocks(10));
    let error = CachePlan::new(layers, Capacity::Bytes(131_071)).unwrap_err();
    let (max_bytes, bytes_per_block) = (131_071, 131_072);
    assert_eq!(error, PlanError::BudgetTooSmall { max_bytes, bytes_per_block });
}

#[test]
fn keys_and_values_of_unequal_width_are_unequal_segments() {
    let spec = AttentionSpec::new(16, 8, 192, BFloat16).unwrap().with_head_dim_v(128).unwrap();
    let parts = vec![Layout::split_keys(&spec).unwrap(), Layout::split_values(&spec).unwrap()];
    let layout = LayerLayout::Strided(parts);
    let plan = plan(vec![Layer::with_layout("l", KvSpec::FullAttention(spec), layout)], 100);
    let segment = |offset_bytes, bytes_per_block| SegmentPlan {
        offset_bytes,
        capacity_bytes: 100 * bytes_per_block,
        bytes_per_block,
    };
    assert_eq!(plan.buffers()[0].segments, [segment(0, 49_152), segment(4_915_200, 32_768)]);
    let [keys, values] = plan.layers()[0].tensors.as_slice() else { unreachable!("two parts") };
    assert_eq!((keys.shape.as_slice(), keys.offset_bytes), ([100, 16, 8, 192].as_slice(), 0));
    assert_eq!(values.shape, [100, 16, 8, 128]);
    assert_eq!(values.offset_bytes, 4_915_200);
}

#[test]
fn stacked_layers_share_a_tensor_per_block_shape() {
    let full = KvSpec::FullAttention(attention());
    let window = KvSpec::sliding_window(attention(), 1024).unwrap();
    let draft = KvSpec::FullAttention(AttentionSpec::new(16, 4, 64, BFloat16).unwrap());
    let order = CacheOrder::Blhnc;
    let plan = plan(
        vec![
            Layer::stacked("t0", full.clone(), order),
            Layer::stacked("d0", draft, order),
            // A window changes nothing in memory.
            Layer::stacked("t1", window, order),
            Layer::stacked("t2", full, CacheOrder::Lbhnc),
        ],
        10,
    );
    let names: Vec<_> = plan.buffers().iter().map(|buffer| buffer.layers.join(" ")).collect();
    assert_eq!(names, ["t0 t1", "d0", "t2"]);
    let second = plan.layer("t1").unwrap();
    assert_eq!((second.buffer, second.tensors[0].offset_bytes), (0, 65_536));
    assert_eq!(second.tensors[0].strides, [65_536, 4_096, 256, 1]);
    assert_eq!(plan.buffers()[0].segments[0].bytes_per_block, 131_072);
}

#[test]
fn mamba_layer_has_one_buffer_and_a_tensor_per_state() {
    let plan = plan(vec![Layer::state("m", small_mamba())], 7);
    let names: Vec<_> = plan.layers()[0].tensors.iter().map(|t| t.name.as_deref()).collect();
    assert_eq!(names, [Some("conv"), Some("ssm")]);
    let view = &plan.layers()[0];
    let [conv, ssm] = view.tensors.as_slice() else { unreachable!("two states") };
    assert_eq!((conv.offset_bytes, ssm.offset_bytes), (0, 48));
    assert_eq!((conv.shape.as_slice(), conv.strides.as_slice()), (&[7, 8, 3][..], &[40, 3, 1][..]));
    assert_eq!((ssm.shape.as_slice(), ssm.strides.as_slice()), (&[7, 2, 4][..], &[20, 4, 1][..]));
    assert_eq!(plan.buffers()[0].segments.len(), 1);
}

#[test]
fn hybrid_attention_is_interleaved_beside_mamba() {
    let layers = vec![
        split_layer("attention"),
        block_major_layer("already"),
        Layer::state("mamba", small_mamba()),
        Layer::stacked("stacked", KvSpec::FullAttention(attention()), CacheOrder::Lbhnc),
    ];
    let plan = plan(hybrid_layers(layers).unwrap(), 100);
    let view = &plan.layer("attention").unwrap().tensors[0];
    assert_eq!(view.shape, [2, 100, 16, 8, 128]);
    assert_eq!(view.strides, [16_384, 32_768, 1_024, 128, 1]);
    assert!(plan.buffers().iter().all(|buffer| buffer.segments.len() == 1));
    // Unequal blocks: each buffer steps by its own.
    let bytes: Vec<u64> = plan.buffers().iter().map(|b| b.segments[0].bytes_per_block).collect();
    assert_eq!(bytes, [65_536, 65_536, 80, 65_536]);
}

#[test]
fn models_without_recurrent_layers_are_not_restrided() {
    let layers = vec![split_layer("a"), mla_layer("b")];
    assert_eq!(hybrid_layers(layers.clone()), Ok(layers));
}

/// A hybrid model as vLLM groups it: one attention and two Mamba layers take turns in one pool.
fn pooled_hybrid() -> Vec<Layer> {
    let layers = hybrid_layers(vec![
        split_layer("attention"),
        Layer::state("mamba.0", small_mamba()),
        Layer::state("mamba.1", small_mamba()),
    ]);
    let layers = layers.unwrap();
    let specs: Vec<KvSpec> = layers.iter().map(|layer| layer.spec.clone()).collect();
    let bytes = common_block_bytes(&specs).unwrap();
    let mut padded = layers.into_iter().map(|layer| layer.padded_to(bytes).unwrap());
    let first = padded.next().unwrap();
    [first].into_iter().chain(padded.map(|layer| layer.sharing_pool("attention"))).collect()
}

#[test]
fn a_pool_has_one_buffer_whose_block_is_any_layers_block() {
    let plan = plan(pooled_hybrid(), 100);
    assert_eq!(plan.buffers().len(), 1);
    assert_eq!(plan.buffers()[0].layers, ["attention", "mamba.0", "mamba.1"]);
    assert_eq!(plan.bytes_per_block(), 65_536);
    let ssm = &plan.layer("mamba.1").unwrap().tensors[1];
    assert_eq!((ssm.offset_bytes, ssm.strides[0]), (48, 65_536 / 4));
}

#[test]
fn common_block_fits_every_layer_and_alignment() {
    let mamba = KvSpec::Mamba(small_mamba());
    let mla = KvSpec::Mla(MlaSpec::new(1, MlaFormat::Fp8DsMla).unwrap());
    let odd = KvSpec::FullAttention(AttentionSpec::new(1, 1, 331, UInt8).unwrap());
    assert_eq!(common_block_bytes(&[mamba, mla, odd]), Ok(672));
    assert_eq!(common_block_bytes(&[]), Ok(0));
}

#[test]
fn layers_that_share_blocks_see_the_same_tensors() {
    let stacked =
        |name| Layer::stacked(name, KvSpec::FullAttention(attention()), CacheOrder::Blhnc);
    let plan = plan(
        vec![
            split_layer("a"),
            split_layer("b").sharing_blocks("a"),
            split_layer("c").sharing_blocks("b"),
            stacked("s0"),
            stacked("s1"),
            stacked("s2").sharing_blocks("s1"),
            Layer::state("m", small_mamba()),
            Layer::state("n", small_mamba()).sharing_blocks("m"),
        ],
        10,
    );
    for (layer, owner) in [("b", "a"), ("c", "a"), ("s2", "s1"), ("n", "m")] {
        let (layer, owner) = (plan.layer(layer).unwrap(), plan.layer(owner).unwrap());
        assert_eq!((layer.buffer, &layer.tensors), (owner.buffer, &owner.tensors));
    }
    assert_eq!(plan.bytes_per_block(), 3 * 65_536 + 80);
}

fn facts(layers: Vec<Layer>, max_model_len: u64) -> (u64, u64, u64) {
    let request = RequestShape { max_model_len, max_num_batched_tokens: 512 };
    let facts = plan(layers, 10).facts(&request).unwrap();
    (facts.block_size, facts.num_block_tables, facts.fixed_blocks_per_request)
}

#[test]
fn facts_count_block_tables_and_fixed_blocks() {
    let window = KvSpec::sliding_window(attention(), 1024).unwrap();
    let window =
        |name| Layer::strided(name, window.clone(), Layout::block_major(&attention()).unwrap());
    assert_eq!(facts(vec![split_layer("a"), split_layer("b")], 4096), (16, 1, 0));
    // Own buffers: the same block ids serve both, so a window or a state adds nothing.
    assert_eq!(facts(vec![split_layer("a"), window("w")], 10_000), (16, 1, 0));
    let mamba = Layer::state("m", small_mamba());
    assert_eq!(facts(vec![split_layer("a"), mamba], 4096), (16, 1, 0));
    assert_eq!(facts(vec![window("w")], 10_000), (16, 0, 97));
    // One pool: ids of one group are not those of another.
    let pool = vec![block_major_layer("a"), window("w").sharing_pool("a")];
    assert_eq!(facts(pool, 10_000), (16, 1, 97));
    let pool = vec![block_major_layer("a"), block_major_layer("b").sharing_pool("a")];
    assert_eq!(facts(pool, 4096), (16, 2, 0));
    let blocks = vec![block_major_layer("a"), block_major_layer("b").sharing_blocks("a")];
    assert_eq!(facts(blocks, 4096), (16, 1, 0));
    assert_eq!(facts(pooled_hybrid(), 4096), (16, 1, 2));
    assert_eq!(facts(vec![Layer::state("m", small_mamba())], 4096), (4096, 0, 1));
    let stack = |name| Layer::stacked(name, KvSpec::FullAttention(attention()), CacheOrder::Lbhnc);
    assert_eq!(facts(vec![stack("a"), stack("b")], 4096), (16, 1, 0));
}

#[test]
fn of_equal_needs_the_one_that_grows_with_length_counts() {
    let mamba = Layer::state("m", small_mamba());
    assert_eq!(facts(vec![split_layer("a"), mamba.clone()], 16), (16, 1, 0));
    assert_eq!(facts(vec![mamba, split_layer("a")], 16), (16, 1, 0));
}

#[test]
fn facts_carry_bytes_and_segments() {
    let layers = (0..36).map(|i| split_layer(&format!("layers.{i}"))).collect();
    let request = RequestShape { max_model_len: 4096, max_num_batched_tokens: 8192 };
    let facts = plan(layers, 10).facts(&request).unwrap();
    assert_eq!((facts.bytes_per_block, facts.num_segments), (2_359_296, 72));
    assert_eq!(facts.bytes_per_token(), 147_456);
}
