//! The drawings and numbers of layouts in `docs/kv-layouts.md` are what the code computes.
//!
//! A fenced block after `<!-- checked: NAME -->` must equal the text made here under that name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by panicking")]

use std::collections::BTreeMap;

use extkv_core::dtype::Dtype::{BFloat16, Float32, UInt8};
use extkv_core::kv::{
    AttentionSpec, BlockId, CacheOrder, CachePlan, Capacity, KvSpec, Layer, LayerLayout, Layout,
    MambaSpec, MlaFormat, MlaSpec, NumBlocks, StateSpec, TensorView, common_block_bytes,
    hybrid_layers,
};

const PAGE: &str = include_str!("../../../docs/kv-layouts.md");

fn assert_page_has(name: &str, expected: &str) {
    let marker = format!("<!-- checked: {name} -->\n```text\n");
    let after = PAGE.split_once(&marker).map(|(_, after)| after);
    let found = after.and_then(|after| after.split_once("```")).map(|(block, _)| block);
    assert!(found == Some(expected), "docs/kv-layouts.md should have\n{marker}{expected}```");
}

/// How to write the indices of one tensor: a word in front, then a letter per logical dim. `B`
/// counts blocks and is left out; `KV` writes K or V; dims of size 1 are left out.
struct Pen {
    front: &'static str,
    dims: &'static [&'static str],
}

const KV_FIRST: Pen = Pen { front: "", dims: &["KV", "B", "t", "h", "c"] };
const BLOCK_FIRST: Pen = Pen { front: "", dims: &["B", "KV", "t", "h", "c"] };
const STATES: [Pen; 2] =
    [Pen { front: "conv", dims: &["B", ""] }, Pen { front: "ssm", dims: &["B", ""] }];

fn written(dim: &str, size: u64, i: u64) -> String {
    match (dim, i) {
        ("B", _) => String::new(),
        ("KV", 0) => "K".to_owned(),
        ("KV", _) => "V".to_owned(),
        _ if size == 1 => String::new(),
        (letter, i) => format!("{letter}{i}"),
    }
}

/// What each byte of a tensor holds, apart from its block.
fn labels(view: &TensorView, pen: &Pen) -> Vec<(u64, String)> {
    let size = view.dtype.size_bytes();
    let mut found = vec![(view.offset_bytes, pen.front.to_owned())];
    for ((&count, &stride), &dim) in view.shape.iter().zip(&view.strides).zip(pen.dims) {
        let step = |(byte, label): &(u64, String)| {
            let (byte, label) = (*byte, label.clone());
            (0..count).map(move |i| {
                (byte + i * stride * size, format!("{label}{}", written(dim, count, i)))
            })
        };
        found = found.iter().flat_map(step).collect();
    }
    found
        .into_iter()
        .flat_map(|(byte, label)| (0..size).map(move |i| (byte + i, label.clone())))
        .collect()
}

/// A row per segment and block of a layer's buffer, a cell per byte that one of the layers has
/// there; `--` is padding.
fn draw(plan: &CachePlan, layers: &[(&str, &[Pen])]) -> String {
    let mut cells: BTreeMap<u64, String> = BTreeMap::new();
    for (name, pens) in layers {
        for (view, pen) in plan.layer(name).unwrap().tensors.iter().zip(*pens) {
            cells.extend(labels(view, pen));
        }
    }
    let buffer = plan.layer(layers[0].0).unwrap().buffer;
    let width = cells.values().map(String::len).max().unwrap();
    let mut rows = Vec::new();
    for block in 0..plan.max_blocks().0 {
        for region in plan.block_regions(BlockId(block)).unwrap() {
            let (start, end) = (region.offset_bytes, region.offset_bytes + region.length_bytes);
            let cell = |byte| format!("{:<width$}", cells.get(&byte).map_or("--", String::as_str));
            let line: Vec<String> = (start..end).map(cell).collect();
            let line = line.join(" ");
            let head = format!("segment {}  block {block}  {start:>2}..{end:<2}", region.segment);
            rows.push((region.buffer, start, format!("{head} | {}\n", line.trim_end())));
        }
    }
    rows.retain(|(of, ..)| *of == buffer);
    rows.sort();
    rows.into_iter().map(|(.., row)| row).collect()
}

/// Two tokens, two heads, one byte per key and value.
fn tiny() -> AttentionSpec {
    AttentionSpec::new(2, 2, 1, UInt8).unwrap()
}

fn full(spec: AttentionSpec) -> KvSpec {
    KvSpec::FullAttention(spec)
}

fn plan(layers: Vec<Layer>, blocks: u64) -> CachePlan {
    CachePlan::new(layers, Capacity::Blocks(NumBlocks(blocks))).unwrap()
}

