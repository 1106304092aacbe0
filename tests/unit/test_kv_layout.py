"""Layouts, layers and plans: what follows from a stride order, and every refusal."""

from __future__ import annotations

import json

import extkv
import pytest
import torch
from extkv.kv import (
    CachePlan,
    FullAttentionSpec,
    Layer,
    Layout,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
    hybrid_layers,
    plan_cache,
)

SPEC = FullAttentionSpec(16, 8, 128, "bfloat16")
UNEQUAL = FullAttentionSpec(16, 8, 192, "bfloat16", 128)
MAMBA = MambaSpec(64, [StateSpec("conv", (3, 8), "uint8"), StateSpec("ssm", (2, 4), "float32")])
DIMS = [("kv", 2), ("blocks", None), ("tokens", 16), ("heads", 8), ("content", 128)]


def plan_of(*layers: Layer, max_blocks: int = 10) -> CachePlan:
    return plan_cache(layers, max_blocks=max_blocks)


def test_usual_layouts_have_the_documented_segments_and_shapes():
    split, major = Layout.kv_split(SPEC), Layout.block_major(SPEC)
    assert (split.num_segments, split.bytes_per_block_per_segment) == (2, 32_768)
    assert (major.num_segments, major.bytes_per_block_per_segment) == (1, 65_536)
    assert split.bytes_per_block == major.bytes_per_block == SPEC.bytes_per_block
    assert split.shape(1000) == (2, 1000, 16, 8, 128)
    assert split.strides(1000) == (16_384_000, 16_384, 1024, 128, 1)
    assert major.shape(1000) == (1000, 2, 16, 8, 128)
    assert Layout.fused(UNEQUAL).shape(5) == (5, 16, 8, 320)
    assert Layout.split_keys(UNEQUAL).shape(5) == (5, 16, 8, 192)
    assert Layout.split_values(UNEQUAL).shape(5) == (5, 16, 8, 128)
    assert Layout.mla(MLASpec.fp8_ds_mla(64)).shape(5) == (5, 64, 656)
    assert Layout.mla(MLASpec(64)).dtype == "bfloat16"


def test_a_written_layout_equals_the_usual_one():
    written = Layout.new(DIMS, range(5), torch.bfloat16)
    assert written == Layout.new(DIMS, None, "bfloat16") == Layout.kv_split(SPEC)
    assert hash(written) == hash(Layout.kv_split(SPEC))
    assert written.dims == tuple(DIMS)
    assert (written.block_dim, written.stride_order) == (1, (0, 1, 2, 3, 4))
    assert written != Layout.block_major(SPEC)
    assert written != DIMS
    assert "stride_order=(0, 1, 2, 3, 4)" in repr(written)


def test_a_stride_order_moves_blocks_outermost_and_keeps_the_shape():
    layout = Layout.kv_split(SPEC).with_stride_order((1, 0, 2, 3, 4))
    assert (layout.num_segments, layout.shape(7)) == (1, (2, 7, 16, 8, 128))
    assert layout.strides(7) == (16_384, 32_768, 1024, 128, 1)
    assert layout.block_ranges(3, 7) == [(3 * 65_536, 4 * 65_536)]


def test_block_ranges_have_one_run_per_segment():
    ranges = Layout.kv_split(SPEC).block_ranges(7, 1000)
    assert ranges == [(229_376, 262_144), (32_997_376, 33_030_144)]


def test_strides_of_a_backend_give_the_layout_back():
    for order in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (0, 1, 3, 2, 4)):
        layout = Layout.new(DIMS, order, "bfloat16")
        dims = [(name, 9 if size is None else size) for name, size in DIMS]
        assert Layout.from_strides(dims, layout.strides(9), "bfloat16") == layout
    named = Layout.from_strides([("pages", 4), ("x", 3)], [3, 1], "uint8", block_dim="pages")
    assert named.block_dim == 0


