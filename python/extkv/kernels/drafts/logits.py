"""Draft logits of a tile of the vocabulary: base logits plus the Markov bias, never in memory."""
# ruff: noqa: ANN001, ANN201, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# Vocabulary per tile. It decides which token a uniform picks, so it is one for all batch sizes.
DRAFT_VOCAB_TILE = 128
# Depth of a chunk where one program computes the bias of one row.
PICK_DEPTH_TILE = 32


@triton.jit
def code_offset(token, num_embeddings, code_stride):
    """Return the embedding row of a previous token; a placeholder has the one of a real id."""
    return tl.minimum(tl.maximum(token, 0), num_embeddings - 1) * code_stride


@triton.jit
def draft_logits_tile(
    column,
    is_column,
    is_row,
    base_ptr,
    base_offset,
    base_stride_column,
    projection_ptr,
    projection_stride,
    codes_ptr,
    codes_offset,
    RANK: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """base[row, column] + projection[column] . codes[row], float32 [VOCAB_TILE, ROW_TILE]."""
    column = column.to(tl.int64)
    mask = is_column[:, None] & is_row[None, :]
    base_offsets = base_offset[None, :] + column[:, None] * base_stride_column
    base = tl.load(base_ptr + base_offsets, mask=mask, other=-float("inf")).to(tl.float32)
    if projection_ptr is None:
        return base
    else:  # noqa: RET505 Triton compiles one of the two
        depth = tl.arange(0, DEPTH_TILE)
        products = tl.zeros((VOCAB_TILE, ROW_TILE), tl.float32)
        weight_offset = column[:, None] * projection_stride + depth[None, :]
        for start in range(0, RANK, DEPTH_TILE):
            is_depth = start + depth < RANK
            weight = tl.load(
                projection_ptr + weight_offset + start,
                mask=is_column[:, None] & is_depth[None, :],
                other=0.0,
            )
            codes = tl.load(
                codes_ptr + codes_offset[None, :] + (start + depth)[:, None],
                mask=is_depth[:, None] & is_row[None, :],
                other=0.0,
            )
            products = tl.dot(weight, codes, products, input_precision="ieee")
        return base + products


@triton.jit
def draft_logits_of_row(
    column,
    is_column,
    base_ptr,
    base_stride_column,
    projection_ptr,
    projection_stride,
    codes_ptr,
    codes_offset,
    RANK: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """Return the same for one row, float32 [VOCAB_TILE]; `base_ptr` is that of the row."""
    column = column.to(tl.int64)
    base = tl.load(base_ptr + column * base_stride_column, mask=is_column, other=-float("inf"))
    base = base.to(tl.float32)
    if projection_ptr is None:
        return base
    else:  # noqa: RET505 Triton compiles one of the two
        depth = tl.arange(0, DEPTH_TILE)
        products = tl.zeros((VOCAB_TILE, DEPTH_TILE), tl.float32)
        weight_offset = column[:, None] * projection_stride + depth[None, :]
        for start in range(0, RANK, DEPTH_TILE):
            is_depth = start + depth < RANK
            weight = tl.load(
                projection_ptr + weight_offset + start,
                mask=is_column[:, None] & is_depth[None, :],
                other=0.0,
            )
            code = tl.load(codes_ptr + codes_offset + start + depth, mask=is_depth, other=0.0)
            products += weight.to(tl.float32) * code.to(tl.float32)[None, :]
        return base + tl.sum(products, axis=1)
