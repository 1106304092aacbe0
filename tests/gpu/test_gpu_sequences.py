"""Random growths, shrinks and writes on CUDA against a plain list of byte arrays."""

from __future__ import annotations

import dataclasses

import extkv
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20
GRANULE = 2 * MIB
MAX_TOTAL_BYTES = 64 * MIB


@dataclasses.dataclass(frozen=True)
class Step:
    """Set the size to a fraction of the capacity, then write a byte value over a fraction of it."""

    size_ppm: int
    write_start_ppm: int
    write_end_ppm: int
    value: int
    zero_new: bool


STEPS = st.builds(
    Step,
    size_ppm=st.integers(0, 1_000_000),
    write_start_ppm=st.integers(0, 1_000_000),
    write_end_ppm=st.integers(0, 1_000_000),
    value=st.integers(1, 255),
    zero_new=st.booleans(),
)


class Model:
    """What each segment must hold, as uint8 tensors on the host."""

    def __init__(self, num_segments: int) -> None:
        """Start with empty segments."""
        self.segments = [torch.empty(0, dtype=torch.uint8) for _ in range(num_segments)]

    def resize(self, num_bytes: int) -> None:
        """Cut, or add zeros."""
        for index, old in enumerate(self.segments):
            new = torch.zeros(num_bytes, dtype=torch.uint8)
            kept = min(num_bytes, old.numel())
            new[:kept] = old[:kept]
            self.segments[index] = new


def num_covered_granules(capacity: int, num_segments: int, num_bytes: int) -> int:
    """Return how many granules the committed prefixes touch."""
    granules: set[int] = set()
    for segment in range(num_segments):
        start = segment * capacity
        granules.update(range(start // GRANULE, -(-(start + num_bytes) // GRANULE)))
    return len(granules) if num_bytes else 0


def apply_step(tensor: extkv.ExtensibleTensor, model: Model, step: Step) -> None:
    """Do one step on both."""
    old = tensor.bytes_per_segment
    new = tensor.segment_capacity_bytes * step.size_ppm // 1_000_000
    if new < old:
        tensor.shrink_per_segment_(new)
    else:
        tensor.resize_per_segment_(new, zero_new=step.zero_new)
        if not step.zero_new:
            # Bytes grown without zeroing are unspecified: give them a value.
            for index in range(tensor.num_segments):
                tensor.segment(index)[old:].zero_()
    model.resize(new)
    start, end = sorted(
        new * ppm // 1_000_000 for ppm in (step.write_start_ppm, step.write_end_ppm)
    )
    for index in range(tensor.num_segments):
        value = (step.value + index) % 256
        tensor.segment(index)[start:end].fill_(value)
        model.segments[index][start:end] = value


def check(tensor: extkv.ExtensibleTensor, model: Model, *, is_exact: bool) -> None:
    """Compare every byte, and the physical size with the granules that the prefixes cover."""
    num_bytes = model.segments[0].numel()
    assert tensor.bytes_per_segment == num_bytes
    for index, expected in enumerate(model.segments):
        assert torch.equal(tensor.segment(index).cpu(), expected)
    covered = num_covered_granules(tensor.segment_capacity_bytes, tensor.num_segments, num_bytes)
    if is_exact:
        assert tensor.physical_bytes == covered * GRANULE
    assert tensor.physical_bytes >= covered * GRANULE
    stats = tensor.stats()
    assert stats.committed_bytes == tensor.physical_bytes
    assert stats.rounding_bytes == stats.committed_bytes - stats.logical_bytes


@pytest.mark.parametrize("is_exact", [True, False], ids=["granule-chunks", "default-chunks"])
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    num_segments=st.sampled_from([1, 2, 3, 5]),
    capacity_bytes=st.sampled_from([GRANULE, 3 * MIB, 5 * MIB + 4096, 12 * MIB]),
    steps=st.lists(STEPS, min_size=1, max_size=8),
)
def test_any_sequence_matches_the_model(
    *, is_exact: bool, num_segments: int, capacity_bytes: int, steps: list[Step]
) -> None:
    """After each step all bytes and sizes are those of the model."""
    total = num_segments * capacity_bytes
    assert total <= MAX_TOTAL_BYTES
    chunk = GRANULE if is_exact else None
    with extkv.ExtensibleTensor(
        total,
        DEVICE,
        num_segments,
        max_chunk_bytes=chunk,
        growth="exact" if is_exact else "geometric",
    ) as tensor:
        model = Model(num_segments)
        for step in steps:
            apply_step(tensor, model, step)
            check(tensor, model, is_exact=is_exact)
