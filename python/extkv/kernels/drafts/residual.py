"""Second part of verification: residual masses of a tile, and the draw of the next token."""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.drafts.decide import DONE, FROM_RESIDUAL, FROM_TARGET, accept_uniform
from extkv.kernels.drafts.logits import code_offset, draft_logits_of_row, draft_logits_tile
from extkv.kernels.logit_cutoff import load_logits, load_or, softmax_weight
from extkv.kernels.philox import Stream, uniform_of, words_of
from extkv.kernels.sampling import pick

_RESIDUAL_STREAM = tl.constexpr(int(Stream.RESIDUAL))
_BONUS_STREAM = tl.constexpr(int(Stream.BONUS))
# Below it a residual is rounding noise of equal distributions: the target's own is drawn from.
LEAST_RESIDUAL = tl.constexpr(1e-8)


@triton.jit
def _residual(target, draft, cutoff, largest, inverse, log_total, log_scale, log_sum_exp):
    """max(scale * p - q, 0) from logits; a NaN has no mass."""
    p = softmax_weight(target, largest, inverse) * tl.exp(log_scale - log_total)
    # Written so that a NaN fails the comparison.
    p = tl.where(target >= cutoff, p, 0.0)
    q = tl.exp(draft * inverse - log_sum_exp)
    q = tl.where(q >= 0.0, q, 0.0)
    return tl.maximum(p - q, 0.0)


