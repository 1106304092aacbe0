//! Layouts that backends use, against numbers computed by hand.

use super::*;

#[test]
fn kv_split_has_a_segment_of_keys_and_one_of_values() {
    let layout = Layout::kv_split(&qwen3_8b()).unwrap();
    assert_eq!((layout.num_segments(), layout.bytes_per_block_per_segment()), (2, 32_768));
    let sized = layout.at(NumBlocks(100)).unwrap();
    assert_eq!(sized.shape(), [2, 100, 16, 8, 128]);
    assert_eq!(sized.strides(), [1_638_400, 16_384, 1_024, 128, 1]);
    let ranges = sized.block_ranges(BlockId(3)).unwrap();
    assert_eq!(ranges, [98_304..131_072, 3_375_104..3_407_872]);
    // The last value of the last block ends the buffer.
    assert_eq!(sized.byte_offset(&[1, 99, 15, 7, 127]).unwrap() + 2, sized.capacity_bytes());
}

#[test]
fn block_major_has_keys_and_values_side_by_side() {
    let sized = Layout::block_major(&qwen3_8b()).unwrap().at(NumBlocks(100)).unwrap();
    assert_eq!(sized.layout().num_segments(), 1);
    assert_eq!(sized.strides(), [32_768, 16_384, 1_024, 128, 1]);
    assert_eq!(only(&sized.block_ranges(BlockId(3)).unwrap()), 196_608..262_144);
    assert_eq!(sized.byte_offset(&[3, 1, 0, 0, 0]).unwrap(), 196_608 + 32_768);
}

#[test]
fn heads_outside_tokens_changes_strides_but_no_segments() {
    let layout = Layout::kv_split(&qwen3_8b()).unwrap();
    let hnd = layout.with_stride_order(vec![0, 1, 3, 2, 4]).unwrap();
    assert_eq!((hnd.num_segments(), hnd.bytes_per_block_per_segment()), (2, 32_768));
    let sized = hnd.at(NumBlocks(100)).unwrap();
    assert_eq!(sized.strides(), [1_638_400, 16_384, 128, 2_048, 1]);
}

#[test]
fn kv_first_shape_with_block_major_order_is_one_segment() {
    let layout = Layout::kv_split(&qwen3_8b()).unwrap();
    let sized = layout.with_stride_order(vec![1, 0, 2, 3, 4]).unwrap().at(NumBlocks(100)).unwrap();
    assert_eq!(sized.layout().num_segments(), 1);
    assert_eq!(sized.shape(), [2, 100, 16, 8, 128]);
    assert_eq!(sized.strides(), [16_384, 32_768, 1_024, 128, 1]);
}

#[test]
fn block_innermost_is_a_segment_per_element() {
    let layout = Layout::new(dims(&[3, 1, 5]), vec![0, 2, 1], 1, Float32).unwrap();
    assert_eq!((layout.num_segments(), layout.bytes_per_block_per_segment()), (15, 4));
}

/// B88: the same logical shape over two physical orders; readers take strides from the tensor.
#[test]
fn b88_both_layouts_hold_the_same_values() {
    let spec = AttentionSpec::new(16, 2, 4, Float32).unwrap();
    let split = Layout::kv_split(&spec).unwrap();
    let interleaved = block_outermost(&split).unwrap();
    let write_and_gather = |layout: &Layout| {
        let sized = layout.at(NumBlocks(4)).unwrap();
        let all = indices(sized.shape());
        let slot =
            |index: &Vec<u64>| usize::try_from(sized.byte_offset(index).unwrap() / 4).unwrap();
        let mut memory = vec![0; all.len()];
        for (value, index) in all.iter().enumerate() {
            memory[slot(index)] = value;
        }
        let gathered: Vec<usize> = all.iter().map(|index| memory[slot(index)]).collect();
        (memory, gathered)
    };
    let (split_memory, split_values) = write_and_gather(&split);
    let (interleaved_memory, interleaved_values) = write_and_gather(&interleaved);
    assert_eq!(split_values, interleaved_values);
    assert_ne!(split_memory, interleaved_memory);
}

