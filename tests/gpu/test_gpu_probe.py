"""Properties of the device and its memory: reported, chosen by option, and true (B77)."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Literal

import extkv
import pytest
import torch
from extkv import errors

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20
CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


def can_export_as_fd(address: int) -> bool:
    """Return whether the driver exports the memory mapped at the address as a descriptor."""
    lib = ctypes.CDLL("libcuda.so.1")
    u64 = ctypes.c_ulonglong
    lib.cuMemRetainAllocationHandle.argtypes = (ctypes.POINTER(u64), ctypes.c_void_p)
    lib.cuMemExportToShareableHandle.argtypes = (ctypes.c_void_p, u64, ctypes.c_int, u64)
    lib.cuMemRelease.argtypes = (u64,)
    handle, descriptor = u64(), ctypes.c_int(-1)
    assert lib.cuMemRetainAllocationHandle(ctypes.byref(handle), address) == 0
    code: int = lib.cuMemExportToShareableHandle(
        ctypes.byref(descriptor), handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0
    )
    assert lib.cuMemRelease(handle) == 0
    if code == 0:
        os.close(descriptor.value)
    return code == 0


def test_probe_describes_the_device() -> None:
    """The report names the device and agrees with torch."""
    report = extkv.probe(DEVICE)
    assert (report.device, report.is_available, report.reason) == (DEVICE, True, None)
    assert report.name == torch.cuda.get_device_name(0)
    assert report.driver_version is not None
    assert report.granularity is not None
    assert report.granularity % (2 * MIB) == 0
    assert report.total == torch.cuda.mem_get_info(0)[1]
    assert report.free is not None
    assert 0 < report.free <= torch.cuda.mem_get_info(0)[1]
    assert report.shareable in ("posix_fd", "none")
    assert isinstance(report.gpu_direct_rdma, bool)


def test_probe_leaves_nothing_behind(
    assert_returns_memory: Callable[[Callable[[], object]], None],
) -> None:
    """The trial growth of a probe gives its memory back."""
    assert_returns_memory(lambda: extkv.probe(DEVICE))


def test_cuda_is_available_here() -> None:
    """The quick question agrees with the probe."""
    assert extkv.cuda_is_available() is True


@pytest.mark.parametrize("shareable", ["auto", "posix_fd", "none"])
def test_memory_is_exportable_as_asked(shareable: Literal["auto", "posix_fd", "none"]) -> None:
    """The driver exports the memory as a descriptor exactly when the option says so."""
    reported = extkv.probe(DEVICE).shareable
    if shareable == "posix_fd" and reported != "posix_fd":
        pytest.skip(f"this device has no POSIX descriptors, the probe says {reported}")
    with extkv.ExtensibleTensor(8 * MIB, DEVICE, shareable=shareable) as tensor:
        tensor.resize_(4 * MIB).fill_(1)
        is_expected = shareable != "none" and reported == "posix_fd"
        assert tensor.stats().posix_fd is is_expected
        assert can_export_as_fd(tensor.base_ptr) is is_expected


@pytest.mark.parametrize("gpu_direct_rdma", ["auto", "off"])
def test_memory_works_without_asking_for_rdma(gpu_direct_rdma: Literal["auto", "off"]) -> None:
    """Memory is usable with the property left open and with it off; the statistics tell which."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE, gpu_direct_rdma=gpu_direct_rdma) as tensor:
        tensor.resize_(8 * MIB).fill_(3)
        is_expected = gpu_direct_rdma == "auto" and extkv.probe(DEVICE).gpu_direct_rdma
        assert tensor.stats().gpu_direct_rdma is is_expected
        assert bool((tensor.tensor == 3).all())


def test_rdma_asked_for_by_name_works_or_is_refused() -> None:
    """RDMA-capable memory works where the probe says so and is a typed error elsewhere."""
    if extkv.probe(DEVICE).gpu_direct_rdma:
        with extkv.ExtensibleTensor(8 * MIB, DEVICE, gpu_direct_rdma="on") as tensor:
            tensor.resize_(8 * MIB).fill_(3)
            assert bool((tensor.tensor == 3).all())
            assert tensor.stats().gpu_direct_rdma
    else:
        with pytest.raises(errors.DriverUnavailableError, match="leave it on auto"):
            extkv.ExtensibleTensor(8 * MIB, DEVICE, gpu_direct_rdma="on")
