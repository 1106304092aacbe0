"""Random layouts, layers and caches against what torch and plain counting say."""

from __future__ import annotations

import itertools
import math

import torch
from extkv.kv import (
    FullAttentionSpec,
    KVCache,
    Layer,
    Layout,
    MambaSpec,
    MLASpec,
    StateSpec,
    plan_cache,
)
from extkv.kv.spec import dtype_size_bytes
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ("uint8", "float8_e4m3fn", "float16", "bfloat16", "float32", "int64")
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
NUM_BLOCKS = st.integers(2, 5)
GRANULE = 4096


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to five dims of size 1 to 4, any block dim, any stride order, any dtype."""
    sizes: list[int | None] = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    sizes.insert(draw(st.integers(0, len(sizes))), None)
    dims = [(f"d{index}", size) for index, size in enumerate(sizes)]
    order = draw(st.permutations(range(len(dims))))
    return Layout.new(dims, order, draw(st.sampled_from(DTYPES)))


@st.composite
def attention_layers(draw: st.DrawFn, name: str) -> Layer:
    dtype = draw(st.sampled_from(("uint8", "bfloat16", "float32")))
    sizes = [draw(st.integers(1, 3)) for _ in range(3)]
    kind = draw(st.sampled_from(["split", "major", "fused", "parts", "mla", "stacked"]))
    if kind == "mla":
        return Layer(name, MLASpec(sizes[0], sizes[1], dtype))
    spec = FullAttentionSpec(*sizes, dtype)
    if kind == "stacked":
        return Layer.stacked(name, spec, draw(st.sampled_from(ORDERS)))
    if kind == "split":
        return Layer(
            name, spec, Layout.kv_split(spec).with_stride_order(draw(st.permutations(range(5))))
        )
    if kind == "major":
        return Layer(name, spec, Layout.block_major(spec))
    if kind == "fused":
        return Layer(name, spec, Layout.fused(spec))
    return Layer(name, spec, [Layout.split_keys(spec), Layout.split_values(spec)])


@st.composite
def state_layers(draw: st.DrawFn, name: str) -> Layer:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    states = [
        StateSpec(f"s{i}", shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, 0])))
        for i, shape in enumerate(shapes)
    ]
    return Layer(name, MambaSpec(8, states, draw(st.integers(0, 2))))


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    """One to four layers of any kind, each with memory of its own."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    return [
        draw(state_layers(f"l{i}") if is_state else attention_layers(f"l{i}"))
        for i, is_state in enumerate(kinds)
    ]


def physical_shape(layout: Layout, num_blocks: int) -> list[int]:
    shape = layout.shape(num_blocks)
    return [shape[dim] for dim in layout.stride_order]


@given(layouts(), NUM_BLOCKS)
def test_strides_are_those_of_a_permuted_torch_tensor(layout: Layout, num_blocks: int):
    order = list(layout.stride_order)
    inverse = [order.index(dim) for dim in range(len(order))]
    tensor = torch.empty(physical_shape(layout, num_blocks), device="meta").permute(inverse)
    assert tuple(tensor.shape) == layout.shape(num_blocks)
    assert tensor.stride() == layout.strides(num_blocks)


@given(layouts(), NUM_BLOCKS)
def test_segments_and_block_bytes_are_products_of_dims(layout: Layout, num_blocks: int):
    physical = physical_shape(layout, num_blocks)
    place = layout.stride_order.index(layout.block_dim)
    item_bytes = dtype_size_bytes(layout.dtype)
    assert layout.num_segments == math.prod(physical[:place])
    assert layout.bytes_per_block_per_segment == math.prod(physical[place + 1 :]) * item_bytes
    assert layout.bytes_per_block == layout.num_segments * layout.bytes_per_block_per_segment


@given(layouts(), NUM_BLOCKS, st.integers(0, 3))
def test_each_element_of_each_block_has_its_own_bytes(
    layout: Layout, num_blocks: int, padding: int
):
    item_bytes = dtype_size_bytes(layout.dtype)
    layout = layout.padded_to(layout.bytes_per_block_per_segment + padding * item_bytes)
    strides, taken = layout.strides(num_blocks), {}
    for index in itertools.product(*map(range, layout.shape(num_blocks))):
        first = sum(i * stride for i, stride in zip(index, strides, strict=True)) * item_bytes
        ranges = layout.block_ranges(index[layout.block_dim], num_blocks)
        assert any(start <= first and first + item_bytes <= end for start, end in ranges)
        for byte in range(first, first + item_bytes):
            assert byte not in taken, (index, taken[byte])
            taken[byte] = index
    whole = layout.num_segments * layout.bytes_per_block_per_segment * num_blocks
    padded = layout.num_segments * padding * item_bytes * num_blocks
    assert len(taken) == whole - padded


