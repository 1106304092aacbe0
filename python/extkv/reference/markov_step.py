"""One step of a Markov head: bias of the previous token, added to base logits, and a draw."""

from __future__ import annotations

import torch
from torch.nn import functional

from extkv.drafting import MarkovDraw
from extkv.reference.philox import Stream, philox_uniforms
from extkv.reference.sampling import RowFlag, pick, softmax_weights
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
    return torch.addmm(logits, codes.to(torch.float32), projection.to(torch.float32).T)


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
    largest, drawn = logits.max(1)
    # A maximum is NaN if any number is, so that the usual row is read once.
    has_bad, values = ~(largest < torch.inf), logits
    if bool(has_bad.any()):
        values = without_bad_groups(logits)
        largest, drawn = values.max(1)
    has_none = largest == -torch.inf
    out.flags.copy_(has_bad * RowFlag.HAS_NAN + has_none * RowFlag.NO_CANDIDATE)
    log_sum_exp = torch.zeros_like(largest)
    is_sampled = None if temperature is None else temperature >= LEAST_TEMPERATURE
    if is_sampled is not None and bool(is_sampled.any()):
        assert temperature is not None
        assert seeds is not None
        assert positions is not None
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


def without_bad_groups(logits: torch.Tensor) -> torch.Tensor:
    """Return logits (float32, [num_rows, vocab_size]) with -inf in groups with a NaN or +inf."""
    groups = _in_groups(~(logits < torch.inf), 0.0).any(2)
    left_out = groups.repeat_interleave(GROUP_SIZE, dim=1)[:, : logits.shape[1]]
    return torch.where(left_out, -torch.inf, logits)


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
    num_rows = values.shape[0]
    weights = softmax_weights(values, values.amax(1)[:, None], temperature[:, None])
    masses = _in_groups(weights, 0.0).sum(2)
    group = pick(masses, uniforms[:, 0])
    rows = torch.arange(num_rows, device=values.device)
    # Relative to the group's own maximum: a far one would be subnormal relative to the row's.
    inside = _in_groups(values, -torch.inf)[rows, group]
    weights = softmax_weights(inside, inside.amax(1, keepdim=True), temperature[:, None])
    return group * GROUP_SIZE + pick(weights, uniforms[:, 1]), masses.sum(1)


def _in_groups(values: torch.Tensor, filling: float) -> torch.Tensor:
    """Return rows cut in groups, the last one filled up ([num_rows, num_groups, GROUP_SIZE])."""
    missing = -values.shape[1] % GROUP_SIZE
    if missing:
        values = functional.pad(values, (0, missing), value=filling)
    return values.reshape(values.shape[0], -1, GROUP_SIZE)
