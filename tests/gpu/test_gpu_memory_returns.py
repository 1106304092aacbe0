"""Physical memory goes back to the driver, and a growth that does not fit changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import extkv
import pytest
import torch
from extkv import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[Callable[[], object]], None]

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20
GIB = 2**30
TOLERANCE = 2 * MIB
# Mapping may also take or give back memory for page tables.
PAGE_TABLE_TOLERANCE = 8 * MIB


def test_free_returns_all_memory(assert_returns_memory: Check) -> None:
    """Free memory is as before once a tensor of several segments is freed."""

    def use() -> None:
        tensor = extkv.ExtensibleTensor(768 * MIB, DEVICE, 3)
        tensor.resize_per_segment_(255 * MIB + 1)
        tensor.segment(2).fill_(1)
        tensor.free()

    assert_returns_memory(use)


def test_dropping_the_object_returns_all_memory(assert_returns_memory: Check) -> None:
    """A tensor that nobody freed gives its memory back when it is collected."""

    def use() -> None:
        tensor = extkv.ExtensibleTensor(256 * MIB, DEVICE)
        tensor.resize_(200 * MIB).fill_(1)

    assert_returns_memory(use)


def test_sixty_four_tensors_return_all_memory(assert_returns_memory: Check) -> None:
    """Create, commit and close 64 tensors of 64 MiB (B66); one lives at a time."""

    def use() -> None:
        for _ in range(64):
            with extkv.ExtensibleTensor(64 * MIB, DEVICE) as tensor:
                tensor.resize_(64 * MIB).fill_(1)

    assert_returns_memory(use)


def test_shrink_returns_what_it_says(free_bytes: Callable[[], int]) -> None:
    """The driver's free memory rises by what shrink reports, and the kept bytes stay."""
    with extkv.ExtensibleTensor(512 * MIB, DEVICE, 2, max_chunk_bytes=32 * MIB) as tensor:
        tensor.resize_per_segment_(256 * MIB)
        for segment in range(2):
            tensor.segment(segment).fill_(segment + 1)
        before = free_bytes()
        physical = tensor.physical_bytes
        returned = tensor.shrink_per_segment_(64 * MIB)
        assert returned == physical - tensor.physical_bytes == 384 * MIB
        assert abs(free_bytes() - before - returned) <= PAGE_TABLE_TOLERANCE
        for segment in range(2):
            assert bool((tensor.segment(segment) == segment + 1).all())


def test_shrink_and_grow_again_many_times(assert_returns_memory: Check) -> None:
    """Twenty shrinks and growths leave the size usable and no memory behind."""

    def use() -> None:
        with extkv.ExtensibleTensor(128 * MIB, DEVICE) as tensor:
            for round_index in range(20):
                tensor.resize_per_segment_(128 * MIB)
                tensor.segment(0)[-1:].fill_(round_index)
                tensor.shrink_per_segment_(round_index * MIB)
                assert tensor.bytes_per_segment == round_index * MIB

    assert_returns_memory(use)


def test_shrink_waits_for_the_given_streams() -> None:
    """Work queued on a given stream has passed when shrink returns."""
    side = torch.cuda.Stream(DEVICE)
    with extkv.ExtensibleTensor(64 * MIB, DEVICE) as tensor:
        view = tensor.resize_(64 * MIB)
        view.fill_(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            view.add_(3)
            done = side.record_event()
        del view
        tensor.shrink_per_segment_(2 * MIB, streams=[side])
        assert done.query()
        assert bool((tensor.tensor == 3).all())


def test_shrink_waits_for_the_device_without_streams() -> None:
    """With no stream given, all work of the device has passed when shrink returns."""
    side = torch.cuda.Stream(DEVICE)
    with extkv.ExtensibleTensor(64 * MIB, DEVICE) as tensor:
        tensor.resize_(64 * MIB).fill_(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            tensor.tensor.add_(5)
            done = side.record_event()
        tensor.shrink_per_segment_(2 * MIB)
        assert done.query()
        assert bool((tensor.tensor == 5).all())


def test_growth_together_that_does_not_fit_is_undone(free_bytes: Callable[[], int]) -> None:
    """Three tensors ask for more than is free: typed error, no change; less works (B64)."""
    total = extkv.memory_info(DEVICE).total // (2 * MIB) * (2 * MIB)
    tensors = [extkv.ExtensibleTensor(total, DEVICE) for _ in range(3)]
    for value, tensor in enumerate(tensors, start=1):
        tensor.resize_(16 * MIB).fill_(value)
    share = free_bytes() // 2 // MIB * MIB
    # The first refusal may leave lasting driver allocations; the second must leave nothing.
    with pytest.raises(errors.OutOfMemoryError):
        extkv.resize_together(tensors, [share] * 3)
    before = free_bytes()
    with pytest.raises(errors.OutOfMemoryError) as caught:
        extkv.resize_together(tensors, [share] * 3)
    requested, available = caught.value.requested, caught.value.available
    assert requested is not None
    assert available is not None
    assert requested > available > 0
    assert abs(free_bytes() - before) <= TOLERANCE
    assert [tensor.num_bytes for tensor in tensors] == [16 * MIB] * 3
    extkv.resize_together(tensors, [64 * MIB] * 3, zero_new=True)
    for value, tensor in enumerate(tensors, start=1):
        assert bool((tensor.tensor[: 16 * MIB] == value).all())
        assert not bool(tensor.tensor[16 * MIB :].any())
        tensor.free(strict=True)


def test_single_growth_that_does_not_fit_is_undone(free_bytes: Callable[[], int]) -> None:
    """One tensor of two segments asks for more than is free: typed error, nothing changed."""
    total = extkv.memory_info(DEVICE).total // (2 * MIB) * (2 * MIB)
    with extkv.ExtensibleTensor(2 * total, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(16 * MIB)
        share = free_bytes() // MIB * MIB
        # The first refusal may leave lasting driver allocations; the second must leave nothing.
        with pytest.raises(MemoryError):
            tensor.resize_per_segment_(share)
        before = free_bytes()
        with pytest.raises(errors.OutOfMemoryError):
            tensor.resize_per_segment_(share)
        assert abs(free_bytes() - before) <= TOLERANCE
        assert tensor.bytes_per_segment == 16 * MIB
        tensor.resize_per_segment_(32 * MIB)
        tensor.segment(1).fill_(1)


def test_memory_info_is_the_drivers(free_bytes: Callable[[], int]) -> None:
    """The free and total memory are those torch reads."""
    free = free_bytes()
    info = extkv.memory_info(DEVICE)
    assert abs(info.free - free) <= TOLERANCE
    assert info.total == torch.cuda.mem_get_info(0)[1]


def test_commit_shows_in_free_memory(free_bytes: Callable[[], int]) -> None:
    """Reserving takes no device memory; committing takes the physical bytes."""
    before = free_bytes()
    with extkv.ExtensibleTensor(1024 * GIB, DEVICE) as tensor:
        assert abs(before - free_bytes()) <= PAGE_TABLE_TOLERANCE
        tensor.resize_per_segment_(300 * MIB)
        taken = before - free_bytes()
        assert abs(taken - tensor.physical_bytes) <= PAGE_TABLE_TOLERANCE
