"""Paged attention of mixed batches: kernel and twin against the formula, with poisoned caches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from attention_cases import (
    LAYOUTS,
    PagedCase,
    assert_matches,
    committed_edge_case,
    explicit_attention,
    far_case,
    make_case,
)
from extkv.errors import InvalidArgumentError
from extkv.kernels import paged_attention as kernel
from extkv.reference import paged_attention as reference
from placement import with_strides

if TYPE_CHECKING:
    from collections.abc import Callable

MIXED = [(1, 19), (3, 3), (21, 45), (1, 1), (0, 0), (2, 0), (1, 64)]
BOTH = pytest.mark.parametrize(
    "attend",
    [kernel.paged_attention, reference.paged_attention],
    ids=["kernel", "reference"],
)


def check(case: PagedCase, attend: Callable[..., torch.Tensor], **options: object) -> None:
    """Compare one call with the formula."""
    found = attend(**case.arguments, **options)
    assert_matches(found, explicit_attention(case, **options))


@BOTH
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 40], ids="window={}".format)
def test_mixed_batch_equals_the_formula(
    sliding_window: int | None,
    is_causal: bool,
    attend: Callable[..., torch.Tensor],
    device: torch.device,
):
    case = make_case(MIXED, device=device, num_padded_tokens=3)
    check(case, attend, is_causal=is_causal, sliding_window=sliding_window)


@BOTH
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 16), (64, 64), (80, 32), (96, 16), (128, 256), (256, 16)]
)
def test_every_head_dim_and_block_size(
    head_dim: int, block_size: int, attend: Callable[..., torch.Tensor], device: torch.device
):
    case = make_case([(5, 37), (1, 70)], device=device, head_dim=head_dim, block_size=block_size)
    check(case, attend)


@BOTH
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (6, 2), (5, 5), (40, 1)], ids=str)
def test_every_number_of_heads_per_kv_head(
    heads: tuple[int, int], attend: Callable[..., torch.Tensor], device: torch.device
):
    lengths = [(4, 20), (1, 33)]
    case = make_case(lengths, device=device, num_heads=heads[0], num_kv_heads=heads[1])
    check(case, attend)


@BOTH
def test_half_precision_equals_the_formula(
    attend: Callable[..., torch.Tensor], device: torch.device
):
    check(make_case(MIXED, device=device, dtype=torch.float16), attend)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b88_strides_come_from_the_cache(
    layout: str, attend: Callable[..., torch.Tensor], device: torch.device
):
    check(make_case([(5, 37), (1, 20)], device=device, layout=layout), attend)


@BOTH
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf], ids=str)
def test_b96_slots_past_the_length_are_not_seen(
    fill: float, is_causal: bool, attend: Callable[..., torch.Tensor], device: torch.device
):
    for dtype in (torch.float32, torch.float16):
        case = make_case([(1, 19)], device=device, dtype=dtype, fill=fill)
        check(case, attend, is_causal=is_causal)


@BOTH
def test_b86_recycled_block_with_nan_words(
    attend: Callable[..., torch.Tensor], device: torch.device
):
    words = torch.tensor([0x7FC07FC0], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.float16):
        clean = make_case([(1, 5)], device=device, dtype=dtype)
        case = make_case([(1, 5)], device=device, dtype=dtype)
        block = int(case.block_table[0, 0])
        for cache, source in (
            (case.key_cache, clean.key_cache),
            (case.value_cache, clean.value_cache),
        ):
            cache[block] = words.view(dtype)[0]
            cache[block, :5] = source[block, :5]
        check(case, attend)


@BOTH
def test_accepts_no_sequences_and_no_tokens(
    attend: Callable[..., torch.Tensor], device: torch.device
):
    case = make_case([], device=device, num_padded_tokens=0)
    assert attend(**case.arguments).shape == (0, 4, 64)
    check(make_case([], device=device, num_padded_tokens=5), attend)
    check(make_case([(0, 0), (0, 7)], device=device), attend)


@BOTH
def test_takes_packed_queries_and_strided_outputs(
    attend: Callable[..., torch.Tensor], device: torch.device
):
    case = make_case([(3, 20), (1, 40)], device=device)
    packed = torch.full((4, 4 * 64 + 2 * 128), torch.nan, device=device)
    packed[:, :256] = case.query.flatten(1)
    out = torch.full((4, 6, 64), torch.nan, device=device)[:, 1:5]
    strided = dataclasses.replace(
        case,
        query=packed[:, :256].unflatten(1, (4, 64)),
        block_table=torch.cat([case.block_table, case.block_table], dim=1)[:, :5],
    )
    assert attend(**strided.arguments, out=out) is out
    assert_matches(out, explicit_attention(case))


UNMAPPED = """
    import os
    os.environ["TRITON_INTERPRET"] = "1"
    import extkv, torch
    from extkv.kernels.decode_attention import decode_attention
    from extkv.kernels.paged_attention import paged_attention
    from extkv.reference import paged_attention as reference

    # A block of 256 tokens is 128 KiB; 64 KiB of the first one are committed: 128 tokens.
    shape = (64, 256, 2, 64)
    views = []
    for _ in range(2):
        memory = extkv.ExtensibleTensor(64 * 131072, "cpu", growth="exact", granularity=65536)
        memory.resize_(65536)
        views.append(memory.full_view().view(torch.float32).view(shape))
    for seq_len in (128, 117):
        for view in views:
            view[0, :128] = torch.nan
            view[0, :seq_len] = torch.randn(seq_len, 2, 64)
        arguments = dict(
            query=torch.randn(3, 4, 64),
            key_cache=views[0],
            value_cache=views[1],
            query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_table=torch.tensor([[0, 2**30]], dtype=torch.int32),
            scale=0.125,
        )
        for is_causal in (True, False):
            expected = reference.paged_attention(**arguments, is_causal=is_causal)
            found = paged_attention(**arguments, is_causal=is_causal)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            found = decode_attention(**arguments, is_causal=is_causal, max_query_len=3)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    print("no fault")
