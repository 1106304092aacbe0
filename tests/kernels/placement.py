"""Tensors of a test on the device it runs on."""

from __future__ import annotations

import torch


def with_strides(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device that keeps the strides; `to` makes tensors with gaps dense."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)