@triton.jit(
    do_not_specialize=["num_work", "num_embeddings", "temperature_stride", "token_ids_stride"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "temperature_ptr",
        "cutoff_ptr",
        "log_sum_exp_ptr",
        "draft_ids_ptr",
    ],
)
def residual_masses_kernel(
    masses_ptr,
    work_rows_ptr,
    work_drafts_ptr,
    work_slots_ptr,
    log_scale_ptr,
    largest_ptr,
    log_total_ptr,
    target_ptr,
    base_ptr,
    projection_ptr,
    codes_ptr,
    token_ids_ptr,
    temperature_ptr,
    cutoff_ptr,
    log_sum_exp_ptr,
    draft_ids_ptr,
    target_stride,
    base_stride_row,
    base_stride_slot,
    base_stride_column,
    projection_stride,
    codes_stride_row,
    codes_stride_slot,
    token_ids_stride,
    temperature_stride,
    log_sum_exp_stride_row,
    log_sum_exp_stride_slot,
    num_work,
    num_embeddings,
    vocab_size,
    HAS_TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """masses[work, tile] = sum of max(scale p - q, 0) over the tile, for each row that needs it."""
    num_work_tiles = tl.cdiv(num_work, ROW_TILE)
    num_tiles = tl.cdiv(vocab_size, VOCAB_TILE)
    tile = tl.program_id(0) // num_work_tiles
    work = (tl.program_id(0) % num_work_tiles * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    row = tl.load(work_rows_ptr + work, mask=work < num_work, other=-1).to(tl.int64)
    is_row = row >= 0
    if tl.max(row, axis=0) >= 0:
        draft_row = tl.load(work_drafts_ptr + work, mask=is_row, other=0).to(tl.int64)
        slot = tl.load(work_slots_ptr + work, mask=is_row, other=0).to(tl.int64)
        column = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
        is_column = column < vocab_size
        target = tl.load(
            target_ptr + row[None, :] * target_stride + column.to(tl.int64)[:, None],
            mask=is_column[:, None] & is_row[None, :],
            other=-float("inf"),
        ).to(tl.float32)
        draft_id = column
        if draft_ids_ptr is not None:
            draft_id = tl.load(draft_ids_ptr + column, mask=is_column, other=-1)
        if HAS_TOKENS:
            token = tl.load(token_ids_ptr + row * token_ids_stride, mask=is_row, other=0)
            codes_offset = code_offset(token, num_embeddings, codes_stride_row)
        else:
            codes_offset = draft_row * codes_stride_row + slot * codes_stride_slot
        draft = draft_logits_tile(
            draft_id,
            is_column & (draft_id >= 0),
            is_row,
            base_ptr,
            draft_row * base_stride_row + slot * base_stride_slot,
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
        cutoff = tl.full((ROW_TILE,), -float("inf"), tl.float32)
        if cutoff_ptr is not None:
            cutoff = tl.load(cutoff_ptr + row, mask=is_row, other=0.0)
        heat = tl.load(temperature_ptr + row * temperature_stride, mask=is_row, other=1.0)
        log_sum_exp_ptrs = log_sum_exp_ptr + draft_row * log_sum_exp_stride_row
        log_sum_exp_ptrs += slot * log_sum_exp_stride_slot
        weights = _residual(
            target,
            draft,
            cutoff[None, :],
            tl.load(largest_ptr + row, mask=is_row, other=0.0)[None, :],
            (1.0 / heat)[None, :],
            tl.load(log_total_ptr + row, mask=is_row, other=0.0)[None, :],
            tl.load(log_scale_ptr + work, mask=is_row, other=0.0)[None, :],
            tl.load(log_sum_exp_ptrs, mask=is_row, other=0.0)[None, :],
        )
        mass = tl.sum(tl.where(is_column[:, None], weights, 0.0), axis=0)
        tl.store(masses_ptr + work * num_tiles + tile, mass, mask=is_row)


@triton.jit
def _block_accepted(
    start,
    num_drafts,
    work_masses_ptr,
    log_scale_ptr,
    log_p_ptr,
    seeds_ptr,
    positions_ptr,
    seeds_stride,
    positions_stride,
    num_tiles,
    IS_ONE_HOT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Largest i with u_i < h_i, 0 if none: h_i = R_i / (R_i + 1 - P_i), and P_i for the last."""
    index = tl.arange(0, WINDOW)
    row = start + index
    is_draft = index < num_drafts
    after = row + 1
    scale = tl.exp(tl.load(log_scale_ptr + after, mask=is_draft, other=0.0))
    has_next = index + 1 < num_drafts
    if IS_ONE_HOT:
        log_p = tl.load(log_p_ptr + after, mask=has_next, other=0.0)
        residual = scale * (1.0 - tl.exp(log_p))
    else:
        tiles = tl.arange(0, TILES_PADDED)
        masses = tl.load(
            work_masses_ptr + after[:, None] * num_tiles + tiles[None, :],
            mask=has_next[:, None] & (tiles < num_tiles)[None, :],
            other=0.0,
        )
        residual = tl.sum(masses, axis=1)
    total = residual + 1.0 - scale
    limit = tl.where(total > 0.0, residual / tl.where(total > 0.0, total, 1.0), 1.0)
    limit = tl.where(has_next, limit, scale)
    uniform = accept_uniform(
        seeds_ptr, positions_ptr, seeds_stride, positions_stride, row, index, is_draft
    )
    return tl.max(tl.where(is_draft & (uniform < limit), index + 1, 0), axis=0)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_embeddings",
        "token_ids_stride",
        "temperature_stride",
        "seeds_stride",
        "positions_stride",
    ],
    do_not_specialize_on_alignment=[
        "num_accepted_ptr",
        "next_tokens_ptr",
        "flags_ptr",
        "token_ids_ptr",
        "window_starts_ptr",
        "temperature_ptr",
        "cutoff_ptr",
        "seeds_ptr",
        "positions_ptr",
        "log_sum_exp_ptr",
        "draft_ids_ptr",
    ],
)
def draw_kernel(  # noqa: C901, PLR0915 one program does a request
    num_accepted_ptr,
    next_tokens_ptr,
    flags_ptr,
    kinds_ptr,
    masses_ptr,
    work_drafts_ptr,
    work_slots_ptr,
    log_scale_ptr,
    log_p_ptr,
    largest_ptr,
    log_total_ptr,
    statistics_ptr,
    target_ptr,
    base_ptr,
    projection_ptr,
    codes_ptr,
    token_ids_ptr,
    window_starts_ptr,
    temperature_ptr,
    cutoff_ptr,
    seeds_ptr,
    positions_ptr,
    log_sum_exp_ptr,
    draft_ids_ptr,
    target_stride,
    base_stride_row,
    base_stride_slot,
    base_stride_column,
    projection_stride,
    codes_stride_row,
    codes_stride_slot,
    token_ids_stride,
    temperature_stride,
    seeds_stride,
    positions_stride,
    log_sum_exp_stride_row,
    log_sum_exp_stride_slot,
    num_rows,
    num_embeddings,
    vocab_size,
    IS_BLOCK: tl.constexpr,
    IS_ONE_HOT: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    RANK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    DRAFT_TILES_PADDED: tl.constexpr,
    DRAFT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """Next token of a request: from the residual after a rejection, else from the target."""
    request = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds_ptr + request)
    start = tl.load(window_starts_ptr + request).to(tl.int64)
    accepted = tl.load(num_accepted_ptr + request)
    num_draft_tiles = tl.cdiv(vocab_size, DRAFT_TILE)
    if kind != DONE:
        work = request
        if IS_BLOCK:
            num_drafts = accepted
            accepted = _block_accepted(
                start,
                num_drafts,
                masses_ptr,
                log_scale_ptr,
                log_p_ptr,
                seeds_ptr,
                positions_ptr,
                seeds_stride,
                positions_stride,
                num_draft_tiles,
                IS_ONE_HOT,
                WINDOW,
                DRAFT_TILES_PADDED,
            )
            tl.store(num_accepted_ptr + request, accepted)
            kind = tl.where(accepted < num_drafts, FROM_RESIDUAL, FROM_TARGET)
            work = start + accepted
        row = start + accepted
        size = num_rows.to(tl.int64) * NUM_TILES
        statistic_ptr = statistics_ptr + row * NUM_TILES
        tiles = tl.arange(0, TILES_PADDED)
        is_tile = tiles < NUM_TILES
        if IS_BLOCK:
            marks = tl.load(statistic_ptr + 3 * size + tiles, mask=is_tile, other=0.0)
            nothing = tl.load(largest_ptr + row) == -float("inf")
            flag = tl.where(tl.max(marks, axis=0) > 0.0, 1, 0) + tl.where(nothing, 2, 0)
            tl.store(flags_ptr + request, flag)
        largest = tl.load(largest_ptr + row)
        inverse = 1.0 / tl.load(temperature_ptr + row * temperature_stride)
        cutoff = load_or(cutoff_ptr, row, -float("inf"))
        seed = tl.load(seeds_ptr + row * seeds_stride)
        position = tl.load(positions_ptr + row * positions_stride)
        stream = tl.where(kind == FROM_RESIDUAL, _RESIDUAL_STREAM, _BONUS_STREAM)
        word, second_word, _, _ = words_of(seed, position, position * 0 + stream, position * 0)
        first, second = uniform_of(word), uniform_of(second_word)

        total = tl.full((), 0.0, tl.float32)
        if not IS_ONE_HOT:
            draft_tiles = tl.arange(0, DRAFT_TILES_PADDED)
            residuals = tl.load(
                masses_ptr + work * num_draft_tiles + draft_tiles,
                mask=(draft_tiles < num_draft_tiles) & (kind == FROM_RESIDUAL),
                other=0.0,
            )
            total = tl.sum(residuals, axis=0)
            if total > LEAST_RESIDUAL:
                draft_row = tl.load(work_drafts_ptr + work).to(tl.int64)
                slot = tl.load(work_slots_ptr + work).to(tl.int64)
                tile = pick(residuals, first, DRAFT_TILES_PADDED)
                column = tile * DRAFT_TILE + tl.arange(0, DRAFT_TILE)
                is_column = column < vocab_size
                target = load_logits(
                    target_ptr + row * target_stride, tile * DRAFT_TILE, vocab_size, DRAFT_TILE
                )
                draft_id = column
                if draft_ids_ptr is not None:
                    draft_id = tl.load(draft_ids_ptr + column, mask=is_column, other=-1)
                if HAS_TOKENS:
                    previous = tl.load(token_ids_ptr + row * token_ids_stride)
                    codes_offset = code_offset(previous, num_embeddings, codes_stride_row)
                else:
                    codes_offset = draft_row * codes_stride_row + slot * codes_stride_slot
                draft = draft_logits_of_row(
                    draft_id,
                    is_column & (draft_id >= 0),
                    base_ptr + draft_row * base_stride_row + slot * base_stride_slot,
                    base_stride_column,
                    projection_ptr,
                    projection_stride,
                    codes_ptr,
                    codes_offset,
                    RANK,
                    DRAFT_TILE,
                    DEPTH_TILE,
                )
                log_sum_exp_ptrs = log_sum_exp_ptr + draft_row * log_sum_exp_stride_row
                log_total = tl.load(log_total_ptr + row)
                log_scale = tl.load(log_scale_ptr + work)
                log_sum_exp = tl.load(log_sum_exp_ptrs + slot * log_sum_exp_stride_slot)
                weights = _residual(
                    target, draft, cutoff, largest, inverse, log_total, log_scale, log_sum_exp
                )
                # The bias may round otherwise here than where the masses were summed, and leave
                # nothing of a tile: then the tile's target probabilities decide.
                p = softmax_weight(target, largest, inverse)
                p = tl.where(target >= cutoff, p, 0.0)
                weights = tl.where(tl.sum(weights, axis=0) > 0.0, weights, p)
                token = tile * DRAFT_TILE + pick(weights, second, DRAFT_TILE)
                tl.store(next_tokens_ptr + request, token.to(tl.int64))
        if total <= LEAST_RESIDUAL:
            maxima = tl.load(statistic_ptr + tiles, mask=is_tile, other=-float("inf"))
            sums = tl.load(statistic_ptr + 2 * size + tiles, mask=is_tile, other=0.0)
            masses = sums * softmax_weight(maxima, largest, inverse)
            row_ptr = target_ptr + row * target_stride
            removed = tl.full((), -1, tl.int64)
            if IS_ONE_HOT:  # noqa: SIM102 the outer one is decided at compilation
                if kind == FROM_RESIDUAL:
                    removed = tl.load(token_ids_ptr + (row + 1) * token_ids_stride)
                    removed_tile = (removed // VOCAB_TILE).to(tl.int32)
                    values = load_logits(row_ptr, removed_tile * VOCAB_TILE, vocab_size, VOCAB_TILE)
                    column = removed_tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
                    weights = softmax_weight(values, largest, inverse)
                    keeps = (values >= cutoff) & (column != removed)
                    mass = tl.sum(tl.where(keeps, weights, 0.0), axis=0)
                    masses = tl.where(tiles == removed_tile, mass, masses)
            if largest > -float("inf"):
                tile = pick(masses, first, TILES_PADDED)
                values = load_logits(row_ptr, tile * VOCAB_TILE, vocab_size, VOCAB_TILE)
                column = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
                keeps = (values >= cutoff) & (column != removed)
                kept_max = tl.max(tl.where(keeps, values, -float("inf")), axis=0)
                weights = softmax_weight(values, kept_max, inverse)
                token = pick(tl.where(keeps, weights, 0.0), second, VOCAB_TILE)
                tl.store(next_tokens_ptr + request, (tile * VOCAB_TILE + token).to(tl.int64))
