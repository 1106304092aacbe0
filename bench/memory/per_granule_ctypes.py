"""The plain way to grow a CUDA buffer: one handle per granule, from Python through ctypes.

This is the peer for `extkv commits 16 GiB at least 20 times faster`. For each granule that a grown
range needs and that is not in the set yet: create, map, set-access. It works; it is not extkv's
code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.memory.cuda_driver import CudaDriver


class PerGranuleBuffer:
    """A reserved address range whose segments grow in lockstep, one physical handle per granule."""

    def __init__(self, driver: CudaDriver, max_num_bytes: int, num_segments: int = 1) -> None:
        """Reserve `max_num_bytes`, rounded up to whole granules; commits nothing."""
        self._driver = driver
        self._granularity = driver.granularity()
        num_granules = -(-max_num_bytes // self._granularity)
        self._reserved_bytes = num_granules * self._granularity
        self._segment_capacity_bytes = max_num_bytes // num_segments
        self._num_segments = num_segments
        self._granules: set[int] = set()
        self._handles: dict[int, int] = {}
        self.base_ptr = driver.reserve(self._reserved_bytes)
        self.bytes_per_segment = 0

    def commit(self, bytes_per_segment: int) -> None:
        """Back the first `bytes_per_segment` bytes of each segment."""
        for segment in range(self._num_segments):
            start = segment * self._segment_capacity_bytes
            first = (start + self.bytes_per_segment) // self._granularity
            end = -(-(start + bytes_per_segment) // self._granularity)
            for granule in range(first, end):
                if granule not in self._granules:
                    self._commit_granule(granule)
        self.bytes_per_segment = bytes_per_segment

    def free(self) -> None:
        """Unmap and release each granule, then give the address range back."""
        for granule, handle in self._handles.items():
            address = self.base_ptr + granule * self._granularity
            self._driver.unmap(address, self._granularity)
            self._driver.release(handle)
        self._handles.clear()
        self._granules.clear()
        self._driver.free_address(self.base_ptr, self._reserved_bytes)

    def _commit_granule(self, granule: int) -> None:
        address = self.base_ptr + granule * self._granularity
        handle = self._driver.create(self._granularity)
        self._driver.map(address, self._granularity, handle)
        self._driver.set_access(address, self._granularity)
        self._handles[granule] = handle
        self._granules.add(granule)