def test_padding_moves_the_next_block():
    padded = Layout.block_major(SPEC).padded_to(65_600)
    assert padded.block_ranges(1, 4) == [(65_600, 131_200)]
    assert padded.strides(4)[0] == 32_800


def test_layers_take_their_usual_layout():
    assert Layer("a", SPEC).layouts == (Layout.kv_split(SPEC),)
    window = SlidingWindowSpec(16, 8, 128, "bfloat16", window=64)
    assert Layer("a", window).layouts == (Layout.kv_split(SPEC),)
    assert Layer("a", MLASpec(64)).layouts == (Layout.mla(MLASpec(64)),)
    assert Layer("a", MAMBA).layouts == Layer.stacked("a", SPEC).layouts == ()
    parts = (Layout.split_keys(UNEQUAL), Layout.split_values(UNEQUAL))
    assert Layer("a", UNEQUAL, parts).layouts == parts


def test_layers_are_values():
    layer = Layer("a", SPEC)
    assert layer == Layer("a", SPEC, Layout.kv_split(SPEC))
    assert hash(layer) == hash(Layer("a", SPEC))
    assert layer != Layer("b", SPEC)
    assert layer != "a"
    assert (layer.name, layer.spec) == ("a", SPEC)
    assert repr(layer) == f"Layer('a', {SPEC})"


def test_plan_gives_each_layer_its_buffer_segments_and_tensors():
    plan = plan_of(Layer("a", SPEC), Layer("m", MAMBA))
    assert plan.buffers() == [
        (["a"], [(0, 327_680, 32_768), (327_680, 327_680, 32_768)], 655_360),
        (["m"], [(0, 560, 56)], 560),
    ]
    assert plan.layers() == [
        (
            "a",
            0,
            [("", 0, "bfloat16", [2, 10, 16, 8, 128], [163_840, 16_384, 1024, 128, 1])],
        ),
        (
            "m",
            1,
            [
                ("conv", 0, "uint8", [10, 3, 8], [56, 8, 1]),
                ("ssm", 24, "float32", [10, 2, 4], [14, 4, 1]),
            ],
        ),
    ]
    assert (plan.max_blocks, plan.num_segments) == (10, 3)
    assert (plan.bytes_per_block, plan.capacity_bytes) == (65_592, 655_920)


def test_regions_are_buffer_segment_offset_and_length():
    plan = plan_of(Layer("a", SPEC))
    assert plan.regions(2) == [(0, 0, 0, 65_536), (0, 1, 327_680, 65_536)]
    assert plan.grown_regions(2, 3) == [(0, 0, 65_536, 32_768), (0, 1, 393_216, 32_768)]
    assert plan.block_regions(2) == plan.grown_regions(2, 3)
    assert plan.committed_bytes(2) == 131_072
    assert plan.physical_bytes(1, 65_536) == 131_072
    assert plan.physical_bytes(0, 65_536) == 0


def test_max_bytes_is_rounded_down_to_blocks():
    plan = plan_cache([Layer("a", SPEC)], max_bytes=10 * 65_536 - 1)
    assert (plan.max_blocks, plan.capacity_bytes) == (9, 9 * 65_536)


def test_stacked_layers_share_one_tensor():
    plan = plan_of(*(Layer.stacked(f"l{i}", SPEC, "blhnc") for i in range(3)))
    assert [names for names, _, _ in plan.buffers()] == [["l0", "l1", "l2"]]
    assert [tensors[0][1] for _, _, tensors in plan.layers()] == [0, 65_536, 131_072]


def test_sharing_layers_live_in_the_buffer_of_another():
    shared = Layer("b", SPEC).sharing_blocks("a")
    block_bytes = Layout.block_major(SPEC).bytes_per_block
    owner = Layer("c", SPEC, Layout.block_major(SPEC))
    state = Layer("d", MAMBA).padded_to(block_bytes).sharing_pool("c")
    assert state.spec.padded_bytes == block_bytes
    plan = plan_of(Layer("a", SPEC), shared, owner, state)
    assert [names for names, _, _ in plan.buffers()] == [["a", "b"], ["c", "d"]]
    padded = Layer("e", SPEC, Layout.block_major(SPEC)).padded_to(65_600)
    assert (padded.spec, padded.layouts[0].bytes_per_block) == (SPEC, 65_600)


