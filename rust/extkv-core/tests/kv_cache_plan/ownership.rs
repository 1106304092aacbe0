//! For random models: no byte has two owners, segments tile, growth is lockstep.

use super::*;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Split,
    BlockMajor,
    HeadsFirst,
    Separate,
    Mla,
    Mamba,
    Stacked(CacheOrder),
}

/// A layer of a kind, small, with the block dim of each of its tensors.
fn small_layer(name: String, kind: Kind, heads: u64) -> (Layer, Vec<usize>) {
    let spec = AttentionSpec::new(2, heads, 3, BFloat16).unwrap();
    let full = KvSpec::FullAttention(spec);
    let split = Layout::kv_split(&spec).unwrap();
    match kind {
        Kind::Split => (Layer::strided(name, full, split), vec![1]),
        Kind::BlockMajor => {
            (Layer::strided(name, full, Layout::block_major(&spec).unwrap()), vec![0])
        }
        Kind::HeadsFirst => {
            let layout = split.with_stride_order(vec![3, 1, 0, 2, 4]).unwrap();
            (Layer::strided(name, full, layout), vec![1])
        }
        Kind::Separate => {
            let spec = spec.with_head_dim_v(1).unwrap();
            let parts =
                vec![Layout::split_keys(&spec).unwrap(), Layout::split_values(&spec).unwrap()];
            let layout = LayerLayout::Strided(parts);
            (Layer::with_layout(name, KvSpec::FullAttention(spec), layout), vec![0, 0])
        }
        Kind::Mla => {
            let format = MlaFormat::Latent { latent_dim: 2 + heads, dtype: BFloat16 };
            let spec = MlaSpec::new(2, format).unwrap();
            (Layer::strided(name, KvSpec::Mla(spec), Layout::mla(&spec).unwrap()), vec![0])
        }
        Kind::Mamba => (Layer::state(name, small_mamba()), vec![0, 0]),
        Kind::Stacked(order) => (Layer::stacked(name, full, order), vec![0]),
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Split),
        Just(Kind::BlockMajor),
        Just(Kind::HeadsFirst),
        Just(Kind::Separate),
        Just(Kind::Mla),
        Just(Kind::Mamba),
        prop::sample::select(CacheOrder::ALL.to_vec()).prop_map(Kind::Stacked),
    ]
}

proptest! {
    #[test]
    fn every_layer_block_and_element_has_its_own_bytes(
        kinds in prop::collection::vec((kinds(), 1_u64..3), 1..6),
        blocks in 1_u64..5,
    ) {
        let named = kinds.iter().enumerate();
        let (layers, block_dims): (Vec<_>, Vec<_>) =
            named.map(|(i, &(kind, heads))| small_layer(format!("l{i}"), kind, heads)).unzip();
        let per_block: u64 = layers.iter().map(|layer| layer.spec.bytes_per_block()).sum();
        let plan = plan(layers, blocks);
        prop_assert_eq!(plan.bytes_per_block(), per_block);
        prop_assert_eq!(plan.capacity_bytes(), per_block * blocks);
        assert_owned(&plan, &block_dims);
    }

    #[test]
    fn segments_tile_their_buffers_and_grow_in_lockstep(
        kinds in prop::collection::vec((kinds(), 1_u64..3), 1..6),
        a in 0_u64..5,
        b in 0_u64..5,
    ) {
        let named = kinds.iter().enumerate();
        let layers = named.map(|(i, &(kind, heads))| small_layer(format!("l{i}"), kind, heads).0);
        let plan = plan(layers.collect(), 5);
        for buffer in plan.buffers() {
            let mut end = 0;
            for segment in &buffer.segments {
                prop_assert_eq!(segment.offset_bytes, end);
                prop_assert_eq!(segment.capacity_bytes, segment.bytes_per_block * 5);
                end += segment.capacity_bytes;
            }
            prop_assert_eq!(end, buffer.capacity_bytes);
        }
        let (a, b) = (NumBlocks(a.min(b)), NumBlocks(a.max(b)));
        let before = plan.regions(a).unwrap();
        let grown = plan.grown_regions(a, b).unwrap();
        let after = plan.regions(b).unwrap();
        for ((before, grown), after) in before.iter().zip(&grown).zip(&after) {
            prop_assert_eq!(before.offset_bytes, after.offset_bytes);
            prop_assert_eq!(before.offset_bytes + before.length_bytes, grown.offset_bytes);
            prop_assert_eq!(before.length_bytes + grown.length_bytes, after.length_bytes);
        }
        let committed: u64 = after.iter().map(|region| region.length_bytes).sum();
        prop_assert_eq!(committed, plan.committed_bytes(b).unwrap());
    }

    #[test]
    fn physical_bytes_waste_less_than_a_granule_per_segment(
        kinds in prop::collection::vec((kinds(), 1_u64..3), 1..6),
        blocks in 0_u64..6,
        granule in 1_u64..300,
    ) {
        let named = kinds.iter().enumerate();
        let layers = named.map(|(i, &(kind, heads))| small_layer(format!("l{i}"), kind, heads).0);
        let plan = plan(layers.collect(), 5);
        let blocks = NumBlocks(blocks.min(5));
        let physical = plan.physical_bytes(blocks, granule).unwrap();
        let logical = plan.committed_bytes(blocks).unwrap();
        let segments = plan.num_segments() as u64;
        prop_assert!(physical >= logical && physical.is_multiple_of(granule));
        // Each segment touches at most one granule at either end that it does not fill.
        prop_assert!(physical < logical + 2 * granule * segments);
    }
}
