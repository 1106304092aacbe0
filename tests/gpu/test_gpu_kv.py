"""KVCache and the sizing flow on a CUDA device."""

from __future__ import annotations

import textwrap

import extkv
import pytest
import torch
from extkv.kv import FullAttentionSpec, KVCache, Layer, SizeAfterCapture, SizingPlan
from support.kv_caches import CAPACITY, KINDS, all_equal, are_zero, blocks, copies, fill, reserve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GRANULE = 2 << 20
GIB = 1 << 30


@pytest.mark.parametrize("kind", KINDS)
def test_growth_and_shrink_keep_old_blocks_and_zero_new_ones(kind: str):
    cache = reserve(kind, "cuda")
    pointers = [tensor.data_ptr() for tensor in blocks(cache, 0, 1)]
    fill(blocks(cache, 0, 1), seed=1)
    kept = copies(blocks(cache, 0, 1))
    for num_blocks in (2, 7, 33, CAPACITY):
        before = cache.num_blocks
        cache.commit(num_blocks)
        assert all_equal(blocks(cache, 0, before), kept)
        assert are_zero(blocks(cache, before, num_blocks))
        fill(blocks(cache, before, num_blocks), seed=num_blocks)
        kept = copies(blocks(cache, 0, num_blocks))
    kept = copies(blocks(cache, 0, 11))
    cache.shrink(11)
    cache.grow(CAPACITY)
    assert all_equal(blocks(cache, 0, 11), kept)
    assert are_zero(blocks(cache, 11, CAPACITY))
    assert [tensor.data_ptr() for tensor in blocks(cache, 0, 1)] == pointers
    assert cache.stats().committed_bytes == cache.plan.physical_bytes(CAPACITY, GRANULE)


@pytest.mark.parametrize("kind", ["kv_split", "mla", "hybrid", "BLHNC"])
def test_everything_at_once_on_the_device(kind: str):
    cache = reserve(kind, "cuda", extensible=False)
    assert are_zero(blocks(cache, 0, CAPACITY))
    with pytest.raises(extkv.CapacityError):
        cache.commit(CAPACITY + 1)


def test_a_block_beyond_the_committed_size_is_an_illegal_access(run_python):
    program = """
        import torch
        from extkv.kv import FullAttentionSpec, KVCache
        spec = FullAttentionSpec(16, 8, 4096, "float32")  # 2 MiB per block and half
        cache = KVCache.reserve({"a": spec}, max_blocks=100, device="cuda")
        cache.commit(10)
        keys, values = cache.tensors()["a"]
        keys[9] = 1
        values[9] = 1
        torch.cuda.synchronize()
        print("last", flush=True)
        values[10] = 1
        torch.cuda.synchronize()
    """
    result = run_python(textwrap.dedent(program))
    assert result.stdout == "last\n", result.stderr
    assert result.returncode != 0
    assert "illegal" in result.stderr.lower()


