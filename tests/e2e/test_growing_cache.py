"""The KV cache grows block by block in place, and refuses what it cannot hold."""

import dataclasses

import extkv
import pytest
import torch
from extkv.engine import GrowingKVCache
from extkv.engine.greedy import stream_token_ids
from extkv.models import LlamaConfig

# 16 tokens of one segment fill one 64 KiB granule, so every block is seen in the committed bytes.
CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=1024,
    intermediate_size=8,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    context_length=100,
)
BLOCK_BYTES = 16 * 16 * 64 * 4
NUM_SEGMENTS = 4


@pytest.fixture
def cache():
    with GrowingKVCache(CONFIG, max_model_len=100, dtype=torch.float32) as cache:
        yield cache


@pytest.fixture
def small_host():
    """Lets the test set how much memory the host has."""
    yield extkv.set_host_memory_budget
    extkv.set_host_memory_budget(None)


def fill(cache, num_tokens, value):
    cache.extend(num_tokens)
    rows = torch.full((num_tokens, CONFIG.num_kv_heads, CONFIG.head_dim), float(value))
    for layer_id in range(CONFIG.num_layers):
        cache.append(layer_id, rows + layer_id, -rows - layer_id)


def test_starts_with_one_block_committed(cache):
    assert cache.num_blocks == 1
    assert cache.committed_bytes == NUM_SEGMENTS * BLOCK_BYTES


def test_reserves_whole_blocks_for_max_model_len(cache):
    assert cache.reserved_bytes == NUM_SEGMENTS * 7 * BLOCK_BYTES  # 100 tokens are 7 blocks


def test_grows_only_when_a_block_is_full(cache):
    committed = []
    for _ in range(33):
        fill(cache, 1, 1)
        committed.append(cache.committed_bytes // (NUM_SEGMENTS * BLOCK_BYTES))
    assert committed == [1] * 16 + [2] * 16 + [3]


def test_base_address_stays_when_the_cache_grows(cache):
    before = cache.base_ptr
    fill(cache, 100, 1)
    assert cache.num_blocks == 7
    assert cache.base_ptr == before
    assert cache.keys_values(0)[0].data_ptr() == before


def test_growth_keeps_existing_values(cache):
    for value in range(10):
        fill(cache, 7, value)
    expected = torch.arange(10.0).repeat_interleave(7)
    for layer_id in range(CONFIG.num_layers):
        keys, values = cache.keys_values(layer_id)
        assert keys.shape == values.shape == (70, 16, 64)
        assert torch.equal(keys[:, 3, 5], expected + layer_id)
        assert torch.equal(values[:, 15, 63], -expected - layer_id)


@pytest.mark.parametrize("block_size", [1, 5, 16, 100, 128])
def test_any_block_size_holds_max_model_len(block_size):
    with GrowingKVCache(
        CONFIG, max_model_len=99, dtype=torch.float32, block_size=block_size
    ) as cache:
        fill(cache, 99, 4)
        assert torch.equal(cache.keys_values(1)[0], torch.full((99, 16, 64), 5.0))


def test_full_cache_refuses_another_token_with_the_numbers(cache):
    fill(cache, 100, 1)
    message = "cannot hold 101 tokens, 100 cached and 1 new: max_model_len is 100"
    with pytest.raises(extkv.errors.CapacityError, match=message):
        cache.extend(1)
    assert cache.num_tokens == 100


@pytest.mark.parametrize("num_new_tokens", [0, -3])
def test_rejects_extending_by_no_tokens(cache, num_new_tokens):
    with pytest.raises(extkv.errors.InvalidArgumentError, match=f"is {num_new_tokens}, expected"):
        cache.extend(num_new_tokens)


@pytest.mark.parametrize("max_model_len", [0, 101])
def test_rejects_max_model_len_out_of_range(max_model_len):
    message = f"max_model_len is {max_model_len}, expected 1 to the model's context length 100"
    with pytest.raises(extkv.errors.InvalidArgumentError, match=message):
        GrowingKVCache(CONFIG, max_model_len=max_model_len, dtype=torch.float32)


def test_rejects_block_size_zero():
    with pytest.raises(extkv.errors.InvalidArgumentError, match="block_size is 0"):
        GrowingKVCache(CONFIG, max_model_len=8, dtype=torch.float32, block_size=0)


def test_rejects_keys_of_another_number_of_tokens(cache):
    cache.extend(2)
    rows = torch.zeros(3, 16, 64)
    with pytest.raises(extkv.errors.InvalidArgumentError, match="keys of 3 and values of 3"):
        cache.append(0, rows, rows)


def test_closed_cache_refuses_use(cache):
    cache.close()
    with pytest.raises(extkv.errors.FreedError):
        cache.extend(1)
    with pytest.raises(extkv.errors.FreedError):
        cache.keys_values(0)


def test_closing_twice_is_allowed(cache):
    cache.close()
    cache.close()


def test_out_of_memory_leaves_the_cache_as_it_was(cache, small_host):
    fill(cache, 10, 3)
    before = cache.committed_bytes
    small_host(before)
    with pytest.raises(extkv.OutOfMemoryError) as caught:
        cache.extend(7)
    assert caught.value.requested > caught.value.available
    assert (cache.num_tokens, cache.num_blocks, cache.committed_bytes) == (10, 1, before)
    assert torch.equal(cache.keys_values(0)[0], torch.full((10, 16, 64), 3.0))
    small_host(None)
    fill(cache, 7, 4)
    assert cache.num_tokens == 17


def test_out_of_memory_ends_a_stream_with_the_typed_error(tiny_model, small_host):
    config = dataclasses.replace(tiny_model.config, context_length=5000)
    with GrowingKVCache(config, max_model_len=5000, dtype=torch.float32) as cache:
        small_host(cache.committed_bytes)
        stream = stream_token_ids(tiny_model, cache, [1] * 4000, max_tokens=1)
        with pytest.raises(extkv.OutOfMemoryError):
            list(stream)
