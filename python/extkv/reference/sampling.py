"""Choose one token per row of logits: greedily, or at random from a Philox key alone."""

from __future__ import annotations

import enum

import torch
from torch.nn import functional

from extkv.reference.philox import Stream, philox_uniforms
from extkv.sampling_params import LEAST_TEMPERATURE

VOCAB_TILE = 2048
_LEAST = torch.finfo(torch.float32).min


class RowFlag(enum.IntFlag):
    """What is wrong with a row of logits; 0 if nothing."""

    HAS_NAN = 1
    NO_CANDIDATE = 2


def sampling_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Return how many float32 elements the kernels' workspace needs."""
    return 4 * num_rows * -(-vocab_size // VOCAB_TILE)


def argmax_tokens(
    logits: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,  # noqa: ARG001 division of work, not meaning
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit's token per row; see `extkv.kernels.sampling.argmax_tokens`."""
    tokens, flags = _outputs(logits, out)
    # A maximum is NaN if any number is, so that the usual row is read once.
    largest, found = logits.max(dim=1)
    has_nan = largest.isnan()
    if bool(has_nan.any()):
        cleaned = torch.where(logits.isnan(), -torch.inf, logits)
        largest, found = cleaned.max(dim=1)
    tokens.copy_(found)
    flags.copy_(has_nan * RowFlag.HAS_NAN + (largest == -torch.inf) * RowFlag.NO_CANDIDATE)
    return tokens, flags


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    cutoff: torch.Tensor | None = None,
    stream: int = Stream.BONUS,
    workspace: torch.Tensor | None = None,  # noqa: ARG001 division of work, not meaning
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row; see `extkv.kernels.sampling.sample_tokens`."""
    tokens, flags = argmax_tokens(logits, out=out)
    rows = ((temperature >= LEAST_TEMPERATURE) & (flags & RowFlag.NO_CANDIDATE == 0)).nonzero()
    rows = rows[:, 0]
    if rows.numel() == 0:
        return tokens, flags
    values = logits[rows].to(torch.float32)
    values = torch.where(values.isnan(), -torch.inf, values)
    if cutoff is not None:
        values = torch.where(values >= cutoff[rows, None], values, -torch.inf)
    tokens[rows] = draw_from_softmax(
        values, temperature[rows], seeds[rows], positions[rows], stream
    )
    return tokens, flags


def draw_from_softmax(
    values: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
) -> torch.Tensor:
    """Draw from softmax(values / T): one uniform picks a tile of the row, another one inside it.

    Args:
        values (float32, [num_rows, vocab_size], device): No NaN, and not -inf alone.
        temperature (float32, [num_rows], device): Positive.
        seeds (int64, [num_rows], device): Seed of each row's request.
        positions (int64, [num_rows], device): Absolute position of the drawn token.
        stream: What the draw is for.

    Returns:
        Tensor (int64, [num_rows], device).
    """
    num_rows, vocab_size = values.shape
    uniforms = philox_uniforms(seeds, positions, stream, torch.zeros_like(seeds))
    width = min(VOCAB_TILE, vocab_size)
    tiles = functional.pad(values, (0, -vocab_size % width), value=-torch.inf)
    tiles = tiles.view(num_rows, -1, width)
    tile_max = tiles.amax(2)  # [num_rows, num_tiles]
    tile_sum = softmax_weights(tiles, tile_max[:, :, None], temperature[:, None, None]).sum(2)
    row_max = tile_max.amax(1, keepdim=True)
    masses = tile_sum * softmax_weights(tile_max, row_max, temperature[:, None])
    tile = pick(masses, uniforms[:, 0])
    rows = torch.arange(num_rows, device=values.device)
    weights = softmax_weights(tiles[rows, tile], tile_max[rows, tile, None], temperature[:, None])
    return tile * width + pick(weights, uniforms[:, 1])


def softmax_weights(
    values: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return exp((value - largest) / T): 0 for -inf, and 1 at the maximum even if that is +inf."""
    is_infinite = largest == torch.inf
    # Where all values are -inf, so is the largest, and their difference would be NaN.
    weights = (values - largest.clamp(min=_LEAST)).mul_(1.0 / temperature).exp_()
    if not bool(is_infinite.any()):
        return weights
    weights = torch.where(is_infinite & (values == largest), 1.0, weights)
    return torch.where(values == -torch.inf, 0.0, weights)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds `uniform * total`.

    An index of weight 0 is never returned: where rounding leaves none, it is the last one with
    weight.

    Args:
        weights (float32, [num_rows, n], device): Not negative; each row has a positive one.
        uniforms (float32, [num_rows], device): In [0, 1].

    Returns:
        Tensor (int64, [num_rows], device).
    """
    cumulative = weights.cumsum(1)
    is_possible = weights > 0
    exceeds = is_possible & (cumulative > uniforms[:, None] * cumulative[:, -1:])
    first = exceeds.to(torch.int32).argmax(1)
    last = weights.shape[1] - 1 - is_possible.flip(1).to(torch.int32).argmax(1)
    return torch.where(exceeds.any(1), first, last)


def _outputs(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is not None:
        return out
    num_rows, device = logits.shape[0], logits.device
    return (
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
