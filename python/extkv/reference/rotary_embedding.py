"""Rotary position embedding of queries and keys, the two halves of a head against each other."""

from __future__ import annotations

import torch


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Rotate in place; see `extkv.kernels.rotary_embedding.rotary_embedding`."""
    num_positions, half = cos.shape
    is_known = ((positions >= 0) & (positions < num_positions))[:, None, None]
    rows = positions.clamp(0, num_positions - 1)
    cosine = cos[rows].to(torch.float32)[:, None, :]  # [num_tokens, 1, half]
    sine = sin[rows].to(torch.float32)[:, None, :]
    for heads in (query, key):
        first = heads[..., :half].to(torch.float32)
        second = heads[..., half : 2 * half].to(torch.float32)
        rotated = first * cosine - second * sine, second * cosine + first * sine
        heads[..., :half] = torch.where(is_known, rotated[0], first).to(heads.dtype)
        heads[..., half : 2 * half] = torch.where(is_known, rotated[1], second).to(heads.dtype)