fn draw_layout(layout: Layout, pen: Pen) -> String {
    let layer = Layer::strided("l", full(tiny()), layout);
    draw(&plan(vec![layer], 3), &[("l", &[pen])])
}

#[test]
fn attention_layouts_are_drawn_as_computed() {
    let split = Layout::kv_split(&tiny()).unwrap();
    assert_page_has("draw kv-split", &draw_layout(split.clone(), KV_FIRST));
    let heads_first = split.clone().with_stride_order(vec![0, 1, 3, 2, 4]).unwrap();
    assert_page_has("draw heads-first", &draw_layout(heads_first, KV_FIRST));
    let interleaved = split.with_stride_order(vec![1, 0, 2, 3, 4]).unwrap();
    assert_page_has("draw kv-first block-major", &draw_layout(interleaved, KV_FIRST));
    let major = Layout::block_major(&tiny()).unwrap();
    assert_page_has("draw block-major", &draw_layout(major.clone(), BLOCK_FIRST));
    let padded = major.padded_to(10).unwrap();
    assert_page_has("draw padded", &draw_layout(padded, BLOCK_FIRST));
}

#[test]
fn unequal_widths_are_drawn_as_computed() {
    let spec = tiny().with_head_dim_v(2).unwrap();
    let fused = Layer::strided("l", full(spec), Layout::fused(&spec).unwrap());
    let pen = Pen { front: "", dims: &["B", "t", "h", "c"] };
    assert_page_has("draw fused", &draw(&plan(vec![fused], 2), &[("l", &[pen])]));
    let parts = vec![Layout::split_keys(&spec).unwrap(), Layout::split_values(&spec).unwrap()];
    let separate = Layer::with_layout("l", full(spec), LayerLayout::Strided(parts));
    let pens = ["K", "V"].map(|front| Pen { front, dims: &["B", "t", "h", "c"] });
    assert_page_has("draw separate", &draw(&plan(vec![separate], 2), &[("l", &pens)]));
}

#[test]
fn mla_is_drawn_as_computed() {
    let spec = MlaSpec::new(2, MlaFormat::Latent { latent_dim: 3, dtype: UInt8 }).unwrap();
    let layer = Layer::strided("l", KvSpec::Mla(spec), Layout::mla(&spec).unwrap());
    let pen = Pen { front: "", dims: &["B", "t", "c"] };
    assert_page_has("draw mla", &draw(&plan(vec![layer], 3), &[("l", &[pen])]));
}

#[test]
fn cache_orders_are_drawn_as_computed() {
    for order in CacheOrder::ALL {
        let layers = ["L0", "L1"].map(|name| Layer::stacked(name, full(tiny()), order));
        let pens = ["L0", "L1"].map(|front| [Pen { front, dims: &["B", "h", "t", "KV"] }]);
        let drawn = draw(&plan(layers.to_vec(), 2), &[("L0", &pens[0]), ("L1", &pens[1])]);
        assert_page_has(&format!("draw {order}"), &drawn);
    }
}

/// Three bytes of convolution and two bf16 of state: 8 bytes with one of padding.
fn tiny_mamba() -> MambaSpec {
    let conv = StateSpec::new("conv", [3], UInt8).unwrap();
    let ssm = StateSpec::new("ssm", [2], BFloat16).unwrap();
    MambaSpec::new(64, &[conv, ssm], 0).unwrap()
}

#[test]
fn recurrent_blocks_are_drawn_as_computed() {
    let plan = plan(vec![Layer::state("m", tiny_mamba())], 3);
    assert_page_has("draw mamba", &draw(&plan, &[("m", &STATES)]));
}

#[test]
fn hybrids_are_drawn_as_computed() {
    let wide = AttentionSpec::new(3, 2, 1, UInt8).unwrap();
    let attention = Layer::strided("a", full(wide), Layout::kv_split(&wide).unwrap());
    let layers = hybrid_layers(vec![attention, Layer::state("m", tiny_mamba())]).unwrap();
    let own = plan(layers.clone(), 3);
    assert_page_has("draw hybrid attention", &draw(&own, &[("a", &[KV_FIRST])]));
    assert_page_has("draw hybrid mamba", &draw(&own, &[("m", &STATES)]));

    let specs: Vec<KvSpec> = layers.iter().map(|layer| layer.spec.clone()).collect();
    let bytes = common_block_bytes(&specs).unwrap();
    let [attention, mamba] = layers.try_into().unwrap();
    let mamba: Layer = mamba;
    let mamba = mamba.padded_to(bytes).unwrap().sharing_pool("a");
    let pool = plan(vec![attention, mamba], 3);
    assert_page_has("draw pool attention", &draw(&pool, &[("a", &[KV_FIRST])]));
    assert_page_has("draw pool mamba", &draw(&pool, &[("m", &STATES)]));
}

