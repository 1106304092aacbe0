"""Choose one token per row of logits: greedily, or at random from a Philox key alone.

Inverse of the distribution function in two steps with two uniforms of one Philox call: the first
picks a tile of the vocabulary by its mass, the second a token inside it. So the logits are read
once, plus one tile, and no random number per logit is made. Tiles are 2048 tokens whatever the
batch: a row's token depends on its logits, parameters and key, and on nothing else.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import enum

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import check_tensor, on_device_of, padded_to_power_of_two
from extkv.kernels.logit_cutoff import (
    LEAST_TEMPERATURE,
    check_logits,
    check_rows,
    load_or,
    softmax_weight,
)
from extkv.kernels.philox import Stream, uniform_of, words_of

VOCAB_TILE = 2048


class RowFlag(enum.IntFlag):
    """What is wrong with a row of logits; 0 if nothing."""

    HAS_NAN = 1
    NO_CANDIDATE = 2


@triton.jit
def pick(weights, uniform, SIZE: tl.constexpr):
    """Return the first index whose cumulative weight exceeds uniform * total, of positive weight.

    Rounding may leave none: then the last index of positive weight, and 0 if there is none.
    """
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, axis=0)
    # A parallel scan need not be monotone in its last bits: the total is its maximum.
    total = tl.max(cumulative, axis=0)
    is_possible = weights > 0.0
    first = tl.min(tl.where(is_possible & (cumulative > uniform * total), index, SIZE), axis=0)
    last = tl.max(tl.where(is_possible, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _load_tile(logits_ptr, row, tile, logits_stride, vocab_size, VOCAB_TILE: tl.constexpr):
    token = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    row_ptr = logits_ptr + row * logits_stride
    values = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf"))
    return token, values.to(tl.float32)


@triton.jit(
    do_not_specialize=["temperature_stride", "num_rows"],
    do_not_specialize_on_alignment=["temperature_ptr", "cutoff_ptr", "statistics_ptr"],
)
def tile_statistics_kernel(
    statistics_ptr,
    logits_ptr,
    temperature_ptr,
    cutoff_ptr,
    temperature_stride,
    logits_stride,
    num_rows,
    vocab_size,
    VOCAB_TILE: tl.constexpr,
):
    """Per tile: maximum, its first token, sum of exp((logit - maximum) / T), and a NaN mark.

    The four [num_rows, num_tiles] arrays lie one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token, values = _load_tile(logits_ptr, row, tile, logits_stride, vocab_size, VOCAB_TILE)
    is_nan = values != values  # noqa: PLR0124 NaN
    values = tl.where(is_nan, -float("inf"), values)
    largest = tl.max(values, axis=0)
    # -inf ties are won by a token of the row: lanes past it have larger numbers.
    argmax = tl.min(tl.where(values == largest, token, 0x7FFFFFFF), axis=0)

    size = num_rows.to(tl.int64) * tl.num_programs(1)
    statistic_ptr = statistics_ptr + row * tl.num_programs(1) + tile
    # Token ids are below 2^24, exact in float32.
    tl.store(statistic_ptr + size, argmax.to(tl.float32))
    tl.store(statistic_ptr + 3 * size, tl.max(tl.where(is_nan, 1.0, 0.0), axis=0))
    if temperature_ptr is None:
        tl.store(statistic_ptr, largest)
    else:
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        is_greedy = temperature < LEAST_TEMPERATURE
        cutoff = load_or(cutoff_ptr, row, -float("inf"))
        inverse_temperature = 1.0 / tl.where(is_greedy, 1.0, temperature)
        weights = softmax_weight(values, largest, inverse_temperature)
        total = tl.sum(tl.where(values >= cutoff, weights, 0.0), axis=0)
        tl.store(statistic_ptr, largest)
        tl.store(statistic_ptr + 2 * size, total)


