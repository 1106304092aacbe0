"""Checks of tensor arguments, made once before a launch; none of them reads device memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
    *,
    is_last_dim_dense: bool = False,
) -> None:
    """Check one tensor of a launch.

    Args:
        name: Name of the argument, for the message.
        tensor: The argument.
        dtypes: Allowed dtypes.
        shape: Required size of each dimension, None for any.
        device: Device of the launch.
        is_last_dim_dense: Whether the last dimension must have stride 1.

    Raises:
        InvalidArgumentError: If something differs; the message has the wanted and the found value.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidArgumentError(f"{name} must be {wanted}, got {tensor.dtype}")
    # Steps of one request wait for these checks: no generator, no copy.
    found = tensor.shape
    is_right = len(found) == len(shape)
    if is_right:
        for index, want in enumerate(shape):
            if want is not None and want != found[index]:
                is_right = False
    if not is_right:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(f"{name} must have shape [{wanted}], got {list(found)}")
    if tensor.device != device:
        raise InvalidArgumentError(f"{name} must be on {device}, got {tensor.device}")
    if is_last_dim_dense and found and found[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgumentError(
            f"{name} must have stride 1 in its last dimension, got strides {tensor.stride()}"
        )


def launch_device(name: str, tensor: torch.Tensor) -> torch.device:
    """Return the device that a kernel on this tensor runs on.

    Raises:
        InvalidArgumentError: If it has no Triton: CPU tensors run in Triton's interpreter only.
    """
    if tensor.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgumentError(
            f"{name} must be on a CUDA device, got {tensor.device}; extkv.reference has the same "
            "function for the CPU"
        )
    return tensor.device


def on_device_of(tensor: torch.Tensor) -> torch.cuda.device:
    """Return a context in which the tensor's CUDA device is current; no effect for a CPU tensor."""
    return torch.cuda.device(tensor.get_device())


def padded_to_power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return 1 << (max(size, least) - 1).bit_length()
