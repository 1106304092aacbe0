"""One step of a Markov head: bias of the previous token, added to base logits, and a draw.

Neither bias nor logits reach memory. One kernel reads the projection once for the whole batch and
leaves maximum, first argmax and sum of exponentials of each tile; a second picks a tile by its mass
and computes only that tile again. A row takes one Philox call, as in `sample_tokens`.

A draw is keyed by (seed, position, stream draft, slot). The slot is needed: after a rejection the
next round drafts the same positions again, and block verification looks at all drafts of a round,
so a draw that came back would be correlated with what was decided.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.drafting import MarkovDraw
from extkv.errors import InvalidArgumentError
from extkv.kernels.drafts.logits import (
    DRAFT_VOCAB_TILE,
    PICK_DEPTH_TILE,
    code_offset,
    draft_logits_of_row,
    draft_logits_tile,
)
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)
from extkv.kernels.logit_cutoff import (
    LEAST_TEMPERATURE,
    MAX_VOCAB_SIZE,
    check_rows,
    softmax_weight,
)
from extkv.kernels.philox import Stream, uniform_of, words_of
from extkv.kernels.sampling import pick

# float16 is not among them: neither checkpoints nor engines hold a head in it.
HEAD_DTYPES = (torch.bfloat16, torch.float32)
_DRAFT_STREAM = tl.constexpr(int(Stream.DRAFT))


@triton.jit(
    do_not_specialize=["num_rows", "num_embeddings", "temperature_stride", "tokens_stride"],
    do_not_specialize_on_alignment=["temperature_ptr", "tokens_ptr"],
)
def _markov_tiles_kernel(
    statistics_ptr,
    base_ptr,
    projection_ptr,
    codes_ptr,
    tokens_ptr,
    temperature_ptr,
    base_stride_row,
    base_stride_column,
    projection_stride,
    codes_stride,
    tokens_stride,
    temperature_stride,
    num_rows,
    num_embeddings,
    vocab_size,
    RANK: tl.constexpr,
    IS_REVERSED: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """Per row and tile: maximum, its first column, sum of exp((logit - maximum) / T).

    The three [num_rows, num_tiles] arrays lie one after the other. A tile with a NaN has -1 minus
    its column. Successive steps read the projection in opposite orders, so that a step begins with
    what the L2 still holds of the one before.
    """
    num_tiles = tl.cdiv(vocab_size, VOCAB_TILE)
    num_row_tiles = tl.cdiv(num_rows, ROW_TILE)
    tile = tl.program_id(0) // num_row_tiles
    tile = num_tiles - 1 - tile if IS_REVERSED else tile
    row = (tl.program_id(0) % num_row_tiles * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    is_row = row < num_rows
    column = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    is_column = column < vocab_size
    if tokens_ptr is None:
        codes_offset = row * codes_stride
    else:
        token = tl.load(tokens_ptr + row * tokens_stride, mask=is_row, other=0)
        codes_offset = code_offset(token, num_embeddings, codes_stride)
    logits = draft_logits_tile(
        column,
        is_column,
        is_row,
        base_ptr,
        row * base_stride_row,
        base_stride_column,
        projection_ptr,
        projection_stride,
        codes_ptr,
        codes_offset,
        RANK,
        VOCAB_TILE,
        ROW_TILE,
        DEPTH_TILE,
    )
    is_nan = logits != logits  # noqa: PLR0124 NaN
    has_nan = tl.max(tl.where(is_nan, 1, 0), axis=0) > 0
    values = tl.where(is_nan, -float("inf"), logits)
    largest = tl.max(values, axis=0)
    is_largest = values == largest[None, :]
    argmax = tl.min(tl.where(is_largest, column[:, None], 0x7FFFFFFF), axis=0)
    size = num_rows.to(tl.int64) * num_tiles
    statistic_ptrs = statistics_ptr + row * num_tiles + tile
    tl.store(statistic_ptrs, largest, mask=is_row)
    # Columns are below 2^24, exact in float32.
    mark = tl.where(has_nan, -1 - argmax, argmax).to(tl.float32)
    tl.store(statistic_ptrs + size, mark, mask=is_row)
    if temperature_ptr is not None:
        heat = tl.load(temperature_ptr + row * temperature_stride, mask=is_row, other=1.0)
        inverse = 1.0 / tl.where(heat < LEAST_TEMPERATURE, 1.0, heat)
        weights = softmax_weight(values, largest[None, :], inverse[None, :])
        tl.store(statistic_ptrs + 2 * size, tl.sum(weights, axis=0), mask=is_row)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_embeddings",
        "tokens_stride",
        "temperature_stride",
        "seeds_stride",
        "positions_stride",
        "drawn_stride",
        "logits_stride",
        "log_sum_exp_stride",
        "flags_stride",
        "slot",
    ],
    do_not_specialize_on_alignment=[
        "drawn_ptr",
        "logits_ptr",
        "log_sum_exp_ptr",
        "flags_ptr",
        "tokens_ptr",
        "temperature_ptr",
        "seeds_ptr",
        "positions_ptr",
        "draft_to_target_ptr",
    ],
)
def _markov_pick_kernel(
    drawn_ptr,
    logits_ptr,
    log_sum_exp_ptr,
    flags_ptr,
    statistics_ptr,
    base_ptr,
    projection_ptr,
    codes_ptr,
    tokens_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    draft_to_target_ptr,
    drawn_stride,
    logits_stride,
    log_sum_exp_stride,
    flags_stride,
    base_stride_row,
    base_stride_column,
    projection_stride,
    codes_stride,
    tokens_stride,
    temperature_stride,
    seeds_stride,
    positions_stride,
    slot,
    num_rows,
    num_embeddings,
    vocab_size,
    RANK: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """Token of a row: its argmax, or pick(tile masses, u0), then pick(weights in the tile, u1)."""
    row = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(vocab_size, VOCAB_TILE)
    tiles = tl.arange(0, TILES_PADDED)
    is_tile = tiles < num_tiles
    size = num_rows.to(tl.int64) * num_tiles
    statistic_ptrs = statistics_ptr + row * num_tiles + tiles
    maxima = tl.load(statistic_ptrs, mask=is_tile, other=-float("inf"))
    marks = tl.load(statistic_ptrs + size, mask=is_tile, other=0.0)
    largest = tl.max(maxima, axis=0)
    first_tile = tl.min(tl.where(is_tile & (maxima == largest), tiles, TILES_PADDED), axis=0)
    columns = tl.where(marks < 0.0, -1.0 - marks, marks)
    token = tl.max(tl.where(tiles == first_tile, columns, 0.0), axis=0).to(tl.int32)
    has_nan = tl.min(marks, axis=0) < 0.0
    flag = tl.where(has_nan, 1, 0) + tl.where(largest == -float("inf"), 2, 0)
    logit = largest
    log_sum_exp = tl.full((), 0.0, tl.float32)
    if temperature_ptr is not None:
        heat = tl.load(temperature_ptr + row * temperature_stride)
        if heat >= LEAST_TEMPERATURE:
            inverse = 1.0 / heat
            sums = tl.load(statistic_ptrs + 2 * size, mask=is_tile, other=0.0)
            masses = sums * softmax_weight(maxima, largest, inverse)
            log_sum_exp = largest * inverse + tl.log(tl.sum(masses, axis=0))
            if largest > -float("inf"):
                seed = tl.load(seeds_ptr + row * seeds_stride)
                position = tl.load(positions_ptr + row * positions_stride)
                lane = position * 0 + slot
                word, second_word, _, _ = words_of(seed, position, lane * 0 + _DRAFT_STREAM, lane)
                tile = pick(masses, uniform_of(word), TILES_PADDED)
                column = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
                if tokens_ptr is None:
                    offset = row * codes_stride
                else:
                    previous = tl.load(tokens_ptr + row * tokens_stride)
                    offset = code_offset(previous, num_embeddings, codes_stride)
                values = draft_logits_of_row(
                    column,
                    column < vocab_size,
                    base_ptr + row * base_stride_row,
                    base_stride_column,
                    projection_ptr,
                    projection_stride,
                    codes_ptr,
                    offset,
                    RANK,
                    VOCAB_TILE,
                    DEPTH_TILE,
                )
                values = tl.where(values != values, -float("inf"), values)  # noqa: PLR0124 NaN
                weights = softmax_weight(values, tl.max(values, axis=0), inverse)
                token = pick(weights, uniform_of(second_word), VOCAB_TILE)
                is_token = tl.arange(0, VOCAB_TILE) == token
                logit = tl.max(tl.where(is_token, values, -float("inf")), axis=0)
                token += tile * VOCAB_TILE
    drawn = token.to(tl.int64)
    if draft_to_target_ptr is not None:
        drawn += tl.load(draft_to_target_ptr + drawn).to(tl.int64)
    tl.store(drawn_ptr + row * drawn_stride, drawn)
    tl.store(logits_ptr + row * logits_stride, logit)
    tl.store(log_sum_exp_ptr + row * log_sum_exp_stride, log_sum_exp)
    tl.store(flags_ptr + row * flags_stride, flag)


class MarkovSettings(NamedTuple):
    """Tiles of a launch."""

    row_tile: int
    depth_tile: int
    num_warps: int
    num_stages: int


_SETTINGS = (
    MarkovSettings(32, 64, 4, 4),
    MarkovSettings(64, 64, 4, 4),
    MarkovSettings(128, 64, 8, 3),
)
_FLOAT32_SETTINGS = MarkovSettings(32, 32, 4, 3)


def markov_settings(num_rows: int, dtype: torch.dtype) -> MarkovSettings:
    """Return the tiles for a batch; they do not change which token a row draws."""
    if dtype == torch.float32:
        return _FLOAT32_SETTINGS
    return next((some for some in _SETTINGS if num_rows <= some.row_tile), _SETTINGS[-1])


def markov_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Return how many float32 elements the workspace of `markov_step` needs."""
    return 3 * num_rows * -(-vocab_size // DRAFT_VOCAB_TILE)


class _Step(NamedTuple):
    """Checked arguments of a step."""

    base_logits: torch.Tensor
    projection: torch.Tensor | None
    codes: torch.Tensor | None
    tokens: torch.Tensor | None
    temperature: torch.Tensor | None
    seeds: torch.Tensor | None
    positions: torch.Tensor | None
    slot: int
    draft_to_target: torch.Tensor | None


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def launch(step: _Step, workspace: torch.Tensor, out: MarkovDraw, settings: MarkovSettings) -> None:
    """Run both kernels on checked arguments."""
    num_rows, vocab_size = step.base_logits.shape
    num_tiles = -(-vocab_size // DRAFT_VOCAB_TILE)
    num_row_tiles = -(-num_rows // settings.row_tile)
    rank = 1 if step.codes is None else step.codes.shape[1]
    num_embeddings = 1 if step.codes is None else step.codes.shape[0]
    depth_tile = max(min(settings.depth_tile, padded_to_power_of_two(rank)), 16)
    with on_device_of(step.base_logits):
        _markov_tiles_kernel[(num_row_tiles * num_tiles,)](
            workspace,
            step.base_logits,
            step.projection,
            step.codes,
            step.tokens,
            step.temperature,
            *step.base_logits.stride(),
            _stride(step.projection),
            _stride(step.codes),
            _stride(step.tokens),
            _stride(step.temperature),
            num_rows,
            num_embeddings,
            vocab_size,
            RANK=rank,
            IS_REVERSED=step.slot % 2 == 1,
            VOCAB_TILE=DRAFT_VOCAB_TILE,
            ROW_TILE=settings.row_tile,
            DEPTH_TILE=depth_tile,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        )
        _markov_pick_kernel[(num_rows,)](
            *out,
            workspace,
            step.base_logits,
            step.projection,
            step.codes,
            step.tokens,
            step.temperature,
            step.seeds,
            step.positions,
            step.draft_to_target,
            *(tensor.stride(0) for tensor in out),
            *step.base_logits.stride(),
            _stride(step.projection),
            _stride(step.codes),
            _stride(step.tokens),
            _stride(step.temperature),
            _stride(step.seeds),
            _stride(step.positions),
            step.slot,
            num_rows,
            num_embeddings,
            vocab_size,
            RANK=rank,
            VOCAB_TILE=DRAFT_VOCAB_TILE,
            TILES_PADDED=padded_to_power_of_two(num_tiles),
            DEPTH_TILE=min(PICK_DEPTH_TILE, padded_to_power_of_two(rank)),
            num_warps=4,
        )


def _check_head(
    base_logits: torch.Tensor,
    projection: torch.Tensor | None,
    tokens: torch.Tensor | None,
    embedding: torch.Tensor | None,
    codes: torch.Tensor | None,
) -> torch.Tensor | None:
    """Check the Markov head and return the tensor that holds the codes, None for no head."""
    device, (num_rows, vocab_size) = base_logits.device, base_logits.shape
    given = [
        name
        for name, tensor in (("tokens", tokens), ("embedding", embedding), ("codes", codes))
        if tensor is not None
    ]
    if projection is None:
        if given:
            raise InvalidArgumentError(f"{given[0]} needs a projection, got none")
        return None
    if given not in (["tokens", "embedding"], ["codes"]):
        raise InvalidArgumentError(
            "a projection needs tokens and embedding, or codes, got "
            f"{' and '.join(given) or 'none'}"
        )
    check_tensor(
        "projection", projection, HEAD_DTYPES, [vocab_size, None], device, is_last_dim_dense=True
    )
    dtype, rank = projection.dtype, projection.shape[1]
    if rank < 1:
        raise InvalidArgumentError("rank of the projection must be at least 1, got 0")
    if codes is not None:
        check_tensor("codes", codes, [dtype], [num_rows, rank], device, is_last_dim_dense=True)
        return codes
    assert tokens is not None
    assert embedding is not None
    check_tensor("tokens", tokens, [torch.int64], [num_rows], device)
    check_tensor("embedding", embedding, [dtype], [None, rank], device, is_last_dim_dense=True)
    if embedding.shape[0] < 1:
        raise InvalidArgumentError("embedding must have at least 1 row, got 0")
    return embedding


def _checked_out(num_rows: int, device: torch.device, out: MarkovDraw | None) -> MarkovDraw:
    dtypes = (torch.int64, torch.float32, torch.float32, torch.int32)
    if out is None:
        return MarkovDraw(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))
    for name, tensor, dtype in zip(MarkovDraw._fields, out, dtypes, strict=True):
        check_tensor(f"out.{name}", tensor, [dtype], [num_rows], device)
    return out


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
    workspace: torch.Tensor | None = None,
    out: MarkovDraw | None = None,
    settings: MarkovSettings | None = None,
) -> MarkovDraw:
    """Draw a draft token per row from softmax((base + projection . code) / temperature).

    A row's draw is a function of its logits, code, temperature, seed, position and slot: not of its
    place or of other rows. Rows below a temperature of 1e-5 take the largest logit, the leftmost of
    equals, as all rows do without `temperature`. NaN counts as -inf and flags the row; a row of
    nothing else gives draft token 0, flagged. May be captured once `workspace` and `out` are given.

    Args:
        base_logits (float, [num_rows, vocab_size], device): Logits of the slot, of the draft's
            vocabulary, any strides. Columns no target token has are left out by a narrower view.
        projection (bfloat16 or float32, [vocab_size, rank], device): Second matrix of the head,
            last dim dense; None for no bias.
        temperature (float32, [num_rows], device): Any stride; None for greedy rows only.
        seeds (int64, [num_rows], device): Seed of each row's request, any stride. None without
            `temperature`.
        positions (int64, [num_rows], device): Absolute position of the drawn token, any stride.
            None without `temperature`.
        slot: Number of the draft in its round, from 0; part of the key.
        tokens (int64, [num_rows], device): Previous token of each row as an id of the target, any
            stride; a placeholder (-1) is read as token 0.
        embedding (as projection, [num_embeddings, rank], device): First matrix of the head; the
            code of a row is that of its token. Last dim dense.
        codes (as projection, [num_rows, rank], device): Codes, instead of tokens and embedding.
            Last dim dense.
        draft_to_target (int32 or int64, [vocab_size], device): Added to a draft id to make the
            target's, for a reduced draft vocabulary. Dense.
        workspace (float32, [n], device): At least `markov_workspace_size` elements; None allocates
            them.
        out: Receives the result; tensors of any stride, such as columns of [num_rows, num_slots].
        settings: Tiles; None chooses.

    Returns:
        The draw.

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit, or if what belongs
            together is not given together.
    """
    device = launch_device("base_logits", base_logits)
    check_tensor("base_logits", base_logits, FLOAT_DTYPES, [None, None], device)
    num_rows, vocab_size = base_logits.shape
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise InvalidArgumentError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
    if not 0 <= slot < 2**31:
        raise InvalidArgumentError(f"slot must be in [0, 2**31), got {slot}")
    source = _check_head(base_logits, projection, tokens, embedding, codes)
    if temperature is not None:
        if seeds is None or positions is None:
            raise InvalidArgumentError("temperature needs seeds and positions, got none")
        check_rows({"temperature": temperature}, num_rows, device)
        check_tensor("seeds", seeds, [torch.int64], [num_rows], device)
        check_tensor("positions", positions, [torch.int64], [num_rows], device)
    if draft_to_target is not None:
        check_tensor(
            "draft_to_target",
            draft_to_target,
            INT_DTYPES,
            [vocab_size],
            device,
            is_last_dim_dense=True,
        )
    out = _checked_out(num_rows, device, out)
    needed = markov_workspace_size(num_rows, vocab_size)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    check_tensor("workspace", workspace, [torch.float32], [None], device, is_last_dim_dense=True)
    if workspace.numel() < needed:
        raise InvalidArgumentError(
            f"workspace must have at least {needed} elements, got {workspace.numel()}"
        )
    if num_rows > 0:
        step = _Step(
            base_logits,
            projection,
            source,
            tokens,
            temperature,
            seeds,
            positions,
            slot,
            draft_to_target,
        )
        dtype = torch.float32 if projection is None else projection.dtype
        launch(step, workspace, out, settings or markov_settings(num_rows, dtype))
    return out
