"""Linear layers of up to 16 tokens, with the operations around them."""

from __future__ import annotations

import torch
from torch.nn import functional

from extkv.normalized import ScaledRows

MAX_NUM_TOKENS = 16


def small_batch_linear(
    rows: ScaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Multiply normalised rows by a weight; see `extkv.kernels.small_batch_linear`."""
    num_tokens, size = rows.values.shape
    mean_square = rows.squares.sum(0)[:num_tokens] / size
    products = rows.values.to(torch.float32) @ weight.to(torch.float32).T
    products *= torch.rsqrt(mean_square + rows.eps)[:, None]
    if bias is not None:
        products += bias
    out = products.to(rows.values.dtype)
    if not is_gated:
        return out
    gate, up = out.chunk(2, dim=1)
    return functional.silu(gate) * up


def small_batch_add_linear(
    residual: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor,
    eps: float,
) -> ScaledRows:
    """Add a product to the residual stream; see `extkv.kernels.small_batch_linear`."""
    products = values.to(torch.float32) @ weight.to(torch.float32).T
    if bias is not None:
        products += bias
    residual.add_(products.to(residual.dtype))
    squares = torch.zeros(1, MAX_NUM_TOKENS, dtype=torch.float32, device=values.device)
    squares[0, : values.shape[0]] = residual.to(torch.float32).square().sum(1)
    return ScaledRows(residual * norm, squares, eps)
