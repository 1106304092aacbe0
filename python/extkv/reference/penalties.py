"""Changes to logits before sampling: allowed and bad tokens, logit bias, penalties."""

from __future__ import annotations

import itertools

import torch


def mask_allowed_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Set logits of tokens not allowed to -inf; see `extkv.kernels.penalties`."""
    for row, entries in _rows(row_offsets):
        tokens = token_ids[entries].to(torch.int64)
        kept = logits[row, tokens]
        logits[row] = -torch.inf
        logits[row, tokens] = kept


def mask_bad_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Set logits of bad tokens to -inf; see `extkv.kernels.penalties`."""
    for row, entries in _rows(row_offsets):
        logits[row, token_ids[entries].to(torch.int64)] = -torch.inf


def add_logit_bias(
    logits: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Add a number to logits of some tokens; see `extkv.kernels.penalties`."""
    for row, entries in _rows(row_offsets):
        logits[row, token_ids[entries].to(torch.int64)] += biases[entries]


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Make tokens of the prompt and the output less likely; see `extkv.kernels.penalties`."""
    for row, entries in _rows(row_offsets):
        tokens, counts = token_ids[entries].to(torch.int64), output_counts[entries]
        values = logits[row, tokens]
        values = torch.where(values > 0, values / repetition[row], values * repetition[row])
        values = values - frequency[row] * counts
        logits[row, tokens] = values - presence[row] * (counts > 0)


def _rows(row_offsets: torch.Tensor) -> list[tuple[int, slice]]:
    """Return each row that has entries, with the slice of its entries."""
    bounds = itertools.pairwise(row_offsets.tolist())
    return [(row, slice(*bound)) for row, bound in enumerate(bounds) if bound[0] < bound[1]]
