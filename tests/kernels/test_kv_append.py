"""KV append: every layout, every dtype, skipped tokens, far slots."""

from __future__ import annotations

import extkv
import pytest
import torch
from attention_cases import LAYOUTS, cache_pair
from extkv.errors import InvalidArgumentError
from extkv.kernels.kv_append import kv_append
from extkv.reference import kv_append as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns, so that NaN equals itself."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def new_tokens(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values."""
    generator = torch.Generator().manual_seed(num_tokens)
    numbers = torch.randn((2, num_tokens, num_heads, head_dim), generator=generator)
    keys, values = numbers.to(device, dtype)
    return keys, values


def check_against_reference(
    shape: tuple[int, int, int, int],
    slots: list[int],
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "split",
) -> None:
    """Append to a poisoned cache with both and compare all bits, untouched ones included."""
    keys, values = new_tokens(len(slots), shape[2], shape[3], dtype, device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    found = cache_pair(layout, shape, dtype, device)
    expected = cache_pair(layout, shape, dtype, device)
    kv_append(keys, values, *found, slot_mapping)
    reference.kv_append(keys, values, *expected, slot_mapping)
    for have, want in zip(found, expected, strict=True):
        assert torch.equal(bits(have), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_the_named_slots_and_no_other(dtype: torch.dtype, device: torch.device):
    check_against_reference((5, 16, 3, 80), [0, 79, 17, 16, 15, 33, 2], dtype, device)


def test_skips_negative_slots(device: torch.device):
    check_against_reference((2, 16, 2, 64), [-1, 5, -(2**62), 31], torch.float32, device)


def test_accepts_no_tokens(device: torch.device):
    check_against_reference((2, 16, 2, 64), [], torch.float32, device)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 7, 5, 33), (2, 4, 1, 576)], ids=str)
def test_accepts_odd_sizes(shape: tuple[int, int, int, int], device: torch.device):
    check_against_reference(shape, [shape[0] * shape[1] - 1], torch.float16, device)


def test_accepts_more_heads_than_one_tile(device: torch.device):
    check_against_reference((2, 2, 70, 128), [3, 0], torch.float16, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b88_every_layout_holds_the_same_tokens(layout: str, device: torch.device):
    shape = (4, 16, 3, 64)
    slots = [63, 0, 16, 47, 48, 5]
    keys, values = new_tokens(len(slots), 3, 64, torch.float16, device)
    key_cache, value_cache = cache_pair(layout, shape, torch.float16, device, fill=0.0)
    kv_append(keys, values, key_cache, value_cache, torch.tensor(slots, device=device))
    for cache, tokens in ((key_cache, keys), (value_cache, values)):
        gathered = cache.reshape(64, 3, 64)
        assert torch.equal(gathered[slots], tokens)
        assert int(gathered.count_nonzero()) == int(tokens.count_nonzero())


def test_takes_strided_inputs(device: torch.device):
    packed = torch.randn(5, 3 * 64 * 3, device=device)  # query, key and value of three heads each
    keys, values = packed[:, 192:384].view(5, 3, 64), packed[:, 384:].view(5, 3, 64)
    slots = torch.tensor([[9, 1], [2, 1], [-1, 1], [30, 1], [0, 1]], device=device)[:, 0]
    found = cache_pair("interleaved", (2, 16, 3, 64), torch.float32, device, fill=0.0)
    expected = cache_pair("interleaved", (2, 16, 3, 64), torch.float32, device, fill=0.0)
    kv_append(keys, values, *found, slots)
    reference.kv_append(keys.contiguous(), values.contiguous(), *expected, slots.contiguous())
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def check_far_slots(device: torch.device) -> None:
    """Round trip of B99's slots; segments of 7,767 blocks keep what is committed small."""
    block_size, head_dim, blocks_per_segment, num_segments = 480, 576, 7767, 2
    block_bytes = block_size * head_dim * 2
    committed = 4_000_000 // block_size + 1 - blocks_per_segment
    views = []
    for _ in range(2):
        memory = extkv.ExtensibleTensor(
            blocks_per_segment * block_bytes * num_segments, device, num_segments
        )
        memory.resize_per_segment_(committed * block_bytes)
        shape = (blocks_per_segment * num_segments, block_size, 1, head_dim)
        views.append(memory.full_view().view(torch.bfloat16).view(shape))
    slots = [0, 3_728_270, 3_728_271, 7767 * block_size, 7768 * block_size, 4_000_000]
    assert slots[2] * head_dim > 2**31
    keys, values = new_tokens(len(slots), 1, head_dim, torch.bfloat16, device)
    kv_append(keys, values, *views, torch.tensor(slots, device=device))
    for cache, tokens in zip(views, (keys, values), strict=True):
        for slot, token in zip(slots, tokens, strict=True):
            assert torch.equal(cache[slot // block_size, slot % block_size], token)


def test_b99_round_trip_past_two_to_the_31_elements(device: torch.device):
    check_far_slots(device)


def replaced(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return valid arguments with one replaced."""
    cache = torch.zeros(2, 16, 2, 64, device=value.device)
    arguments = {
        "key": torch.zeros(3, 2, 64, device=value.device),
        "value": torch.zeros(3, 2, 64, device=value.device),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.zeros(3, dtype=torch.int64, device=value.device),
    }
    return arguments | {name: value}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("key", torch.zeros(3, 2, 64, dtype=torch.float64), "float64"),
        ("key", torch.zeros(3, 128), "3, 128"),
        ("value", torch.zeros(3, 2, 64, dtype=torch.float16), "value must be torch.float32"),
        ("value", torch.zeros(4, 2, 64), "3, 2, 64"),
        ("key_cache", torch.zeros(2, 16, 2, 65), "2, 64"),
        ("value_cache", torch.zeros(3, 16, 2, 64), "2, 16, 2, 64"),
        ("slot_mapping", torch.zeros(3, dtype=torch.int32), "int64"),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64), r"\[3\], got \[2\]"),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64, device="meta"), "meta"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value),
)
def test_rejects_arguments_that_do_not_fit(
    name: str, value: torch.Tensor, message: str, device: torch.device
):
    if value.device.type == "cpu":
        value = value.to(device)
    arguments = replaced(name, value)
    if value.device.type == "meta":
        arguments = replaced("key", torch.zeros(3, 2, 64, device=device)) | {name: value}
    with pytest.raises(InvalidArgumentError, match=message):
        kv_append(**arguments)


def test_rejects_cpu_tensors_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidArgumentError, match="got cpu"):
        kv_append(**replaced("key", torch.zeros(3, 2, 64)))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_writes_every_shape(head_dim: int, block_size: int, device: torch.device):
    generator = torch.Generator().manual_seed(block_size)
    slots = torch.randperm(9 * block_size, generator=generator)[: 4 * block_size + 3].tolist()
    for layout in ("split", "interleaved", "heads_first"):
        shape = (9, block_size, 8, head_dim)
        check_against_reference(shape, slots, torch.bfloat16, device, layout)
