"""The few CUDA driver calls the memory benchmarks compare with, through ctypes on libcuda.

Calls act on the calling thread's current context: create a torch CUDA tensor first, so that the
primary context is current. Not a general binding: one device, read-write access, plain pinned
device memory.
"""

from __future__ import annotations

import ctypes

CU_MEM_ALLOCATION_TYPE_PINNED = 1
CU_MEM_LOCATION_TYPE_DEVICE = 1
CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class MemLocation(ctypes.Structure):
    """`CUmemLocation`: 8 bytes."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class AllocFlags(ctypes.Structure):
    """The unnamed struct `CUmemAllocationProp.allocFlags`: 8 bytes."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAllocationProp(ctypes.Structure):
    """`CUmemAllocationProp`: 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_uint),
        ("requestedHandleTypes", ctypes.c_uint),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocFlags),
    )


class MemAccessDesc(ctypes.Structure):
    """`CUmemAccessDesc`: 12 bytes."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_uint))


# `CUdeviceptr` and `CUmemGenericAllocationHandle` are unsigned long long on 64-bit systems.
_U64 = ctypes.c_ulonglong
_SIZE = ctypes.c_size_t

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuMemAlloc_v2": (ctypes.POINTER(_U64), _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuMemsetD8_v2": (_U64, ctypes.c_ubyte, _SIZE),
    "cuMemAddressReserve": (ctypes.POINTER(_U64), _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_U64), _SIZE, ctypes.POINTER(MemAllocationProp), _U64),
    "cuMemRelease": (_U64,),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, ctypes.POINTER(MemAccessDesc), _SIZE),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_SIZE),
        ctypes.POINTER(MemAllocationProp),
        ctypes.c_int,
    ),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaDriverError(RuntimeError):
    """A driver call returned another code than CUDA_SUCCESS."""


class CudaDriver:
    """Driver calls on one device; sizes and addresses are bytes, every failure raises."""

    def __init__(self, device_index: int = 0) -> None:
        """Load libcuda and prepare the structures for device `device_index`."""
        self._lib = ctypes.CDLL("libcuda.so.1")
        for name, argument_types in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes = argument_types
            function.restype = ctypes.c_int
        location = MemLocation(CU_MEM_LOCATION_TYPE_DEVICE, device_index)
        self._prop = MemAllocationProp(type=CU_MEM_ALLOCATION_TYPE_PINNED, location=location)
        self._access = MemAccessDesc(location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

    def mem_alloc(self, num_bytes: int) -> int:
        """Allocate device memory with cuMemAlloc and return its address."""
        address = _U64()
        self._check("cuMemAlloc", self._lib.cuMemAlloc_v2(ctypes.byref(address), num_bytes))
        return address.value

    def mem_free(self, address: int) -> None:
        """Free memory from `mem_alloc`."""
        self._check("cuMemFree", self._lib.cuMemFree_v2(address))

    def memset_d8(self, address: int, value: int, num_bytes: int) -> None:
        """Queue a fill of device memory on the legacy default stream."""
        self._check("cuMemsetD8", self._lib.cuMemsetD8_v2(address, value, num_bytes))

    def granularity(self) -> int:
        """Return the smallest handle size of this device in bytes."""
        size = _SIZE()
        code = self._lib.cuMemGetAllocationGranularity(
            ctypes.byref(size), ctypes.byref(self._prop), CU_MEM_ALLOC_GRANULARITY_MINIMUM
        )
        self._check("cuMemGetAllocationGranularity", code)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range and return its start."""
        address = _U64()
        code = self._lib.cuMemAddressReserve(ctypes.byref(address), num_bytes, 0, 0, 0)
        self._check("cuMemAddressReserve", code)
        return address.value

    def free_address(self, address: int, num_bytes: int) -> None:
        """Free a range from `reserve`; nothing may be mapped in it."""
        self._check("cuMemAddressFree", self._lib.cuMemAddressFree(address, num_bytes))

    def create(self, num_bytes: int) -> int:
        """Create physical memory and return its handle."""
        handle = _U64()
        code = self._lib.cuMemCreate(ctypes.byref(handle), num_bytes, ctypes.byref(self._prop), 0)
        self._check("cuMemCreate", code)
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle from `create`."""
        self._check("cuMemRelease", self._lib.cuMemRelease(handle))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map a whole handle at an address."""
        self._check("cuMemMap", self._lib.cuMemMap(address, num_bytes, 0, handle, 0))

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap whole mappings."""
        self._check("cuMemUnmap", self._lib.cuMemUnmap(address, num_bytes))

    def set_access(self, address: int, num_bytes: int) -> None:
        """Give the device read and write access to a mapped range."""
        code = self._lib.cuMemSetAccess(address, num_bytes, ctypes.byref(self._access), 1)
        self._check("cuMemSetAccess", code)

    def _check(self, call: str, code: int) -> None:
        if code == 0:
            return
        name = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(name))
        message = f"{call} failed: {(name.value or b'unknown').decode()} ({code})"
        raise CudaDriverError(message)
