"""Top-k, top-p and min-p of logits as one number per row: logits at or above it may be chosen."""

from __future__ import annotations

import torch

from extkv.sampling_params import LEAST_TEMPERATURE

# Enough for nearly every nucleus; a row that needs more orders its whole vocabulary.
_NUM_CANDIDATES = 1024


def logit_cutoff(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cut-off of each row; see `extkv.kernels.logit_cutoff.logit_cutoff`."""
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    out.fill_(-torch.inf)
    if num_rows == 0:
        return out
    values = logits.to(torch.float32)
    values = torch.where(values.isnan(), -torch.inf, values)
    largest = values.amax(1)
    is_sampled = (temperature >= LEAST_TEMPERATURE) & (largest > -torch.inf)
    if min_p is not None:
        lowest = largest + temperature * min_p.log()
        out.copy_(torch.where(is_sampled & (min_p > 0), lowest, out))
    if top_k is not None:
        rows = (is_sampled & (top_k >= 1) & (top_k < vocab_size)).nonzero()[:, 0]
        if rows.numel() > 0:
            counts = top_k[rows].to(torch.int64)
            ordered = values[rows].topk(int(counts.max()), dim=1).values
            out[rows] = torch.maximum(out[rows], ordered.gather(1, counts[:, None] - 1)[:, 0])
    if top_p is not None:
        rows = (is_sampled & (top_p < 1)).nonzero()[:, 0]
        if rows.numel() > 0:
            out[rows] = _nucleus(values[rows], out[rows], temperature[rows], top_p[rows])
    return out


def _nucleus(
    values: torch.Tensor, cutoff: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the smallest logit of the smallest set of largest logits whose mass reaches `top_p`.

    Args:
        values (float32, [num_rows, vocab_size], device): Logits.
        cutoff (float32, [num_rows], device): Logits below have no mass.
        temperature (float32, [num_rows], device): Positive.
        top_p (float32, [num_rows], device): Fraction of the mass at or above `cutoff`.
    """
    vocab_size = values.shape[1]
    largest = values.amax(1, keepdim=True)

    def mass_of(some: torch.Tensor) -> torch.Tensor:
        weights = ((some - largest) / temperature[:, None]).exp()
        weights = torch.where(some == largest, 1.0, weights)
        return torch.where((some >= cutoff[:, None]) & (some > -torch.inf), weights, 0.0)

    goal = top_p[:, None] * mass_of(values).sum(1, keepdim=True)
    for num_candidates in (min(_NUM_CANDIDATES, vocab_size), vocab_size):
        ordered = values.topk(num_candidates, dim=1).values
        reaches = mass_of(ordered).cumsum(1) >= goal
        if bool(reaches[:, -1].all()):
            break
    # Rounding may leave the whole row short of a `top_p` just below 1.
    reaches[:, -1] = True
    found = ordered.gather(1, reaches.to(torch.int32).argmax(1)[:, None])[:, 0]
    return torch.maximum(found, cutoff)