#[test]
fn mla_is_one_segment_of_latents() {
    let latent = MlaFormat::Latent { latent_dim: 576, dtype: BFloat16 };
    let layout = Layout::mla(&MlaSpec::new(64, latent).unwrap()).unwrap();
    assert_eq!((layout.num_segments(), layout.bytes_per_block()), (1, 73_728));
    assert_eq!(layout.at(NumBlocks(10)).unwrap().shape(), [10, 64, 576]);
    let packed = Layout::mla(&MlaSpec::new(64, MlaFormat::Fp8DsMla).unwrap()).unwrap();
    assert_eq!(packed.at(NumBlocks(10)).unwrap().strides(), [41_984, 656, 1]);
}

#[test]
fn unequal_widths_are_fused_or_separate() {
    let spec = AttentionSpec::new(16, 8, 192, BFloat16).unwrap().with_head_dim_v(128).unwrap();
    let fused = Layout::fused(&spec).unwrap();
    assert_eq!((fused.num_segments(), fused.bytes_per_block()), (1, 81_920));
    let keys = Layout::split_keys(&spec).unwrap().bytes_per_block();
    let values = Layout::split_values(&spec).unwrap().bytes_per_block();
    assert_eq!((keys, values), (49_152, 32_768));
}

#[test]
fn six_cache_orders_have_the_segments_of_their_outer_dims() {
    let block = KvSpec::FullAttention(qwen3_8b()).block_shape().unwrap();
    let segments: Vec<(&str, u64, u64)> = CacheOrder::ALL
        .into_iter()
        .map(|order| (order.name(), order.layout(36, &block).unwrap()))
        .map(|(name, l)| (name, l.num_segments(), l.bytes_per_block_per_segment()))
        .collect();
    assert_eq!(
        segments,
        [
            ("LBHNC", 36, 65_536),
            ("LBNHC", 36, 65_536),
            ("LHBNC", 288, 8_192),
            ("BLHNC", 1, 2_359_296),
            ("BLNHC", 1, 2_359_296),
            ("BHLNC", 1, 2_359_296),
        ]
    );
}

#[test]
fn cache_order_names_are_their_stride_orders() {
    for order in CacheOrder::ALL {
        let letters: String =
            order.stride_order().map(|dim| ['L', 'B', 'H', 'N', 'C'][dim]).iter().collect();
        assert_eq!(letters, order.to_string());
        assert_eq!(order.name().to_lowercase().parse(), Ok(order));
    }
    let name = "CNHBL".to_owned();
    assert_eq!("CNHBL".parse::<CacheOrder>(), Err(UnknownCacheOrder { name }));
}

#[test]
fn a_slice_of_a_stack_is_a_layer() {
    let block = KvSpec::FullAttention(qwen3_8b()).block_shape().unwrap();
    let sized = CacheOrder::Blnhc.layout(36, &block).unwrap().at(NumBlocks(10)).unwrap();
    let layer = sized.select(0, 2).unwrap();
    assert_eq!(layer.offset_bytes, 2 * 65_536);
    assert_eq!(layer.shape, [10, 8, 16, 256]);
    assert_eq!(layer.strides, [36 * 32_768, 256, 2_048, 1]);
}

#[test]
fn padding_spreads_blocks_in_every_segment() {
    let layout = Layout::kv_split(&qwen3_8b()).unwrap().padded_to(40_000).unwrap();
    assert_eq!((layout.bytes_per_block(), layout.unpadded_bytes_per_block()), (80_000, 65_536));
    let sized = layout.at(NumBlocks(10)).unwrap();
    assert_eq!(sized.strides(), [200_000, 20_000, 1_024, 128, 1]);
    assert_eq!(sized.block_ranges(BlockId(1)).unwrap(), [40_000..80_000, 440_000..480_000]);
}

#[test]
fn a_capacity_of_one_block_is_its_own_prefix() {
    let sized = Layout::block_major(&qwen3_8b()).unwrap().at(NumBlocks(1)).unwrap();
    assert_eq!(only(&sized.committed_ranges(NumBlocks(1)).unwrap()), 0..65_536);
    assert_eq!(only(&sized.committed_ranges(NumBlocks(0)).unwrap()), 0..0);
}

#[test]
fn strides_of_other_dims_of_size_one_are_ignored() {
    let strides = [9_999, 128, 0, 1];
    let layout = Layout::from_strides(dims(&[1, 6, 1, 128]), &strides, 1, BFloat16).unwrap();
    assert_eq!((layout.num_segments(), layout.bytes_per_block()), (1, 256));
}
