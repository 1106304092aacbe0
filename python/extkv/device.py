"""Devices: which one is meant, what it can do, and how much memory it has."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from extkv import _extkv
from extkv.errors import DriverUnavailableError, ExtkvError, InvalidArgumentError, NoSuchDeviceError

if TYPE_CHECKING:
    import torch

    DeviceLike = torch.device | str | int | None

_MAX_U64 = 2**64 - 1


@dataclass(frozen=True)
class MemoryInfo:
    """Physical memory of a device, in bytes; use by other processes is counted as not free."""

    free: int
    total: int


@dataclass(frozen=True)
class DeviceReport:
    """What `probe` found out about a device.

    Attributes:
        device: Name as torch prints it.
        is_available: Whether growable memory works on it.
        reason: Why not, None if it works.
        name: Product name, None for the host.
        driver_version: For example ``"13.0"``, None for the host.
        driver_library: Library that the driver was loaded from, None for the host.
        granularity: Bytes of the smallest piece of physical memory.
        free: Free bytes.
        total: Bytes of the device.
        shareable: ``"posix_fd"`` or ``"none"``.
        gpu_direct_rdma: Whether network cards may be given the memory.
    """

    device: str
    is_available: bool
    reason: str | None = None
    name: str | None = None
    driver_version: str | None = None
    driver_library: str | None = None
    granularity: int | None = None
    free: int | None = None
    total: int | None = None
    shareable: str | None = None
    gpu_direct_rdma: bool | None = None


def checked_size(name: str, value: SupportsIndex) -> int:
    """Check a size in bytes and return it as an int.

    Raises:
        InvalidArgumentError: If it is negative or above 64 bits.
        TypeError: If it is not an integer.
    """
    number = operator.index(value)
    if not 0 <= number <= _MAX_U64:
        raise InvalidArgumentError(f"{name} must be in [0, 2**64), got {number}")
    return number


def cuda_is_available() -> bool:
    """Tell whether a CUDA driver starts on this machine and finds a device. Never raises."""
    try:
        return _extkv.cuda_device_count() > 0
    except ExtkvError:
        return False


def resolve_device(device: DeviceLike = None) -> tuple[str, int]:
    """Split a device as torch names it into kind (``"cpu"`` or ``"cuda"``) and index.

    None means the current CUDA device, or the host where there is none. An int is a CUDA index.

    Raises:
        InvalidArgumentError: If the device is of another kind or has a negative index.
    """
    if device is None:
        device = "cuda" if cuda_is_available() else "cpu"
    if isinstance(device, int):
        kind, index = "cuda", operator.index(device)
    else:
        kind, _, suffix = str(device).partition(":")
        if suffix and not suffix.isdecimal():
            raise InvalidArgumentError(f"device {str(device)!r} has no valid index")
        index = int(suffix) if suffix else _current_index(kind)
    if kind not in {"cpu", "cuda"}:
        raise InvalidArgumentError(f"device must be a cpu or cuda device, got {str(device)!r}")
    if not 0 <= index < 2**31 or (kind == "cpu" and index > 0):
        raise NoSuchDeviceError(f"device {kind}:{index} does not exist")
    return kind, index


def _current_index(kind: str) -> int:
    """Index of the calling thread's current device: 0 unless torch was told otherwise."""
    torch = sys.modules.get("torch")
    if kind != "cuda" or torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


def open_device(
    kind: str,
    index: int,
    *,
    granularity: int | None = None,
    shareable: str = "auto",
    gpu_direct_rdma: str = "auto",
) -> _extkv.Device:
    """Open the native device, probing it the first time.

    Raises:
        DriverUnavailableError: If its driver cannot be used, with the reason.
        NoSuchDeviceError: If the index does not exist.
        InvalidArgumentError: If an option is not one of the documented values.
    """
    for name, value, known in (
        ("shareable", shareable, ("auto", "posix_fd", "none")),
        ("gpu_direct_rdma", gpu_direct_rdma, ("auto", "on", "off")),
    ):
        if value not in known:
            raise InvalidArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if kind == "cpu":
        if shareable == "posix_fd" or gpu_direct_rdma == "on":
            raise DriverUnavailableError("host memory has no POSIX file descriptor handles or RDMA")
        return _extkv.Device.host(granularity)
    if granularity is not None:
        raise InvalidArgumentError("granularity can be chosen on the host only")
    return _extkv.Device.cuda(index, shareable, gpu_direct_rdma)


def memory_info(device: DeviceLike = None) -> MemoryInfo:
    """Read free and total memory of a device, as its driver sees it.

    Raises:
        DriverUnavailableError: If the device's driver cannot be used.
    """
    kind, index = resolve_device(device)
    free, total = open_device(kind, index).memory_info()
    return MemoryInfo(free, total)


def set_host_memory_budget(num_bytes: int | None) -> None:
    """Set how many bytes of host memory all tensors of the process may commit together.

    This is the "size of the device" for ``device="cpu"``. None means this machine's memory (or its
    control group's limit), which is the default. Memory in use stays in use.

    Raises:
        InvalidArgumentError: If the number is negative or above 64 bits.
    """
    if num_bytes is not None:
        num_bytes = checked_size("num_bytes", num_bytes)
    _extkv.set_host_memory_budget(num_bytes)


def probe(device: DeviceLike = None) -> DeviceReport:
    """Find out whether growable memory works on a device, and why not. Never raises `ExtkvError`.

    The first probe of a CUDA device starts its driver, creates the primary context, and grows and
    frees two granules.
    """
    try:
        kind, index = resolve_device(device)
    except ExtkvError as error:
        return DeviceReport(str(device), is_available=False, reason=str(error))
    name = kind if kind == "cpu" else f"{kind}:{index}"
    try:
        native = open_device(kind, index)
        free, total = native.memory_info()
    except ExtkvError as error:
        return DeviceReport(name, is_available=False, reason=str(error))
    return DeviceReport(
        device=name,
        is_available=True,
        name=native.product_name,
        driver_version=native.driver_version,
        driver_library=native.driver_library,
        granularity=native.granularity,
        free=free,
        total=total,
        shareable="posix_fd" if native.posix_fd else "none",
        gpu_direct_rdma=native.gpu_direct_rdma,
    )
