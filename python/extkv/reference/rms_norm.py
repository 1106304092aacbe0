"""Root-mean-square normalisation, with the residual addition before it."""

from __future__ import annotations

import torch


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale each row to root mean square 1; see `extkv.kernels.rms_norm.rms_norm`."""
    if residual is not None:
        hidden = residual.add_(hidden)
    wide = hidden.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return torch.mul(normed.to(hidden.dtype), weight, out=out)
