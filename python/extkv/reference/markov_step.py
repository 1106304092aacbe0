"""One step of a Markov head: bias of the previous token, added to base logits, and a draw."""

from __future__ import annotations

import torch
from torch.nn import functional

from extkv.drafting import MarkovDraw
from extkv.reference.philox import Stream, philox_uniforms
from extkv.reference.sampling import RowFlag, pick
from extkv.sampling_params import LEAST_TEMPERATURE

# Tokens that are drawn from together; as in the kernels.
GROUP_SIZE = 64


def markov_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Return how many float32 elements the kernels' workspace needs."""
    return num_rows * -(-vocab_size // GROUP_SIZE)


def markov_logits(
    base_logits: torch.Tensor,
    projection: torch.Tensor | None,
    *,
    tokens: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return draft logits (float32, [num_rows, vocab_size]); arguments as `markov_step`."""
    logits = base_logits.to(torch.float32)
    if projection is None:
        return logits
    if codes is None:
        assert tokens is not None
        assert embedding is not None
        codes = embedding[tokens.clamp(0, embedding.shape[0] - 1)]
    return logits + codes.to(torch.float32) @ projection.to(torch.float32).T


def markov_step(
    base_logits: torch.Tensor,
    projection: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    slot: int,
    tokens: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,  # noqa: ARG001 division of work, not meaning
    out: MarkovDraw | None = None,
    settings: object = None,  # noqa: ARG001 division of work, not meaning
) -> MarkovDraw:
    """Draw a draft token per row; see `extkv.kernels.markov_step.markov_step`."""
    num_rows, device = base_logits.shape[0], base_logits.device
    if out is None:
        dtypes = (torch.int64, torch.float32, torch.float32, torch.int32)
        out = MarkovDraw(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))
    if num_rows == 0:
        return out
    logits = markov_logits(base_logits, projection, tokens=tokens, embedding=embedding, codes=codes)
    has_bad, values = without_bad_groups(logits)
    largest, drawn = values.max(1)
    has_none = largest == -torch.inf
    out.flags.copy_(has_bad * RowFlag.HAS_NAN + has_none * RowFlag.NO_CANDIDATE)
    log_sum_exp = torch.zeros_like(largest)
    if temperature is not None:
        assert seeds is not None
        assert positions is not None
        is_sampled = temperature >= LEAST_TEMPERATURE
        heat = torch.where(is_sampled, temperature, 1.0)
        uniforms = philox_uniforms(seeds, positions, Stream.DRAFT, torch.full_like(seeds, slot))
        found, masses = draw_in_groups(values, heat, uniforms)
        log_sum_exp = torch.where(is_sampled, largest / heat + masses.log(), 0.0)
        drawn = torch.where(is_sampled & ~has_none, found, drawn)
    chosen = values.gather(1, drawn[:, None])[:, 0]
    # Its law is not that of the logits: verification takes the draft for none.
    out.logits.copy_(torch.where(has_bad, torch.nan, chosen))
    out.log_sum_exp.copy_(log_sum_exp)
    if draft_to_target is not None:
        drawn = drawn + draft_to_target[drawn]
    out.tokens.copy_(drawn)
    return out


def without_bad_groups(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Set groups with a NaN or +inf to -inf.

    Args:
        logits (float32, [num_rows, vocab_size], device): Logits; kept.

    Returns:
        Which rows have such a group (bool, [num_rows]), and the logits.
    """
    is_bad = ~(logits < torch.inf)
    has_bad = is_bad.any(1)
    if not bool(has_bad.any()):
        return has_bad, logits
    num_rows, vocab_size = logits.shape
    padded = functional.pad(is_bad, (0, -vocab_size % GROUP_SIZE))
    groups = padded.view(num_rows, -1, GROUP_SIZE).any(2)
    left_out = groups.repeat_interleave(GROUP_SIZE, dim=1)[:, :vocab_size]
    return has_bad, torch.where(left_out, -torch.inf, logits)


def draw_in_groups(
    values: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from softmax(values / T): a group, then a token of it, a uniform for each.

    Args:
        values (float32, [num_rows, vocab_size], device): No NaN, no +inf.
        temperature (float32, [num_rows], device): Positive.
        uniforms (float32, [num_rows, 2 or more], device): In (0, 1).

    Returns:
        Tokens (int64, [num_rows]), of no meaning where all values are -inf, and sums of
        exp((value - largest) / T) (float32, [num_rows]).
    """
    num_rows, vocab_size = values.shape
    weights = softmax_weights(values, values.amax(1)[:, None], temperature[:, None])
    groups = functional.pad(weights, (0, -vocab_size % GROUP_SIZE))
    masses = groups.view(num_rows, -1, GROUP_SIZE).sum(2)
    group = pick(masses, uniforms[:, 0])
    # Relative to the group's own maximum: a far one would be subnormal relative to the row's.
    tokens = group[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=values.device)
    inside = values.gather(1, tokens.clamp(max=vocab_size - 1))
    inside = torch.where(tokens < vocab_size, inside, -torch.inf)
    weights = softmax_weights(inside, inside.amax(1, keepdim=True), temperature[:, None])
    return group * GROUP_SIZE + pick(weights, uniforms[:, 1]), masses.sum(1)


def softmax_weights(
    values: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return exp((value - largest) / T): 0 for -inf, and 1 at the maximum even if that is +inf."""
    weights = ((values - largest) * (1.0 / temperature)).exp()
    weights = torch.where(values == largest, 1.0, weights)
    return torch.where(values == -torch.inf, 0.0, weights)