"""


def test_reads_no_memory_that_is_not_committed(
    run_python: Callable[[str], object], device: torch.device
):
    if device.type == "cuda":
        pytest.skip("runs in the interpreter; the GPU has a test of its own")
    done = run_python(UNMAPPED)
    assert "no fault" in done.stdout, (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 64, dtype=torch.float64)}, "float64"),
        ({"query": torch.zeros(2, 3, 64)}, "multiple of num_kv_heads, got 3 and 2"),
        ({"query": torch.zeros(2, 4, 128)[..., ::2]}, "stride 1 in its last dimension"),
        ({"query": torch.zeros(2, 4, 32)}, "any, any, any, 32"),
        ({"key_cache": torch.zeros(3, 16, 2, 64, dtype=torch.float16)}, "key_cache must be"),
        ({"value_cache": torch.zeros(3, 16, 2, 65)}, "value_cache must have shape"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be torch.int32"),
        ({"seq_lens": torch.zeros((), dtype=torch.int32)}, "seq_lens must have shape"),
        (
            {"key_cache": torch.zeros(3, 0, 2, 64), "value_cache": torch.zeros(3, 0, 2, 64)},
            "block_size must be at least 1, got 0",
        ),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"shape \[3\], got \[2\]"),
        ({"block_table": torch.zeros(1, 4, dtype=torch.int32)}, r"shape \[2, any\]"),
        ({"sliding_window": 0}, "at least 1, got 0"),
        ({"out": torch.zeros(2, 4, 64, dtype=torch.float16)}, "out must be"),
        ({"out": torch.zeros(3, 4, 64)}, "2, 4, 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, object], message: str, device: torch.device
):
    case = make_case([(1, 5), (1, 9)], device=device)
    moved = {
        k: with_strides(v, device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()
    }
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.paged_attention(**{**case.arguments, **moved})


def test_rejects_head_dim_above_256(device: torch.device):
    case = make_case([(1, 5)], device=device, head_dim=257)
    with pytest.raises(InvalidArgumentError, match=r"256\], got 257"):
        kernel.paged_attention(**case.arguments)


GPU_LENGTHS = [(1, 19), (130, 333), (1, 1), (77, 77), (0, 0), (3, 0), (1, 1023), (16, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_bfloat16_equals_the_formula(head_dim: int, block_size: int, device: torch.device):
    case = make_case(
        GPU_LENGTHS,
        device=device,
        num_heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        num_padded_tokens=9,
    )
    check(case, kernel.paged_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_gpu_other_dtypes_equal_the_formula(
    head_dim: int, dtype: torch.dtype, device: torch.device
):
    case = make_case(GPU_LENGTHS, device=device, num_heads=6, head_dim=head_dim, dtype=dtype)
    check(case, kernel.paged_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 1, 100], ids="window={}".format)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_gpu_masks_equal_the_formula(
    is_causal: bool, sliding_window: int | None, device: torch.device
):
    case = make_case(GPU_LENGTHS, device=device, head_dim=128, dtype=torch.bfloat16)
    check(case, kernel.paged_attention, is_causal=is_causal, sliding_window=sliding_window)


@pytest.mark.gpu
def test_gpu_offsets_past_two_to_the_31_elements(device: torch.device):
    case = far_case(device, seq_len=1500, query_len=77)
    assert int(case.block_table.max()) * 16 * 8 * 128 > 2**31
    check(case, kernel.paged_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [1024, 1023, 769])
def test_gpu_reads_nothing_past_committed_memory(seq_len: int, device: torch.device):
    case = committed_edge_case(device, seq_len, query_len=200)
    check(case, kernel.paged_attention)
    check(case, kernel.paged_attention, is_causal=False)
