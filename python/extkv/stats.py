"""What growable memory holds and what its driver calls cost, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extkv import _extkv


@dataclass(frozen=True)
class DriverCallStats:
    """Number and duration of one kind of driver call, failed calls included."""

    count: int
    total_us: float
    max_us: float


@dataclass(frozen=True)
class MemoryStats:
    """What a tensor holds at one moment. Reading it takes constant time.

    Attributes:
        reserved_bytes: Address space; 0 once the memory went back.
        committed_bytes: Physical memory mapped.
        logical_bytes: Bytes below the committed size, over all segments.
        rounding_bytes: Physical bytes past the committed size (granules, handles, surplus).
        num_handles: Physical handles.
        num_views: Live views.
        is_freed: Whether `free` was called.
        has_deferred_free: Whether freed memory waits for the last view.
        granularity: Bytes per granule.
        posix_fd: Whether the memory can be exported as a POSIX file descriptor.
        gpu_direct_rdma: Whether network cards may be given the memory.
        driver_calls: Calls by name (``reserve``, ``create``, ``map``, ``set_access``, ...).
    """

    reserved_bytes: int
    committed_bytes: int
    logical_bytes: int
    rounding_bytes: int
    num_handles: int
    num_views: int
    is_freed: bool
    has_deferred_free: bool
    granularity: int
    posix_fd: bool
    gpu_direct_rdma: bool
    driver_calls: dict[str, DriverCallStats]

    @classmethod
    def of(cls, buffer: _extkv.Buffer) -> MemoryStats:
        """Read the statistics of a native buffer."""
        values = buffer.stats()
        calls = {
            name: DriverCallStats(count, total_ns / 1000, max_ns / 1000)
            for name, (count, total_ns, max_ns) in values.pop("driver_calls").items()
        }
        return cls(**values, driver_calls=calls)
