"""Records of normalisation that pass between decoder operations; tensors only, no code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class HeadNorms(NamedTuple):
    """Normalisation of heads before they are rotated.

    Attributes:
        query (float, [head_dim]): Scale of query heads.
        key (float, [head_dim]): Scale of key heads.
        eps: Added to the mean square.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class ScaledRows(NamedTuple):
    """Rows of the residual stream, ready for a product with normalisation.

    Attributes:
        values (dtype, [num_tokens, size], device): The stream times the norm's weight.
        squares (float32, [num_parts, 16], device): Sums of squares of parts of each row of the
            stream; columns past the tokens are not read. The twin has one part.
        eps: Added to the mean square.
    """

    values: torch.Tensor
    squares: torch.Tensor
    eps: float
