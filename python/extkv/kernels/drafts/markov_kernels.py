"""Kernels of a Markov step: numbers of all tiles, then the draw of each row (`markov_groups`)."""
# ruff: noqa: ANN001, ANN201, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.drafts.logits import code_offset, draft_logits_tile
from extkv.kernels.drafts.markov_groups import draw_of_row, store_groups


@triton.jit(
    do_not_specialize=["num_rows", "num_embeddings", "temperature_stride", "tokens_stride"],
    do_not_specialize_on_alignment=["temperature_ptr", "tokens_ptr"],
)
def markov_groups_kernel(
    groups_ptr,
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
    num_groups,
    RANK: tl.constexpr,
    IS_REVERSED: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    NUM_TILE_STAGES: tl.constexpr,
    IS_RESIDENT: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Store the numbers of some tiles of the vocabulary for a tile of rows.

    The number of programs is a multiple of the row tiles. Successive steps read the projection in
    opposite orders, so that a step begins with what the L2 still holds of the one before.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    num_tiles = tl.cdiv(vocab_size, VOCAB_TILE)
    num_row_tiles = tl.cdiv(num_rows, ROW_TILE)
    row = (tl.program_id(0) % num_row_tiles * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    is_row = row < num_rows
    if tokens_ptr is None:
        codes_offset = row * codes_stride
    else:
        token = tl.load(tokens_ptr + row * tokens_stride, mask=is_row, other=0)
        codes_offset = code_offset(token, num_embeddings, codes_stride)
    if temperature_ptr is None:
        heat = tl.zeros((ROW_TILE,), tl.float32)
    else:
        heat = tl.load(temperature_ptr + row * temperature_stride, mask=is_row, other=1.0)
    first = tl.program_id(0) // num_row_tiles
    if IS_RESIDENT:
        # The codes stay where the matrix product reads them, for all tiles of this program.
        depth = tl.arange(0, DEPTH_TILE)
        is_code = (depth < RANK)[:, None] & is_row[None, :]
        codes = tl.load(codes_ptr + codes_offset[None, :] + depth[:, None], mask=is_code, other=0.0)
        step = tl.num_programs(0) // num_row_tiles
        for turn in tl.range(first, num_tiles, step, num_stages=NUM_TILE_STAGES):
            tile = num_tiles - 1 - turn if IS_REVERSED else turn
            column = (tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)).to(tl.int64)
            is_column = column < vocab_size
            base_offset = (row * base_stride_row)[None, :] + (column * base_stride_column)[:, None]
            is_base = is_column[:, None] & is_row[None, :]
            base = tl.load(base_ptr + base_offset, mask=is_base, other=-float("inf"))
            weight = tl.load(
                projection_ptr + (column * projection_stride)[:, None] + depth[None, :],
                mask=is_column[:, None] & (depth < RANK)[None, :],
                other=0.0,
            )
            logits = base.to(tl.float32) + tl.dot(weight, codes, input_precision="ieee")
            store_groups(
                groups_ptr,
                logits,
                row,
                is_row,
                tile,
                num_groups,
                heat,
                temperature_ptr is not None,
                VOCAB_TILE,
                ROW_TILE,
            )
    else:
        tile = num_tiles - 1 - first if IS_REVERSED else first
        column = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
        logits = draft_logits_tile(
            column,
            column < vocab_size,
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
        store_groups(
            groups_ptr,
            logits,
            row,
            is_row,
            tile,
            num_groups,
            heat,
            temperature_ptr is not None,
            VOCAB_TILE,
            ROW_TILE,
        )


@triton.jit(
    do_not_specialize=[
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
def markov_draw_kernel(
    drawn_ptr,
    logits_ptr,
    log_sum_exp_ptr,
    flags_ptr,
    groups_ptr,
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
    num_embeddings,
    vocab_size,
    num_groups,
    RANK: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Store the draw of a row."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if temperature_ptr is None:
        heat, seed, position = tl.full((), 0.0, tl.float32), row, row
    else:
        heat = tl.load(temperature_ptr + row * temperature_stride)
        seed = tl.load(seeds_ptr + row * seeds_stride)
        position = tl.load(positions_ptr + row * positions_stride)
    if tokens_ptr is None:
        codes_offset = row * codes_stride
    else:
        previous = tl.load(tokens_ptr + row * tokens_stride)
        codes_offset = code_offset(previous, num_embeddings, codes_stride)
    token, logit, log_sum_exp, flag = draw_of_row(
        groups_ptr,
        row,
        base_ptr + row * base_stride_row,
        base_stride_column,
        projection_ptr,
        projection_stride,
        codes_ptr,
        codes_offset,
        heat,
        seed,
        position,
        slot,
        vocab_size,
        num_groups,
        RANK,
        DEPTH_TILE,
        GROUPS_PADDED,
    )
    drawn = token.to(tl.int64)
    if draft_to_target_ptr is not None:
        drawn += tl.load(draft_to_target_ptr + drawn).to(tl.int64)
    tl.store(drawn_ptr + row * drawn_stride, drawn)
    tl.store(logits_ptr + row * logits_stride, logit)
    tl.store(log_sum_exp_ptr + row * log_sum_exp_stride, log_sum_exp)
    tl.store(flags_ptr + row * flags_stride, flag)