def test_a_hybrid_has_attention_with_blocks_outermost():
    layers = hybrid_layers([Layer("a", SPEC), Layer("m", MAMBA)])
    assert layers[0].layouts[0].num_segments == 1
    assert layers[0].layouts[0].shape(3) == Layout.kv_split(SPEC).shape(3)
    assert layers[1] == Layer("m", MAMBA)
    assert hybrid_layers([Layer("a", SPEC)]) == [Layer("a", SPEC)]


def test_facts_are_what_a_trace_holds():
    facts = json.loads(plan_of(Layer("a", SPEC), Layer("b", SPEC)).facts_json(4096, 8192))
    assert facts == {
        "bytes_per_block": 131_072,
        "num_segments": 4,
        "block_size": 16,
        "num_block_tables": 1,
        "fixed_blocks_per_request": 0,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.new([("x", 2)], None, "uint8"), "exactly one dim must have the size None"),
        (lambda: Layout.new([("x", None), ("y", None)], None, "uint8"), "exactly one dim"),
        (lambda: Layout.new([("b", None), ("x", 0)], None, "uint8"), "dim x has size 0"),
        (lambda: Layout.new(DIMS, (0, 1, 2, 3), "uint8"), "4 entries for 5 dims"),
        (lambda: Layout.new(DIMS, (0, 1, 2, 3, 5), "uint8"), "names dim 5"),
        (lambda: Layout.new(DIMS, (0, 1, 2, 3, 3), "uint8"), "names dim 3 twice"),
        (lambda: Layout.new([("x", 2**17), ("b", None)], None, "uint8"), "131072 segments exceed"),
        (lambda: Layout.new([("b", None), ("x", 2**63)], None, "int64"), "overflows 64 bits"),
        (lambda: Layout.from_strides([("x", 2), ("y", 2)], [2, 1], "uint8"), "called 'blocks'"),
        (lambda: Layout.from_strides([("blocks", 2), ("x", 3)], [3], "uint8"), "1 strides given"),
        (lambda: Layout.from_strides([("blocks", 2), ("x", 3)], [-3, 1], "uint8"), "negative"),
        (lambda: Layout.from_strides([("blocks", 2), ("x", 3)], [2, 1], "uint8"), "alias"),
        (lambda: Layout.from_strides([("blocks", 2), ("x", 3)], [4, 1], "uint8"), "do not tile"),
        (lambda: Layout.from_strides([("blocks", 1), ("x", 3)], [3, 1], "uint8"), "at least 2"),
        (lambda: Layout.kv_split(UNEQUAL), "keys have head_dim 192 and values 128"),
        (lambda: Layout.block_major(UNEQUAL), "keys have head_dim 192 and values 128"),
        (lambda: Layout.kv_split(MLASpec(64)), "for attention layers, the spec .* kind MLA"),
        (lambda: Layout.mla(SPEC), "for MLA layers, the spec .* kind attention"),
        (lambda: Layout.fused(MAMBA), "kind recurrent"),
        (lambda: Layout.kv_split(SPEC).with_stride_order((0, 1)), "2 entries for 5 dims"),
        (lambda: Layout.kv_split(SPEC).padded_to(1), "too small"),
        (lambda: Layout.kv_split(SPEC).padded_to(32_769), "not a multiple"),
        (lambda: Layout.kv_split(SPEC).shape(0), "number of blocks is 0"),
        (lambda: Layout.kv_split(SPEC).strides(2**62), "overflows 64 bits"),
        (lambda: Layout.kv_split(SPEC).block_ranges(5, 5), "block 5 is out of range"),
        (lambda: Layer("a", UNEQUAL), "keys have head_dim 192"),
        (lambda: Layer("a", SPEC).padded_to(1 << 20), "not one run of bytes"),
        (lambda: Layer("a", MAMBA).padded_to(8), "too small"),
        (lambda: hybrid_layers([Layer.stacked("a", SPEC, "LHBNC"), Layer("m", MAMBA)]), "LHBNC"),
        (lambda: plan_cache([], max_blocks=1), "at least one layer"),
        (lambda: plan_of(Layer("a", SPEC), Layer("a", SPEC)), "layer a is listed twice"),
        (lambda: plan_of(Layer("a", SPEC, Layout.fused(UNEQUAL))), "81920 bytes per block"),
        (lambda: plan_of(Layer.stacked("m", MAMBA)), "recurrent layers need state"),
        (lambda: plan_of(Layer("a", SPEC).sharing_blocks("b")), "not listed before"),
        (lambda: plan_of(Layer("a", SPEC), Layer("b", MLASpec(16)).sharing_blocks("a")), "differ"),
        (lambda: plan_of(Layer("a", SPEC), Layer("m", MAMBA).sharing_pool("a")), "share a pool"),
        (lambda: plan_cache([Layer("a", SPEC)], max_blocks=0), "max_blocks is 0"),
        (lambda: plan_cache([Layer("a", SPEC)], max_bytes=65_535), "65535 bytes hold no block"),
        (lambda: plan_of(Layer("a", SPEC)).regions(11), "11 blocks asked for, 10 can be held"),
        (lambda: plan_of(Layer("a", SPEC)).grown_regions(3, 2), "cannot grow from 3 to 2"),
        (lambda: plan_of(Layer("a", SPEC)).block_regions(10), "block 10 is out of range"),
        (lambda: plan_of(Layer("a", SPEC)).committed_bytes(11), "11 blocks"),
        (lambda: plan_of(Layer("a", SPEC)).physical_bytes(1, 0), "granule_bytes is 0"),
        (
            lambda: plan_of(
                Layer("a", SPEC), Layer("b", FullAttentionSpec(32, 8, 128, "bfloat16"))
            ).facts_json(1, 1),
            "block_size 16 and 32",
        ),
    ],
)
def test_refuses_layouts_that_cannot_be(make, message):
    with pytest.raises(extkv.LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.new([("b", None), ("x", -1)], None, "uint8"), "dim x"),
        (lambda: Layout.new(DIMS, (0, 1, 2, 3, -1), "uint8"), "stride order entry"),
        (lambda: Layout.new(DIMS, None, "float7"), "float7"),
        (lambda: Layout.from_strides([("blocks", -2)], [1], "uint8"), "dim blocks"),
        (lambda: Layout.kv_split(SPEC).shape(-1), "num_blocks"),
        (lambda: Layout.kv_split(SPEC).block_ranges(-1, 5), "block"),
        (lambda: Layer("m", MAMBA, Layout.kv_split(SPEC)), "layer m is recurrent"),
        (lambda: Layer.stacked("a", SPEC, "NHD"), 'unknown cache order "NHD"'),
        (lambda: plan_cache([Layer("a", SPEC)]), "exactly one"),
        (lambda: plan_cache([Layer("a", SPEC)], max_blocks=1, max_bytes=1), "exactly one"),
        (lambda: plan_cache([Layer("a", SPEC)], max_blocks=-1), "max_blocks"),
        (lambda: plan_of(Layer("a", SPEC)).regions(-1), "got -1"),
        (lambda: plan_of(Layer("a", SPEC)).block_regions(2**64), "got 18446744073709551616"),
    ],
)
def test_refuses_arguments_out_of_range(make, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        make()


def test_a_number_of_blocks_that_is_none_is_a_type_error():
    with pytest.raises(TypeError):
        plan_of(Layer("a", SPEC)).regions("2")
