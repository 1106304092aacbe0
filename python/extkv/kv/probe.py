"""Reading a device's memory: what the driver has free, and what torch's allocator holds."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.device import memory_info, resolve_device

if TYPE_CHECKING:
    from extkv.device import DeviceLike


@dataclass(frozen=True)
class MemoryReading:
    """Memory at one moment, in bytes; see the core's `MemoryReading`."""

    driver_free_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0


class MemoryProbe:
    """Read memory of one device. On the host torch has no allocator statistics: they read 0.

    A test or another engine can pass an object with these methods instead.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        self._kind, self._index = resolve_device(device)
        self._name = self._kind if self._kind == "cpu" else f"cuda:{self._index}"

    def total(self) -> int:
        """Bytes of the device."""
        return memory_info(self._name).total

    def read(self) -> MemoryReading:
        """Read the driver and the allocator, after all work on the device is done."""
        if self._kind == "cpu":
            return MemoryReading(memory_info(self._name).free)
        import torch

        torch.cuda.synchronize(self._index)
        return MemoryReading(
            driver_free_bytes=memory_info(self._name).free,
            allocated_bytes=torch.cuda.memory_allocated(self._index),
            reserved_bytes=torch.cuda.memory_reserved(self._index),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._index),
        )

    def empty_caches(self) -> None:
        """Give cached but unused allocator memory back to the driver."""
        gc.collect()
        if self._kind == "cuda":
            import torch

            torch.cuda.synchronize(self._index)
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Let the peak count from now on."""
        if self._kind == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._index)

    def foreign_bytes(self) -> int:
        """Bytes of other processes on the device, as far as NVML tells; else 0.

        Their memory is counted in any case, because free memory is the driver's; this only
        explains it. Needs the package nvidia-ml-py.
        """
        if self._kind == "cpu":
            return 0
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            return 0
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            own = os.getpid()
            return sum(p.usedGpuMemory or 0 for p in processes if p.pid != own)
        except pynvml.NVMLError:
            return 0
