"""Growable KV cache memory for LLM engines: reserve the address range, capture, measure, commit.

`ExtensibleTensor` is a byte buffer on a CUDA device or the host that grows and shrinks in place.
Importing this package imports neither torch nor CUDA.
"""

from __future__ import annotations

from extkv.device import (
    DeviceReport,
    MemoryInfo,
    cuda_is_available,
    memory_info,
    probe,
    set_host_memory_budget,
)
from extkv.errors import (
    CacheTooSmallError,
    CalibrationError,
    CapacityError,
    CostTableError,
    DriverError,
    DriverUnavailableError,
    ExtkvError,
    ForkedProcessError,
    FreedError,
    GrowOnlyError,
    InvalidArgumentError,
    InvalidRequestError,
    LayoutError,
    LiveViewsError,
    MappingLimitError,
    ModelFileError,
    NoSuchDeviceError,
    OutOfMemoryError,
    PoisonedError,
    RankError,
    SchedulerError,
    SizingError,
    SizingOrderError,
    SpeculationError,
    StaleGrowthError,
    UnknownRequestError,
)
from extkv.stats import DriverCallStats, MemoryStats
from extkv.tensor import ExtensibleTensor
from extkv.together import resize_together, shrink_together

__version__ = "0.1.0"

__all__ = [
    "CacheTooSmallError",
    "CalibrationError",
    "CapacityError",
    "CostTableError",
    "DeviceReport",
    "DriverCallStats",
    "DriverError",
    "DriverUnavailableError",
    "ExtensibleTensor",
    "ExtkvError",
    "ForkedProcessError",
    "FreedError",
    "GrowOnlyError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LayoutError",
    "LiveViewsError",
    "MappingLimitError",
    "MemoryInfo",
    "MemoryStats",
    "ModelFileError",
    "NoSuchDeviceError",
    "OutOfMemoryError",
    "PoisonedError",
    "RankError",
    "SchedulerError",
    "SizingError",
    "SizingOrderError",
    "SpeculationError",
    "StaleGrowthError",
    "UnknownRequestError",
    "__version__",
    "cuda_is_available",
    "memory_info",
    "probe",
    "resize_together",
    "set_host_memory_budget",
    "shrink_together",
]