@given(layouts(), NUM_BLOCKS)
def test_reported_strides_give_the_same_bytes_back(layout: Layout, num_blocks: int):
    shape, strides = layout.shape(num_blocks), layout.strides(num_blocks)
    dims = [(name, size) for (name, _), size in zip(layout.dims, shape, strict=True)]
    name = layout.dims[layout.block_dim][0]
    again = Layout.from_strides(dims, strides, layout.dtype, block_dim=name)
    assert again.strides(num_blocks + 1) == layout.strides(num_blocks + 1) or 1 in shape
    for block in range(num_blocks):
        found, expected = (
            {
                byte
                for start, end in one.block_ranges(block, num_blocks)
                for byte in range(start, end)
            }
            for one in (again, layout)
        )
        assert found == expected


@given(models(), NUM_BLOCKS)
def test_layers_never_share_a_byte_and_blocks_stay_in_their_regions(
    layers: list[Layer], num_blocks: int
):
    plan = plan_cache(layers, max_blocks=num_blocks)
    regions = {
        block: [
            (buffer, offset, offset + length)
            for buffer, _, offset, length in plan.block_regions(block)
        ]
        for block in range(num_blocks)
    }
    taken: dict[tuple[int, int], tuple] = {}
    for name, buffer, tensors in plan.layers():
        for part, offset, dtype, shape, strides in tensors:
            item_bytes = dtype_size_bytes(dtype)
            block_dim = _block_dim(shape, num_blocks, name, layers)
            for index in itertools.product(*map(range, shape)):
                first = offset + item_bytes * sum(
                    i * stride for i, stride in zip(index, strides, strict=True)
                )
                assert any(
                    of == buffer and start <= first and first + item_bytes <= end
                    for of, start, end in regions[index[block_dim]]
                )
                for byte in range(first, first + item_bytes):
                    key = (buffer, byte)
                    assert key not in taken, (key, taken[key], (name, part, index))
                    taken[key] = (name, part, index)


def _block_dim(shape: list[int], num_blocks: int, name: str, layers: list[Layer]) -> int:
    layer = next(layer for layer in layers if layer.name == name)
    block_dim = layer.layouts[0].block_dim if layer.layouts else 0
    assert shape[block_dim] == num_blocks
    return block_dim


@given(models(), st.data())
def test_grown_regions_add_up_to_the_committed_prefix(layers: list[Layer], data: st.DataObject):
    plan = plan_cache(layers, max_blocks=9)
    steps = sorted(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    grown: dict[tuple[int, int], list[int]] = {}
    for before, after in itertools.pairwise([0, *steps]):
        for buffer, segment, offset, length in plan.grown_regions(before, after):
            pieces = grown.setdefault((buffer, segment), [offset, offset])
            assert pieces[1] == offset, "growth begins where the committed prefix ends"
            pieces[1] += length
    committed = {
        (buffer, segment): [offset, offset + length]
        for buffer, segment, offset, length in plan.regions(steps[-1])
    }
    assert grown == committed
    assert plan.committed_bytes(steps[-1]) == sum(end - start for start, end in committed.values())
    assert plan.physical_bytes(steps[-1], GRANULE) >= plan.committed_bytes(steps[-1])


@given(models(), st.integers(1, 6), st.integers(1, 6))
def test_commit_then_grow_is_one_commit(layers: list[Layer], first: int, second: int):
    first, second = sorted((first, second))
    plan = plan_cache(layers, max_blocks=6)
    options = {"device": "cpu", "granularity": GRANULE}
    with KVCache.reserve(plan, **options) as stepwise, KVCache.reserve(plan, **options) as at_once:
        stepwise.commit(first)
        stepwise.grow(second)
        at_once.commit(second)
        assert stepwise.num_blocks == at_once.num_blocks == second
        for name, tensors in at_once.tensors().items():
            others = stepwise.tensors()[name]
            pairs = zip(_listed(tensors), _listed(others), strict=True)
            for tensor, other in pairs:
                assert (tensor.shape, tensor.stride()) == (other.shape, other.stride())
        sizes = [
            (stats.committed_bytes, stats.logical_bytes)
            for stats in (stepwise.stats(), at_once.stats())
        ]
        assert sizes[0] == sizes[1]


def _listed(tensors: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]
