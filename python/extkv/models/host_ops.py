"""The decoder's small operations on the host, with few passes over memory and few temporaries.

Results are those of `extkv.models.ops` up to rounding. Operations overwrite their arguments where
the decoder does not read them again: at thousands of tokens the page faults of new memory cost more
than the arithmetic.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from extkv.models import ops


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows in float32; see `extkv.models.ops.RMSNorm`."""
    if hidden.dtype != torch.float32:
        return ops.rms_norm(hidden, weight, eps, residual=residual)
    if residual is not None:
        hidden = residual.add_(hidden)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).mul_(weight)


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Rotate heads in place with one temporary; see `extkv.models.ops.RotaryEmbedding`."""
    if query.dtype != torch.float32:
        ops.rotary_embedding(query, key, cos, sin, positions)
        return
    half = cos.shape[1]
    cosine = cos.index_select(0, positions)[:, None]  # [num_tokens, 1, head_dim / 2]
    sine = sin.index_select(0, positions)[:, None]
    for heads in (query, key):
        first, second = heads[..., :half], heads[..., half:]
        crossed = first * sine
        first.mul_(cosine).addcmul_(second, sine, value=-1)
        second.mul_(cosine).add_(crossed)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate rows in place; see `extkv.models.ops.SiluAndMul`.

    Args:
        gate_up (model dtype, [num_tokens, 2 * size]): Gate, then up projection; the gate is
            overwritten.

    Returns:
        Tensor (model dtype, [num_tokens, size]): the gate's part of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def host_ops() -> ops.DecoderOps:
    """Return these operations, for a model in host memory."""
    return ops.DecoderOps(
        rms_norm=rms_norm, rotary_embedding=rotary_embedding, silu_and_mul=silu_and_mul
    )
