"""Rotary position embedding of queries and keys, with the normalisation of heads before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from extkv.reference.rms_norm import rms_norm

if TYPE_CHECKING:
    from extkv.normalized import HeadNorms


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
) -> None:
    """Rotate in place; see `extkv.kernels.rotary_embedding.rotary_embedding`."""
    num_positions, half = cos.shape
    is_known = ((positions >= 0) & (positions < num_positions))[:, None, None]
    rows = positions.clamp(0, num_positions - 1)
    cosine = cos[rows].to(torch.float32)[:, None, :]  # [num_tokens, 1, half]
    sine = sin[rows].to(torch.float32)[:, None, :]
    if norms is not None:
        for heads, weight in ((query, norms.query), (key, norms.key)):
            heads.copy_(torch.where(is_known, rms_norm(heads, weight, norms.eps), heads))
    for heads in (query, key):
        first = heads[..., :half].to(torch.float32)
        second = heads[..., half : 2 * half].to(torch.float32)
        rotated = first * cosine - second * sine, second * cosine + first * sine
        heads[..., :half] = torch.where(is_known, rotated[0], first).to(heads.dtype)
        heads[..., half : 2 * half] = torch.where(is_known, rotated[1], second).to(heads.dtype)