@triton.jit(
    do_not_specialize=[
        "temperature_stride",
        "seed_stride",
        "position_stride",
        "stream",
        "num_rows",
    ],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "flags_ptr",
        "statistics_ptr",
        "temperature_ptr",
        "cutoff_ptr",
        "seeds_ptr",
        "positions_ptr",
    ],
)
def _pick_kernel(
    tokens_ptr,
    flags_ptr,
    statistics_ptr,
    logits_ptr,
    temperature_ptr,
    cutoff_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_stride,
    seed_stride,
    position_stride,
    stream,
    logits_stride,
    num_rows,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
):
    """Token of a row: its argmax, or pick(tile masses, u0), then pick(weights in the tile, u1)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_PADDED)
    size = num_rows.to(tl.int64) * NUM_TILES
    statistic_ptrs = statistics_ptr + row * NUM_TILES + tiles
    is_tile = tiles < NUM_TILES
    maxima = tl.load(statistic_ptrs, mask=is_tile, other=-float("inf"))
    largest = tl.max(maxima, axis=0)
    argmaxes = tl.load(statistic_ptrs + size, mask=is_tile, other=0.0)
    is_nan = tl.load(statistic_ptrs + 3 * size, mask=is_tile, other=0.0)
    has_nan = tl.max(is_nan, axis=0) > 0.0
    has_none = largest == -float("inf")
    flag = tl.where(has_nan, 1, 0) + tl.where(has_none, 2, 0)
    tl.store(flags_ptr + row, flag)
    first_tile = tl.min(tl.where(is_tile & (maxima == largest), tiles, TILES_PADDED), axis=0)
    argmax = tl.max(tl.where(tiles == first_tile, argmaxes, 0.0), axis=0)
    tl.store(tokens_ptr + row, argmax.to(tl.int64))

    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        if (temperature >= LEAST_TEMPERATURE) & (largest > -float("inf")):
            inverse_temperature = 1.0 / temperature
            seed = tl.load(seeds_ptr + row * seed_stride)
            position = tl.load(positions_ptr + row * position_stride)
            word, second_word, _, _ = words_of(seed, position, position * 0 + stream, position * 0)
            sums = tl.load(statistic_ptrs + 2 * size, mask=is_tile, other=0.0)
            masses = sums * softmax_weight(maxima, largest, inverse_temperature)
            tile = pick(masses, uniform_of(word), TILES_PADDED)

            _, values = _load_tile(logits_ptr, row, tile, logits_stride, vocab_size, VOCAB_TILE)
            values = tl.where(values != values, -float("inf"), values)  # noqa: PLR0124 NaN
            tile_max = tl.max(values, axis=0)
            cutoff = load_or(cutoff_ptr, row, -float("inf"))
            weights = softmax_weight(values, tile_max, inverse_temperature)
            weights = tl.where(values >= cutoff, weights, 0.0)
            token = tile * VOCAB_TILE + pick(weights, uniform_of(second_word), VOCAB_TILE)
            tl.store(tokens_ptr + row, token.to(tl.int64))


def sampling_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Return how many float32 elements the workspace of `sample_tokens` needs."""
    return 4 * num_rows * -(-vocab_size // VOCAB_TILE)


def _checked_outputs(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, device = logits.shape[0], logits.device
    if out is None:
        return (
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )
    tokens, flags = out
    check_tensor("tokens", tokens, [torch.int64], [num_rows], device, is_last_dim_dense=True)
    check_tensor("flags", flags, [torch.int32], [num_rows], device, is_last_dim_dense=True)
    return out


def _checked_workspace(logits: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
    needed = sampling_workspace_size(*logits.shape)
    if workspace is None:
        return torch.empty(needed, dtype=torch.float32, device=logits.device)
    check_tensor(
        "workspace", workspace, [torch.float32], [None], logits.device, is_last_dim_dense=True
    )
    if workspace.numel() < needed:
        raise InvalidArgumentError(
            f"workspace must have at least {needed} elements, got {workspace.numel()}"
        )
    return workspace


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    cutoff: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    stream: int,
    workspace: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // VOCAB_TILE)
    strides = [0 if t is None else t.stride(0) for t in (temperature, seeds, positions)]
    with on_device_of(logits):
        tile_statistics_kernel[num_rows, num_tiles](
            workspace,
            logits,
            temperature,
            cutoff,
            strides[0],
            logits.stride(0),
            num_rows,
            vocab_size,
            VOCAB_TILE=VOCAB_TILE,
            num_warps=4,
        )
        _pick_kernel[(num_rows,)](
            *out,
            workspace,
            logits,
            temperature,
            cutoff,
            seeds,
            positions,
            *strides,
            int(stream),
            logits.stride(0),
            num_rows,
            vocab_size,
            NUM_TILES=num_tiles,
            TILES_PADDED=padded_to_power_of_two(num_tiles),
            VOCAB_TILE=VOCAB_TILE,
            num_warps=4,
        )


def argmax_tokens(
    logits: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token with the largest logit of each row, the leftmost one of equals.

    NaN never wins: it counts as -inf, and flags the row. A row of nothing else gives token 0.

    Args:
        logits (float, [num_rows, vocab_size], device): Rows of any stride, dense tokens.
        workspace (float32, [n], device): At least `sampling_workspace_size` elements; None
            allocates them.
        out (tuple): Receives tokens and flags; dense.

    Returns:
        tokens (int64, [num_rows], device): Token of each row, in [0, vocab_size).
        flags (int32, [num_rows], device): `RowFlag` bits of each row; 0 where all is well.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    check_logits(logits)
    out = _checked_outputs(logits, out)
    workspace = _checked_workspace(logits, workspace)
    if logits.shape[0] > 0:
        _launch(logits, None, None, None, None, 0, workspace, out)
    return out


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    cutoff: torch.Tensor | None = None,
    stream: int = Stream.BONUS,
    workspace: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature), cut off below `cutoff`.

    A row's draw is a function of its logits, temperature, cut-off, seed and position and of the
    stream: not of its place, of the batch or of other rows. The token always has a positive
    probability, also after float32 rounding. Rows with a temperature below 1e-5 are greedy, as
    `argmax_tokens`. Flagged rows get a token that must not be used.

    Args:
        logits (float, [num_rows, vocab_size], device): Rows of any stride, dense tokens.
        temperature (float32, [num_rows], device): Any stride.
        seeds (int64, [num_rows], device): Seed of each row's request. Any stride.
        positions (int64, [num_rows], device): Absolute position of the drawn token. Any stride.
        cutoff (float32, [num_rows], device): Smallest logit that may be drawn, from `logit_cutoff`;
            None for none. Dense.
        stream: What the draw is for; an ordinary token is a bonus token of zero drafts.
        workspace (float32, [n], device): At least `sampling_workspace_size` elements; None
            allocates them.
        out (tuple): Receives tokens and flags; dense.

    Returns:
        tokens (int64, [num_rows], device): Token of each row, in [0, vocab_size).
        flags (int32, [num_rows], device): `RowFlag` bits of each row; 0 where all is well.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = check_logits(logits)
    num_rows = logits.shape[0]
    check_rows({"temperature": temperature}, num_rows, device)
    check_tensor("seeds", seeds, [torch.int64], [num_rows], device)
    check_tensor("positions", positions, [torch.int64], [num_rows], device)
    if cutoff is not None:
        check_tensor("cutoff", cutoff, [torch.float32], [num_rows], device, is_last_dim_dense=True)
    out = _checked_outputs(logits, out)
    workspace = _checked_workspace(logits, workspace)
    if num_rows > 0:
        _launch(logits, temperature, cutoff, seeds, positions, stream, workspace, out)
    return out