/// A number with a comma after each third digit from the right.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap())
        .collect();
    groups.join(",")
}

/// A layer of 1,000 blocks in numbers.
fn example(layer: Layer) -> String {
    let plan = plan(vec![layer], 1000);
    let mut text = String::new();
    for view in &plan.layers()[0].tensors {
        let first = grouped(view.offset_bytes);
        text += &format!(
            "tensor   {:?} strides {:?} {} at byte {first}\n",
            view.shape, view.strides, view.dtype
        );
    }
    for (segment, of) in plan.buffers()[0].segments.iter().enumerate() {
        let (start, step) = (of.offset_bytes, of.bytes_per_block);
        let end = start + of.capacity_bytes;
        text += &format!(
            "segment  {segment}: bytes {}..{}, {} per block\n",
            grouped(start),
            grouped(end),
            grouped(step)
        );
    }
    let regions = plan.block_regions(BlockId(7)).unwrap();
    let ranges = regions.iter().map(|region| {
        let (start, end) = (region.offset_bytes, region.offset_bytes + region.length_bytes);
        format!("{}..{}", grouped(start), grouped(end))
    });
    text + &format!("block 7  bytes {}\n", ranges.collect::<Vec<_>>().join(" and "))
}

/// A layer of Qwen3-8B: 8 heads of 128, bf16, blocks of 16 tokens.
fn qwen3_8b() -> AttentionSpec {
    AttentionSpec::new(16, 8, 128, BFloat16).unwrap()
}

#[test]
fn computed_examples_are_as_printed() {
    let strided = |layout| example(Layer::strided("l", full(qwen3_8b()), layout));
    let split = Layout::kv_split(&qwen3_8b()).unwrap();
    assert_page_has("numbers kv-split", &strided(split.clone()));
    let heads_first = split.clone().with_stride_order(vec![0, 1, 3, 2, 4]).unwrap();
    assert_page_has("numbers heads-first", &strided(heads_first));
    let interleaved = split.with_stride_order(vec![1, 0, 2, 3, 4]).unwrap();
    assert_page_has("numbers kv-first block-major", &strided(interleaved));
    assert_page_has("numbers block-major", &strided(Layout::block_major(&qwen3_8b()).unwrap()));

    let unequal = AttentionSpec::new(16, 8, 192, BFloat16).unwrap().with_head_dim_v(128).unwrap();
    let fused = Layer::strided("l", full(unequal), Layout::fused(&unequal).unwrap());
    assert_page_has("numbers fused", &example(fused));
    let parts = [Layout::split_keys(&unequal), Layout::split_values(&unequal)];
    let parts = LayerLayout::Strided(parts.map(|part| part.unwrap()).to_vec());
    assert_page_has("numbers separate", &example(Layer::with_layout("l", full(unequal), parts)));

    let formats = [MlaFormat::Latent { latent_dim: 576, dtype: BFloat16 }, MlaFormat::Fp8DsMla];
    for (name, format) in ["numbers mla", "numbers fp8_ds_mla"].into_iter().zip(formats) {
        let spec = MlaSpec::new(64, format).unwrap();
        let layer = Layer::strided("l", KvSpec::Mla(spec), Layout::mla(&spec).unwrap());
        assert_page_has(name, &example(layer));
    }
    assert_page_has("numbers mamba", &example(Layer::state("m", recurrent(0))));
    assert_page_has("numbers mamba speculative", &example(Layer::state("m", recurrent(3))));
}

#[test]
fn cache_orders_in_numbers_are_as_printed() {
    let mut text = String::new();
    for order in CacheOrder::ALL {
        let layers = (0..36).map(|i| Layer::stacked(format!("{i}"), full(qwen3_8b()), order));
        let plan = plan(layers.collect(), 1000);
        let segment = plan.buffers()[0].segments[0];
        let view = &plan.layers()[2].tensors[0];
        text += &format!(
            "{order}  {:>3} segments of {:>9} bytes per block; layer 2 at byte {:>11}, strides {:?}\n",
            plan.num_segments(),
            grouped(segment.bytes_per_block),
            grouped(view.offset_bytes),
            view.strides,
        );
    }
    assert_page_has("numbers orders", &text);
}

/// A gated delta-net layer: 8,192 convolution channels of kernel 4, 32 heads of 128 × 128.
fn recurrent(num_speculative_tokens: u64) -> MambaSpec {
    let conv = StateSpec::new("conv", [8192, 3], BFloat16).unwrap().widened_along(1).unwrap();
    let ssm = StateSpec::new("ssm", [32, 128, 128], Float32).unwrap();
    MambaSpec::new(32_768, &[conv, ssm], num_speculative_tokens).unwrap()
}
