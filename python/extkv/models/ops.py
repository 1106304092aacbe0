"""The small operations of the decoder, behind a seam so that an engine can pass its own kernels.

The default is plain PyTorch. Names and signatures are those of `extkv.kernels`. Every
implementation keeps to one rule: no host synchronisation and no branch on a tensor's values, so
that a forward pass can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional


class RMSNorm(Protocol):
    """Divide each row by its root mean square, computed in float32, and scale it."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise.

        Args:
            hidden (model dtype, [num_tokens, size] or [num_tokens, num_heads, size]): Rows; only
                the last dimension is contiguous.
            weight (model dtype, [size]): Scale.
            eps: Added to the mean square.
            residual (model dtype, shape of hidden): Where given, `hidden` is added to it in place,
                and the sum is normalised.

        Returns:
            Tensor (model dtype, shape of hidden).
        """
        ...


class RotaryEmbedding(Protocol):
    """Rotate heads in place; dimension `i` pairs with `i + head_dim / 2`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Rotate.

        Args:
            query (model dtype, [num_tokens, num_heads, head_dim]): Only heads are contiguous.
            key (model dtype, [num_tokens, num_kv_heads, head_dim]): Only heads are contiguous.
            cos (float32, [num_positions, head_dim / 2]): Cosine of each angle.
            sin (float32, [num_positions, head_dim / 2]): Sine of each angle.
            positions (int64 or int32, [num_tokens]): Row of the tables for each token.
        """
        ...


class SiluAndMul(Protocol):
    """Multiply SiLU of the first half of each row by the second half."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the gated rows (model dtype, [num_tokens, size]).

        Args:
            gate_up (model dtype, [num_tokens, 2 * size]): Gate, then up projection.
        """
        ...


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows in plain PyTorch; see `RMSNorm`."""
    if residual is not None:
        hidden = residual.add_(hidden)
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Rotate heads in plain PyTorch, in float32, rounding once; see `RotaryEmbedding`."""
    cosine = cos.index_select(0, positions)[:, None]  # [num_tokens, 1, head_dim / 2]
    sine = sin.index_select(0, positions)[:, None]
    for heads in (query, key):
        first, second = heads.chunk(2, dim=-1)
        rotated = (first * cosine - second * sine, second * cosine + first * sine)
        heads.copy_(torch.cat(rotated, dim=-1))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate rows in plain PyTorch; see `SiluAndMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class DecoderOps:
    """Hold what the decoder computes between its matrix multiplications.

    Attributes:
        rms_norm: Normalises rows, with the residual addition before it.
        rotary_embedding: Rotates query and key heads.
        silu_and_mul: Gates the rows of the MLP.
    """

    rms_norm: RMSNorm = rms_norm
    rotary_embedding: RotaryEmbedding = rotary_embedding
    silu_and_mul: SiluAndMul = silu_and_mul


def kernel_ops() -> DecoderOps:
    """Return the Triton kernels, for a model on a CUDA device."""
    # Imported late: a machine without Triton runs models too.
    from extkv.kernels import rms_norm as norm
    from extkv.kernels import rotary_embedding as rotary
    from extkv.kernels import silu_and_mul as gated

    return DecoderOps(norm.rms_norm, rotary.rotary_embedding, gated.silu_and_mul)
