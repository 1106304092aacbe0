"""KVCache on the host: every layout grows, keeps its bytes and reads zero where it is new."""

from __future__ import annotations

import gc
import signal

import extkv
import pytest
import torch
from extkv.kv import FullAttentionSpec, KVCache, Layer, Layout, plan_cache
from support.kv_caches import (
    ATTENTION,
    CAPACITY,
    KINDS,
    all_equal,
    are_zero,
    blocks,
    copies,
    fill,
    reserve,
)

GRANULE = 64 << 10


@pytest.mark.parametrize("kind", KINDS)
def test_growth_keeps_old_blocks_and_zeroes_new_ones(kind: str):
    cache = reserve(kind)
    assert cache.num_blocks == 1
    pointers = [tensor.data_ptr() for tensor in blocks(cache, 0, 1)]
    fill(blocks(cache, 0, 1), seed=1)
    kept = copies(blocks(cache, 0, 1))
    for num_blocks in (2, 7, 33, CAPACITY):
        before = cache.num_blocks
        cache.commit(num_blocks)
        assert cache.num_blocks == num_blocks
        assert all_equal(blocks(cache, 0, before), kept)
        assert are_zero(blocks(cache, before, num_blocks))
        fill(blocks(cache, before, num_blocks), seed=num_blocks)
        kept = copies(blocks(cache, 0, num_blocks))
    assert [tensor.data_ptr() for tensor in blocks(cache, 0, 1)] == pointers


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_keeps_the_rest_and_growth_reads_zero_again(kind: str):
    cache = reserve(kind)
    cache.commit(CAPACITY)
    fill(blocks(cache, 0, CAPACITY), seed=3)
    kept = copies(blocks(cache, 0, 11))
    cache.shrink(11)
    assert cache.num_blocks == 11
    assert all_equal(blocks(cache, 0, 11), kept)
    cache.grow(CAPACITY)
    assert all_equal(blocks(cache, 0, 11), kept)
    assert are_zero(blocks(cache, 11, CAPACITY))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once_equals_step_by_step(kind: str):
    once = reserve(kind, extensible=False)
    steps = reserve(kind)
    steps.commit(9)
    steps.grow(CAPACITY)
    assert once.num_blocks == steps.num_blocks == CAPACITY
    for left, right in zip(blocks(once, 0, CAPACITY), blocks(steps, 0, CAPACITY), strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
    assert are_zero(blocks(once, 0, CAPACITY))
    with pytest.raises(extkv.CapacityError, match="extensible=False"):
        once.commit(CAPACITY + 1)
    with pytest.raises(extkv.CapacityError, match="extensible=False"):
        once.shrink(3)
    once.commit(CAPACITY)


@pytest.mark.parametrize("kind", KINDS)
def test_committed_bytes_are_exactly_the_blocks(kind: str):
    cache = reserve(kind)
    for num_blocks in (1, 5, CAPACITY):
        cache.commit(num_blocks)
        stats = cache.stats()
        assert stats.logical_bytes == num_blocks * cache.bytes_per_block
        assert stats.committed_bytes == cache.plan.physical_bytes(num_blocks, GRANULE)
        regions = cache.regions()
        assert sum(region.num_bytes for region in regions) == stats.logical_bytes
        assert all(region.num_handles >= 1 for region in regions)


def test_segments_follow_from_the_layout():
    segments = {kind: reserve(kind).plan.num_segments for kind in KINDS}
    assert segments["kv_split"] == 6
    assert segments["block_major"] == 3
    assert segments["kv_first_block_outermost"] == 3
    assert segments["mla"] == segments["mamba"] == segments["hybrid"] == 3
    assert (segments["LBHNC"], segments["BLHNC"], segments["BHLNC"]) == (3, 1, 1)
    assert segments["LHBNC"] == 6


def test_halves_of_a_split_layer_grow_in_lockstep():
    cache = KVCache.reserve({"a": ATTENTION}, max_blocks=CAPACITY, device="cpu")
    tensor = cache.tensors()["a"]
    assert tensor.shape == (2, CAPACITY, 16, 2, 64)
    cache.commit(20)
    tensor[0, 19] = 1
    tensor[1, 19] = 2
    keys, values = cache.regions()
    assert keys.num_bytes == values.num_bytes == 20 * 4096
    assert values.address - keys.address == CAPACITY * 4096


def test_hybrid_blocks_are_contiguous_pages():
    cache = reserve("hybrid")
    tensor = cache.tensors()["layers.0"]
    assert tensor.shape[:2] == (2, CAPACITY)
    key_stride, block_stride = tensor.stride()[:2]
    assert block_stride >= 2 * key_stride
    conv, ssm = cache.tensors()["layers.1"]
    assert (conv.shape, ssm.shape) == ((CAPACITY, 3, 128), (CAPACITY, 4, 64))
    assert (conv.dtype, ssm.dtype) == (torch.float16, torch.float32)


def test_layers_can_share_a_tensor():
    layers = [Layer("a", ATTENTION), Layer("b", ATTENTION).sharing_blocks("a")]
    cache = KVCache.reserve(layers, max_blocks=4, device="cpu")
    tensors = cache.tensors()
    assert tensors["a"].data_ptr() == tensors["b"].data_ptr()
    assert cache.bytes_per_block == ATTENTION.bytes_per_block


def test_unequal_page_sizes_grow_as_one():
    big = FullAttentionSpec(16, 8, 64, "float16")
    cache = KVCache.reserve({"small": ATTENTION, "big": big}, max_blocks=CAPACITY, device="cpu")
    assert cache.bytes_per_block == ATTENTION.bytes_per_block + big.bytes_per_block
    cache.commit(CAPACITY)
    assert are_zero(blocks(cache, 0, CAPACITY))


def test_max_bytes_gives_the_blocks_that_fit():
    cache = KVCache.reserve({"a": ATTENTION}, max_bytes=100_000, device="cpu")
    assert cache.capacity_blocks == 100_000 // ATTENTION.bytes_per_block


def test_out_of_memory_in_the_middle_changes_nothing(host_budget):
    cache = reserve("kv_split")
    cache.commit(3)
    fill(blocks(cache, 0, 3), seed=5)
    kept, before = copies(blocks(cache, 0, 3)), cache.stats()
    info = extkv.memory_info("cpu")
    host_budget(info.total - info.free + 3 * GRANULE)
    with pytest.raises(extkv.OutOfMemoryError) as raised:
        cache.commit(CAPACITY)
    assert raised.value.available == 3 * GRANULE
    after = cache.stats()
    assert (after.num_blocks, after.committed_bytes, after.num_handles) == (
        before.num_blocks,
        before.committed_bytes,
        before.num_handles,
    )
    assert all_equal(blocks(cache, 0, 3), kept)


def test_prepared_growth_commits_or_vanishes():
    gc.collect()
    free = extkv.memory_info("cpu").free
    cache = reserve("kv_split")
    used = free - extkv.memory_info("cpu").free
    prepared = cache.prepare(CAPACITY)
    assert prepared.num_blocks == CAPACITY
    assert cache.num_blocks == 1
    prepared.release()
    prepared.release()
    assert free - extkv.memory_info("cpu").free == used
    with pytest.raises(extkv.StaleGrowthError):
        prepared.commit()
    stale = cache.prepare(CAPACITY)
    cache.commit(2)
    with pytest.raises(extkv.StaleGrowthError):
        stale.commit()
    cache.prepare(CAPACITY).commit()
    assert are_zero(blocks(cache, 2, CAPACITY))


def test_closing_waits_for_tensors():
    gc.collect()
    free = extkv.memory_info("cpu").free
    cache = reserve("mla")
    tensors = cache.tensors()
    cache.close()
    cache.close()
    assert cache.closed
    assert cache.num_blocks == 0
    assert tensors["layers.0"][0].sum() == 0
    with pytest.raises(extkv.FreedError):
        cache.commit(2)
    with pytest.raises(extkv.FreedError):
        cache.tensors()
    del tensors
    gc.collect()
    assert extkv.memory_info("cpu").free == free


def test_context_manager_closes():
    with reserve("mla") as cache:
        assert "1 of 40 blocks" in repr(cache)
    assert "closed" in repr(cache)


BAD_CALLS = [
    (lambda: KVCache.reserve({"a": ATTENTION}, device="cpu"), ValueError, "exactly one"),
    (
        lambda: KVCache.reserve({"a": ATTENTION}, max_blocks=1, max_bytes=1, device="cpu"),
        ValueError,
        "exactly one",
    ),
    (lambda: KVCache.reserve({"a": ATTENTION}, max_blocks=0, device="cpu"), ValueError, "0"),
    (lambda: KVCache.reserve({"a": ATTENTION}, max_blocks=-1, device="cpu"), ValueError, "-1"),
    (lambda: KVCache.reserve({"a": ATTENTION}, max_bytes=10, device="cpu"), ValueError, "10"),
    (lambda: KVCache.reserve({}, max_blocks=1, device="cpu"), ValueError, "layer"),
    (
        lambda: KVCache.reserve(
            {"a": ATTENTION}, {"b": Layout.kv_split(ATTENTION)}, max_blocks=1, device="cpu"
        ),
        ValueError,
        "'b'",
    ),
    (
        lambda: KVCache.reserve(
            plan_cache([Layer("a", ATTENTION)], max_blocks=1), max_blocks=1, device="cpu"
        ),
        ValueError,
        "plan",
    ),
    (lambda: reserve("mla").commit(CAPACITY + 1), extkv.CapacityError, "41 blocks: 40"),
    (lambda: reserve("mla").commit(0), extkv.GrowOnlyError, "grow-only.*1 to 0"),
    (lambda: reserve("mla").commit(-1), ValueError, "-1"),
    (lambda: reserve("mla").shrink(2), ValueError, "shrink"),
    (lambda: reserve("mla").prepare(CAPACITY + 1), extkv.CapacityError, "41"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD_CALLS)
def test_bad_input_is_a_typed_error(call, error, words):
    with pytest.raises(error, match=words) as raised:
        call()
    assert isinstance(raised.value, extkv.ExtkvError)


def test_a_block_beyond_the_committed_size_faults(run_python):
    program = """
        from extkv.kv import FullAttentionSpec, KVCache
        spec = FullAttentionSpec(16, 2, 256, "float32")  # 64 KiB per block
        cache = KVCache.reserve({"a": spec}, max_blocks=100, device="cpu")
        cache.commit(10)
        keys, values = cache.tensors()["a"]
        keys[9] = 1
        values[9] = 1
        print("last", flush=True)
        values[10, 0, 0, 0] = 1
    """
    result = run_python(program)
    assert result.stdout == "last\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


def test_b86_poisoned_blocks_read_zero_after_they_are_given_out_again():
    cache = KVCache.reserve({"a": ATTENTION}, max_blocks=CAPACITY, device="cpu")
    cache.commit(CAPACITY)
    bits = cache.tensors()["a"].view(torch.int16)
    bits.fill_(0x7FC0)
    cache.shrink(3)
    cache.commit(CAPACITY)
    assert not cache.tensors()["a"][:, 3:].any()
    assert (bits[:, :3] == 0x7FC0).all()
