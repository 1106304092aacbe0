"""What the decoder computes outside attention, behind a seam so that an engine can pass kernels.

`DecoderOps` is plain PyTorch. `kernel_ops()` gives a subclass that runs the Triton kernels of
`extkv.kernels`. Every implementation keeps to one rule: no host synchronisation and no branch on a
tensor's values, so that a forward pass can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from typing import TypeAlias

    from extkv.normalized import HeadNorms, ScaledRows

    # The residual stream, normalised: the tensor itself, or what a kernel keeps of it.
    Normalized: TypeAlias = torch.Tensor | ScaledRows


class Norm(NamedTuple):
    """Root-mean-square normalisation.

    Attributes:
        weight (model dtype, [size]): Scale.
        eps: Added to the mean square.
    """

    weight: torch.Tensor
    eps: float


class DecoderOps:
    """The operations of a decoder layer in plain PyTorch.

    The residual stream is mutated in place. What `normalize` and `add_linear` return is the
    stream, normalised, in a form that only `linear`, `gated_linear` and `hidden` of the same object
    read; here it is the tensor itself.
    """

    def normalize(self, residual: torch.Tensor, norm: Norm) -> Normalized:
        """Normalise the stream.

        Args:
            residual (model dtype, [num_tokens, size]): The stream; not mutated.
            norm: The normalisation.
        """
        return functional.rms_norm(residual, norm.weight.shape, norm.weight, norm.eps)

    def add_linear(
        self,
        residual: torch.Tensor,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm,
    ) -> Normalized:
        """Add a projection to the stream, and normalise it.

        Args:
            residual (model dtype, [num_tokens, size]): The stream; mutated.
            values (model dtype, [num_tokens, in_size]): Input of the projection.
            weight (model dtype, [size, in_size]): Its weight.
            bias (model dtype, [size]): Its bias.
            norm: The normalisation that comes next.
        """
        residual.add_(functional.linear(values, weight, bias))
        return self.normalize(residual, norm)

    def linear(
        self, normalized: Normalized, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Project the normalised stream.

        Returns:
            Tensor (model dtype, [num_tokens, out_size]).
        """
        return functional.linear(_tensor(normalized), weight, bias)

    def gated_linear(
        self, normalized: Normalized, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Project the normalised stream, and multiply SiLU of the first half by the second half.

        Args:
            normalized: The stream.
            weight (model dtype, [2 * size, in_size]): Gate, then up projection.
            bias (model dtype, [2 * size]): Theirs.

        Returns:
            Tensor (model dtype, [num_tokens, size]).
        """
        gate, up = self.linear(normalized, weight, bias).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def hidden(self, normalized: Normalized, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the normalised stream as a tensor (model dtype, [num_tokens, size]).

        Args:
            normalized: What the last `add_linear` returned.
            residual: The stream at that time.
            norm: The normalisation it was given.
        """
        del residual, norm
        return _tensor(normalized)

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
        """Normalise heads and rotate them in place; dimension `i` pairs with `i + head_dim / 2`.

        Args:
            query (model dtype, [num_tokens, num_heads, head_dim]): Only heads are contiguous.
            key (model dtype, [num_tokens, num_kv_heads, head_dim]): Only heads are contiguous.
            cos (float32, [num_positions, head_dim / 2]): Cosine of each angle.
            sin (float32, [num_positions, head_dim / 2]): Sine of each angle.
            positions (int64 or int32, [num_tokens]): Row of the tables for each token.
            norms: Normalisation of the heads, if the model has it.
        """
        cosine = cos.index_select(0, positions)[:, None]  # [num_tokens, 1, head_dim / 2]
        sine = sin.index_select(0, positions)[:, None]
        weights = (None, None) if norms is None else (norms.query, norms.key)
        eps = 0.0 if norms is None else norms.eps
        for heads, weight in zip((query, key), weights, strict=True):
            values = heads
            if weight is not None:
                values = functional.rms_norm(heads, weight.shape, weight, eps)
            first, second = values.chunk(2, dim=-1)
            # In float32, rounded once.
            rotated = (first * cosine - second * sine, second * cosine + first * sine)
            heads.copy_(torch.cat(rotated, dim=-1))


def _tensor(normalized: Normalized) -> torch.Tensor:
    if not isinstance(normalized, torch.Tensor):
        raise TypeError(f"normalized is {type(normalized).__name__}, made by other operations")
    return normalized


def kernel_ops() -> DecoderOps:
    """Return the Triton kernels, for a model on a CUDA device."""
    # Imported late: a machine without Triton runs models too.
    from extkv.models.cuda_ops import KernelOps

    return KernelOps()
