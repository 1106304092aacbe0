"""Zeroing of grown bytes: exactly the new ones, also on recycled memory, before any later use."""

from __future__ import annotations

import extkv
import pytest
import torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
KIB = 2**10
MIB = 2**20
POISON = 0xAB


def is_all(view: torch.Tensor, value: int) -> bool:
    """Return whether each byte of the view has the value."""
    return bool((view == value).all())


def test_zeroing_touches_only_new_logical_bytes() -> None:
    """Of two segments of 3 MiB, from 1 to 2 MiB each, [1, 2) and [4, 5) MiB are zeroed (B74)."""
    with extkv.ExtensibleTensor(6 * MIB, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(MIB)
        # Granules 0 and 1 are backed, so the first 4 MiB can be written through the full view.
        full = tensor.full_view()
        full[: 4 * MIB].fill_(POISON)
        # Zeroing is not ordered after writes to bytes that are not committed yet.
        torch.cuda.synchronize()
        tensor.resize_per_segment_(2 * MIB, zero_new=True)
        values = [full[i * MIB : (i + 1) * MIB] for i in range(6)]
        assert is_all(values[0], POISON)
        assert is_all(values[1], 0)
        assert is_all(values[2], POISON)
        assert is_all(values[3], POISON)
        assert is_all(values[4], 0)
        tensor.resize_per_segment_(3 * MIB, zero_new=True)
        assert is_all(values[2], 0)
        assert is_all(values[5], 0)
        assert is_all(values[0], POISON)
        assert is_all(values[3], POISON)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (3, 5 * MIB + 7), (2 * MIB, 2 * MIB + 1)])
def test_zeroing_of_unaligned_ranges(old: int, new: int) -> None:
    """Old bytes stay and each new byte reads zero, whatever the alignment."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
        tensor.resize_(8 * MIB).fill_(POISON)
        tensor.shrink_per_segment_(old)
        tensor.resize_per_segment_(new, zero_new=True)
        assert is_all(tensor.tensor[:old], POISON)
        assert is_all(tensor.tensor[old:], 0)


@pytest.mark.parametrize("kept", [0, 1, 1 * MIB, 9 * MIB], ids=lambda n: f"kept{n}")
@pytest.mark.parametrize("chunk", [2 * MIB, 256 * MIB], ids=["granule-chunks", "one-chunk"])
def test_recycled_memory_reads_zero(kept: int, chunk: int) -> None:
    """Memory that held 0xAB, given back or kept by a shrink, reads zero after a zeroed growth."""
    size = 32 * MIB + 12_345
    with extkv.ExtensibleTensor(64 * MIB, DEVICE, max_chunk_bytes=chunk) as tensor:
        tensor.resize_(size).fill_(POISON)
        tensor.shrink_per_segment_(kept)
        tensor.resize_per_segment_(size, zero_new=True)
        assert is_all(tensor.tensor[:kept], POISON)
        assert is_all(tensor.tensor[kept:], 0)


def test_zeroing_in_each_segment() -> None:
    """Each of five segments keeps its old bytes and has zeros after them."""
    with extkv.ExtensibleTensor(5 * 3 * MIB, DEVICE, 5) as tensor:
        tensor.resize_per_segment_(3 * MIB)
        for segment in range(5):
            tensor.segment(segment).fill_(segment + 1)
        tensor.shrink_per_segment_(MIB + 1)
        tensor.resize_per_segment_(2 * MIB + 2, zero_new=True)
        for segment in range(5):
            assert is_all(tensor.segment(segment)[: MIB + 1], segment + 1)
            assert is_all(tensor.segment(segment)[MIB + 1 :], 0)


@pytest.mark.parametrize("is_recycled", [False, True], ids=["new-memory", "recycled-memory"])
def test_write_on_another_stream_right_after_growth(*, is_recycled: bool) -> None:
    """A thousand zeroed growths, written at once on a non-blocking stream, lose no write (B71)."""
    step, num_steps = 256 * KIB, 1000
    side = torch.cuda.Stream(DEVICE)
    with extkv.ExtensibleTensor(step * num_steps, DEVICE) as tensor:
        if is_recycled:
            tensor.resize_(step * num_steps).fill_(POISON)
            # One byte keeps the whole chunk, with its old contents.
            tensor.shrink_per_segment_(1)
        full = tensor.full_view()
        for i in range(num_steps):
            tensor.resize_per_segment_((i + 1) * step, zero_new=True)
            with torch.cuda.stream(side):
                full[i * step : i * step + step // 2].fill_(i % 251 + 1)
        side.synchronize()
        grid = full.view(num_steps, step)
        values = (torch.arange(num_steps, device=DEVICE) % 251 + 1).to(torch.uint8)
        assert bool((grid[:, : step // 2] == values[:, None]).all())
        assert is_all(grid[:, step // 2 :], 0)


def test_growth_inside_a_stream_context_is_ordered() -> None:
    """A growth called on a side stream is zeroed before that stream's next kernel."""
    side = torch.cuda.Stream(DEVICE)
    with extkv.ExtensibleTensor(32 * MIB, DEVICE) as tensor:
        tensor.resize_(32 * MIB).fill_(POISON)
        tensor.shrink_per_segment_(1)
        with torch.cuda.stream(side):
            tensor.resize_per_segment_(32 * MIB, zero_new=True)
            total = tensor.tensor[1:].sum(dtype=torch.int64)
        side.synchronize()
        assert total.item() == 0