class DecodeModel:
    """Something like a decode step: write a token's keys and values, attend over its block table.

    All kernels see the cache's full-capacity tensors.
    """

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        self.caches = [cache.tensors()[f"layers.{i}"].unbind(0) for i in range(num_layers)]
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.weight = torch.randn(1024, 1024, device="cuda", generator=generator) / 32
        self.tables: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(self, batch: int) -> torch.Tensor:
        hidden, table = self.inputs[batch], self.tables[batch]
        # Each sequence has a slot of its own, also where two share a block.
        slots = torch.arange(batch, device="cuda")
        for keys, values in self.caches:
            row = hidden.view(batch, 1, 8, 128)
            keys[table[:, -1], slots] = row[:, 0]
            values[table[:, -1], slots] = row[:, 0] * 2
            k = keys[table].flatten(1, 2).transpose(1, 2)
            v = values[table].flatten(1, 2).transpose(1, 2)
            query = row.transpose(1, 2)
            attended = torch.nn.functional.scaled_dot_product_attention(query, k, v)
            hidden = (attended.transpose(1, 2).reshape(batch, 1024) @ self.weight).tanh()
        return hidden

    def capture(self, batches: tuple[int, ...], num_blocks: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        for batch in batches:
            shape = (batch, 4)
            table = torch.randint(0, num_blocks, shape, device="cuda", generator=generator)
            self.tables[batch] = table
            self.inputs[batch] = torch.randn(batch, 1024, device="cuda", generator=generator)
            self.step(batch)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs[batch] = self.step(batch)
            self.graphs[batch] = graph

    def replay(self, batch: int) -> torch.Tensor:
        self.graphs[batch].replay()
        return self.outputs[batch].clone()


def test_captured_graphs_stay_valid_after_the_commit_and_use_new_blocks():
    spec = FullAttentionSpec(16, 8, 128, "float32")
    names = [f"layers.{index}" for index in range(3)]
    cache = KVCache.reserve(dict.fromkeys(names, spec), max_bytes=8 * GIB, device="cuda")
    cache.commit(4)
    model = DecodeModel(cache, len(names))
    batches = (1, 3, 8)
    model.capture(batches, num_blocks=4)
    content = [(torch.randn_like(k[:4]), torch.randn_like(v[:4])) for k, v in model.caches]

    def replay_from(first_block: int, batch: int) -> torch.Tensor:
        """A step writes into the cache, so each replay starts from the same content."""
        for (keys, values), (old_keys, old_values) in zip(model.caches, content, strict=True):
            keys[first_block : first_block + 4] = old_keys
            values[first_block : first_block + 4] = old_values
        return model.replay(batch)

    before = {batch: replay_from(0, batch) for batch in batches}
    pointers = [keys.data_ptr() for keys, _ in model.caches]
    cache.commit(cache.capacity_blocks)
    assert [keys.data_ptr() for keys, _ in model.caches] == pointers
    for batch in batches:
        assert torch.equal(replay_from(0, batch), before[batch])
    first_of_last = cache.num_blocks - 4
    for batch in batches:
        model.tables[batch] += first_of_last
        assert torch.equal(replay_from(first_of_last, batch), before[batch])


def test_the_flow_leaves_the_planned_margin_free():
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    layers = [Layer(f"layers.{index}", spec) for index in range(8)]
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []

    def worst_step() -> None:
        scratch = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        scratch.zero_()

    reserve_bytes = GIB
    sizer = SizeAfterCapture(layers, device="cuda", max_model_len=4096, reserve_bytes=reserve_bytes)
    sizer.weights_loaded(lambda: held.append(torch.ones(2 * GIB, dtype=torch.uint8, device="cuda")))
    sizer.profile(worst_step)
    cache = sizer.reserve(num_warmup_blocks=8)
    tensor = cache.tensors()["layers.0"]
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            tensor[:, :8].fill_(3)

    sizer.capture(capture)
    sizer.measure(worst_step)
    plan = sizer.plan()
    sizer.commit()
    free, total = torch.cuda.mem_get_info()
    planned = plan.parts["transient_bytes"] + plan.parts["reserve_bytes"]
    planned += plan.parts["unused_bytes"] + plan.parts["rounding_bytes"]
    assert abs(free - planned) <= GRANULE * cache.plan.num_segments + 8 * GRANULE
    assert sum(plan.parts.values()) == total
    assert SizingPlan.from_json(plan.to_json()) == plan
    graph.replay()
    assert bool((tensor[:, :8] == 3).all())
    assert not bool(tensor[:, cache.num_blocks - 4 : cache.num_blocks].any())
    worst_step()
    cache.close()


def test_regions_of_one_growth_have_few_handles():
    cache = KVCache.reserve(
        {"a": FullAttentionSpec(16, 8, 128, "bfloat16")}, max_bytes=4 * GIB, device="cuda"
    )
    cache.commit(cache.capacity_blocks)
    for region in cache.regions():
        assert region.num_bytes == 2 * GIB
        assert region.num_handles <= 12
