"""Which implementation of an operation runs on a device: its Triton kernel or its PyTorch twin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import torch


def op_module(device: torch.device, name: str) -> ModuleType:
    """Return the module of an operation for tensors on a device.

    By name, because Triton cannot be imported everywhere.

    Args:
        device: Where the tensors are: on CUDA the kernels run, elsewhere their reference.
        name: Module in `extkv.kernels` and `extkv.reference`.
    """
    package = "extkv.kernels" if device.type == "cuda" else "extkv.reference"
    return importlib.import_module(f"{package}.{name}")
