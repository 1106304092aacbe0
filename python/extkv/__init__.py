"""Growable KV cache memory for LLM engines: reserve the address range, capture, measure, commit.

`ExtensibleTensor` is a byte buffer on a CUDA device or the host that grows and shrinks in place.
`LLM` answers prompts with its KV cache in such memory. Importing this package imports neither torch
nor CUDA; naming `LLM` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    DeviceLostError,
    DriverError,
    DriverUnavailableError,
    ExtkvError,
    ForkedProcessError,
    FreedError,
    GrammarError,
    GrowOnlyError,
    InvalidArgumentError,
    InvalidRequestError,
    LayoutError,
    LiveViewsError,
    MappingLimitError,
    MissingPackageError,
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
    UnsupportedRequestError,
)
from extkv.outputs import CompletionOutput, RequestOutput
from extkv.sampling_params import SamplingParams
from extkv.stats import DriverCallStats, MemoryStats
from extkv.structured_outputs.params import StructuredOutputsParams
from extkv.tensor import ExtensibleTensor
from extkv.together import resize_together, shrink_together

if TYPE_CHECKING:
    from extkv.engine import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheTooSmallError",
    "CalibrationError",
    "CapacityError",
    "CompletionOutput",
    "CostTableError",
    "DeviceLostError",
    "DeviceReport",
    "DriverCallStats",
    "DriverError",
    "DriverUnavailableError",
    "ExtensibleTensor",
    "ExtkvError",
    "ForkedProcessError",
    "FreedError",
    "GrammarError",
    "GrowOnlyError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LayoutError",
    "LiveViewsError",
    "MappingLimitError",
    "MemoryInfo",
    "MemoryStats",
    "MissingPackageError",
    "ModelFileError",
    "NoSuchDeviceError",
    "OutOfMemoryError",
    "PoisonedError",
    "RankError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerError",
    "SizingError",
    "SizingOrderError",
    "SpeculationError",
    "StaleGrowthError",
    "StructuredOutputsParams",
    "UnknownRequestError",
    "UnsupportedRequestError",
    "__version__",
    "cuda_is_available",
    "memory_info",
    "probe",
    "resize_together",
    "set_host_memory_budget",
    "shrink_together",
]


def __getattr__(name: str) -> object:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from extkv.engine import LLM

    return LLM
