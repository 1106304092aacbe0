"""Arrays of messages: tensors as they lie in a frame, and the wire form of arrays to be sent."""

from __future__ import annotations

import sys
from typing import Protocol, cast

import numpy as np

from extkv.errors import InvalidArgumentError

# Torch's names of numpy's types. Types that only torch has, such as bfloat16, are not in it.
_NUMPY_OF_TORCH = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
_TORCH_OF_NUMPY = {numpy: torch for torch, numpy in _NUMPY_OF_TORCH.items()}


class Tensor:
    """A torch tensor as it lies in a message. Frozen; torch itself is not needed.

    `torch.frombuffer(tensor.data, dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)` makes
    a tensor of it; an empty one has no buffer to make it of.

    Attributes:
        dtype: Torch's name of the element type, without `torch.`.
        shape: Length in each dimension; empty for a scalar.
        data: Its bytes in C order. For a decoded message they lie in the message's frames, which
            they keep alive.
    """

    __slots__ = ("data", "dtype", "shape")

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __init__(
        self, dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview
    ) -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "data", memoryview(data).toreadonly().cast("B"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Tensor is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Tensor is frozen: {name} cannot be deleted")

    def numpy(self) -> np.ndarray:
        """Return the tensor as a read-only numpy array of the same memory.

        Raises:
            InvalidArgumentError: numpy has no such type (bfloat16, float8).
        """
        numpy_dtype = _NUMPY_OF_TORCH.get(self.dtype)
        if numpy_dtype is None:
            raise InvalidArgumentError(f"numpy has no type {self.dtype}; use torch.frombuffer")
        array: np.ndarray = np.ndarray(self.shape, numpy_dtype, buffer=self.data)
        return array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        mine, theirs = (self.dtype, self.shape), (other.dtype, other.shape)
        return mine == theirs and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tensor(dtype={self.dtype!r}, shape={self.shape}, {self.data.nbytes} bytes)"


class _TorchTensor(Protocol):
    dtype: object
    shape: tuple[int, ...]

    def detach(self) -> _TorchTensor: ...
    def cpu(self) -> _TorchTensor: ...
    def reshape(self, shape: int) -> _TorchTensor: ...
    def contiguous(self) -> _TorchTensor: ...
    def view(self, dtype: object) -> _TorchTensor: ...
    def numpy(self) -> np.ndarray: ...


def array_parts(array: object, is_torch: bool) -> tuple[str, list[int], bytes]:
    """Return element type, shape and bytes of an array, with the type spelt as asked.

    Args:
        array: a `Tensor`, a numpy array, or a torch tensor of any device; sequences of numbers
            become numpy arrays.
        is_torch: whether the type is spelt as torch does (`int32`) or as numpy does (`<i4`).

    Raises:
        InvalidArgumentError: the other spelling has no such type, or it is an array of objects.
    """
    if isinstance(array, Tensor):
        dtype, shape, data = array.dtype, list(array.shape), bytes(array.data)
    elif hasattr(array, "untyped_storage"):
        dtype, shape, data = _torch_parts(cast("_TorchTensor", array))
    else:
        return _numpy_parts(np.asarray(array), is_torch)
    if not is_torch:
        dtype = _translated(dtype, _NUMPY_OF_TORCH, "numpy")
    return dtype, shape, data


def token_bytes(tokens: object) -> bytes:
    """Return token ids of an array as 4-byte little-endian integers.

    Raises:
        InvalidArgumentError: not one dimension of integers in [0, 2**32).
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"token ids must be one dimension of integers, got {array.dtype} {array.shape}"
        )
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= 2**32:
        raise InvalidArgumentError(f"token ids must be in [0, 2**32), got {lowest} to {highest}")
    return array.astype("<u4", copy=False).tobytes()


def _numpy_parts(array: np.ndarray, is_torch: bool) -> tuple[str, list[int], bytes]:
    if array.dtype.kind in "OVUSmM":
        raise InvalidArgumentError(f"arrays of {array.dtype} cannot be sent")
    dtype = array.dtype.str
    if is_torch:
        dtype = _translated(dtype, _TORCH_OF_NUMPY, "torch")
    return dtype, list(array.shape), array.tobytes()


def _torch_parts(tensor: _TorchTensor) -> tuple[str, list[int], bytes]:
    # Who has a tensor has imported torch; this module does without it.
    as_bytes = sys.modules["torch"].uint8
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(as_bytes)
    data = flat.numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data


def _translated(dtype: str, names: dict[str, str], library: str) -> str:
    try:
        return names[dtype]
    except KeyError:
        raise InvalidArgumentError(f"{library} has no type for {dtype}") from None
