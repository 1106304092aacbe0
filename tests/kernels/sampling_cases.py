"""Chi-square of drawn tokens, and the distribution that sampling parameters define, spelt out."""

from __future__ import annotations

import math

import torch


def filtered_probabilities(
    logits: torch.Tensor,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Return the distribution [vocab_size] of one row in float64: min-p, then top-k, then top-p.

    Tokens tied with the last one kept are kept.
    """
    scaled = logits.to(torch.float64) / temperature
    probabilities = scaled.softmax(0)
    scaled = scaled.masked_fill(probabilities < min_p * probabilities.max(), -torch.inf)
    if 0 < top_k < scaled.numel():
        kth = scaled.sort(descending=True).values[top_k - 1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if top_p < 1:
        probabilities = scaled.softmax(0)
        ordered = probabilities.sort(descending=True).values
        above = ordered.cumsum(0) - ordered  # mass of strictly earlier tokens
        smallest = ordered[above < top_p].min() if top_p > 0 else ordered[0]
        scaled = scaled.masked_fill(probabilities < smallest, -torch.inf)
    return scaled.softmax(0)


def assert_follows(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Fail if the tokens are not drawn from the distribution: chi-square, one error in 10,000."""
    counts = torch.bincount(tokens.cpu(), minlength=probabilities.numel()).to(torch.float64)
    expected = probabilities.cpu() * tokens.numel()
    assert int(counts[expected == 0].sum()) == 0, "a token of probability 0 was drawn"
    # Rare tokens share a cell, so that every cell expects at least ten.
    is_rare = expected < 10
    found = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    wanted = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    if wanted[-1] < 1:
        found, wanted = found[:-1], wanted[:-1]
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    assert statistic <= chi_square_limit(degrees), (statistic, degrees)


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds once in 10,000 times (Wilson and Hilferty)."""
    if degrees < 1:
        return 1e-9
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * math.sqrt(part)) ** 3
