"""Growth of a CUDA tensor: data and address stay, granules are mapped once, sizes are exact."""

from __future__ import annotations

import extkv
import pytest
import torch
from extkv import errors

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
KIB = 2**10
MIB = 2**20
GIB = 2**30
GRANULE = 2 * MIB


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    """Return random uint8 bytes on the device."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE, generator=generator
    )


def calls(tensor: extkv.ExtensibleTensor, name: str) -> int:
    """Return how often the tensor's driver made a call."""
    stats = tensor.stats().driver_calls.get(name)
    return 0 if stats is None else stats.count


def num_covered_granules(capacity: int, num_segments: int, num_bytes: int) -> int:
    """Return how many granules the committed prefixes touch."""
    granules: set[int] = set()
    for segment in range(num_segments):
        start = segment * capacity
        granules.update(range(start // GRANULE, -(-(start + num_bytes) // GRANULE)))
    return len(granules)


def test_growth_keeps_data_and_base_pointer() -> None:
    """Earlier bytes and the address survive growth across granules."""
    with extkv.ExtensibleTensor(64 * MIB, DEVICE) as tensor:
        first = 5 * MIB + 3
        base_ptr = tensor.base_ptr
        expected = pattern(first, seed=1)
        tensor.resize_(first).copy_(expected)
        for num_bytes in (first + 1, 20 * MIB, 64 * MIB):
            grown = tensor.resize_(num_bytes)
            assert grown.numel() == tensor.num_bytes == num_bytes
            assert grown.data_ptr() == tensor.base_ptr == base_ptr
            assert torch.equal(grown[:first], expected)
            del grown


def test_grown_bytes_can_be_written_to_the_last() -> None:
    """The first and last byte of each growth are usable by a kernel."""
    with extkv.ExtensibleTensor(32 * MIB, DEVICE) as tensor:
        for num_bytes in (1, GRANULE, GRANULE + 1, 7 * MIB - 1, 32 * MIB):
            tensor.resize_(num_bytes)
            tensor.tensor[-1:].fill_(num_bytes % 251)
            assert tensor.tensor[-1].item() == num_bytes % 251


def test_append_adds_to_the_size() -> None:
    """Appending grows by so many bytes."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
        tensor.append(3)
        assert tensor.append(2 * MIB).numel() == 2 * MIB + 3


@pytest.mark.parametrize("num_segments", [2, 4, 7])
def test_granule_on_a_segment_border_is_mapped_once(num_segments: int) -> None:
    """Segments of 1.5 granules share granules; each is backed once, both sides keep their bytes."""
    capacity = 3 * MIB
    with extkv.ExtensibleTensor(num_segments * capacity, DEVICE, num_segments) as tensor:
        for num_bytes in (1, MIB + 1, 2 * MIB, capacity):
            tensor.resize_per_segment_(num_bytes)
            covered = num_covered_granules(capacity, num_segments, num_bytes)
            assert tensor.physical_bytes == covered * GRANULE
            for segment in range(num_segments):
                tensor.segment(segment).fill_(segment + 1)
            for segment in range(num_segments):
                assert bool((tensor.segment(segment) == segment + 1).all())


def test_sizes_of_two_segments_of_three_mib() -> None:
    """Two segments of 3 MiB at 1, 2, 3 MiB each hold 4, 6, 6 MiB of physical memory (B74)."""
    with extkv.ExtensibleTensor(6 * MIB, DEVICE, 2) as tensor:
        physical = []
        for num_bytes in (MIB, 2 * MIB, 3 * MIB):
            tensor.resize_per_segment_(num_bytes)
            physical.append(tensor.physical_bytes)
        assert physical == [4 * MIB, 6 * MIB, 6 * MIB]
        assert tensor.capacity_bytes == 6 * MIB


def test_growth_within_a_backed_granule_maps_nothing() -> None:
    """Three million bytes take two granules; growing to their end creates no memory (B67)."""
    with extkv.ExtensibleTensor(4 * MIB, DEVICE) as tensor:
        tensor.resize_(3_000_000)
        assert (tensor.num_bytes, tensor.physical_bytes) == (3_000_000, 4_194_304)
        creates = calls(tensor, "create")
        tensor.resize_(4_194_304)
        assert calls(tensor, "create") == creates
        assert tensor.physical_bytes == 4_194_304


def test_growth_to_the_same_size_makes_no_driver_call() -> None:
    """Asking for the present size changes nothing."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(MIB)
        before = [calls(tensor, name) for name in ("create", "map", "set_access", "fill")]
        tensor.resize_per_segment_(MIB, zero_new=True)
        assert before == [calls(tensor, name) for name in ("create", "map", "set_access", "fill")]


def test_growth_never_unmaps() -> None:
    """Granules keep their physical memory for life while the tensor only grows (B77)."""
    with extkv.ExtensibleTensor(64 * MIB, DEVICE, 2) as tensor:
        for num_bytes in range(MIB, 32 * MIB, 5 * MIB):
            tensor.resize_per_segment_(num_bytes)
        assert calls(tensor, "unmap") == 0


def test_large_commit_uses_few_handles() -> None:
    """Two GiB in two segments are tens of handles, not a thousand granules."""
    with extkv.ExtensibleTensor(4 * GIB, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(GIB)
        stats = tensor.stats()
        assert stats.committed_bytes == 2 * GIB
        assert stats.num_handles <= 32
        assert calls(tensor, "create") == calls(tensor, "map") == stats.num_handles
        assert calls(tensor, "set_access") <= stats.num_handles


def test_many_small_growths_use_few_handles() -> None:
    """Geometric growth keeps 512 steps of 2 MiB under half as many handles."""
    with extkv.ExtensibleTensor(GIB, DEVICE) as tensor:
        for num_bytes in range(GRANULE, GIB + 1, GRANULE):
            tensor.resize_per_segment_(num_bytes)
        assert tensor.num_bytes == tensor.physical_bytes == GIB
        assert tensor.stats().num_handles < 256


def test_max_chunk_bytes_sets_the_handle_size() -> None:
    """A chunk of one granule gives one handle for each."""
    with extkv.ExtensibleTensor(
        16 * MIB, DEVICE, max_chunk_bytes=GRANULE, growth="exact"
    ) as tensor:
        tensor.resize_(15 * MIB)
        assert tensor.stats().num_handles == 8


def test_refused_growth_changes_nothing() -> None:
    """Over capacity and below the size are typed errors; size and bytes stay."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(MIB + 5)
        tensor.segment(1).fill_(9)
        with pytest.raises(errors.CapacityError, match="exceeds the segment capacity"):
            tensor.resize_per_segment_(4 * MIB + 1)
        with pytest.raises(errors.GrowOnlyError, match="grow-only"):
            tensor.resize_per_segment_(MIB)
        assert tensor.bytes_per_segment == MIB + 5
        assert bool((tensor.segment(1) == 9).all())


def test_typed_view_shows_a_segment() -> None:
    """A bfloat16 view of a segment has its address and takes kernels' writes."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE, 2) as tensor:
        tensor.resize_per_segment_(64 * KIB)
        view = tensor.view(torch.bfloat16, (4, 8, 1024), segment=1)
        view.copy_(torch.arange(4 * 8 * 1024, device=DEVICE).view(4, 8, 1024) % 128)
        assert view.data_ptr() == tensor.base_ptr + 4 * MIB
        raw = tensor.segment(1).view(torch.bfloat16)
        assert torch.equal(raw, view.reshape(-1))
        del raw, view
