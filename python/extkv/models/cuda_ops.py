"""The operations of a decoder layer on CUDA: which kernels run for how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from extkv.kernels.rms_norm import rms_norm
from extkv.kernels.rotary_embedding import rotary_embedding
from extkv.kernels.silu_and_mul import silu_and_mul
from extkv.kernels.small_batch_linear import (
    DTYPES,
    MAX_NUM_TOKENS,
    small_batch_add_linear,
    small_batch_linear,
)
from extkv.models.ops import DecoderOps
from extkv.normalized import ScaledRows

if TYPE_CHECKING:
    import torch

    from extkv.models.ops import Norm, Normalized
    from extkv.normalized import HeadNorms


class KernelOps(DecoderOps):
    """`DecoderOps` by Triton kernels, with cuBLAS for the products of more than 16 tokens."""

    def normalize(self, residual: torch.Tensor, norm: Norm) -> Normalized:
        """See `DecoderOps.normalize`."""
        return rms_norm(residual, norm.weight, norm.eps)

    def add_linear(
        self,
        residual: torch.Tensor,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm,
    ) -> Normalized:
        """See `DecoderOps.add_linear`."""
        if 0 < values.shape[0] <= MAX_NUM_TOKENS and values.dtype in DTYPES:
            return small_batch_add_linear(
                residual, values, weight, bias, norm=norm.weight, eps=norm.eps
            )
        products = functional.linear(values, weight, bias)
        return rms_norm(products, norm.weight, norm.eps, residual=residual)

    def linear(
        self, normalized: Normalized, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `DecoderOps.linear`."""
        if isinstance(normalized, ScaledRows):
            return small_batch_linear(normalized, weight, bias)
        return super().linear(normalized, weight, bias)

    def gated_linear(
        self, normalized: Normalized, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `DecoderOps.gated_linear`."""
        if isinstance(normalized, ScaledRows):
            return small_batch_linear(normalized, weight, bias, is_gated=True)
        return silu_and_mul(super().linear(normalized, weight, bias))

    def hidden(self, normalized: Normalized, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `DecoderOps.hidden`."""
        if isinstance(normalized, ScaledRows):
            return rms_norm(residual, norm.weight, norm.eps)
        return super().hidden(normalized, residual, norm)

    def rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        *,
        norms: HeadNorms | None,
    ) -> None:
        """See `DecoderOps.rotate`."""
        rotary_embedding(query, key, cos, sin, positions, norms=norms)
