"""Rotary position embedding of queries and keys, with the normalisation of heads before it."""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import TYPE_CHECKING

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

if TYPE_CHECKING:
    import torch

    from extkv.normalized import HeadNorms

_MAX_TILE_ELEMENTS = 2048


@triton.jit
def _scaled(values, scale, norm_ptrs, mask, dtype: tl.constexpr):
    """Values * scale * norm, rounded where `rms_norm` rounds."""
    norm = tl.load(norm_ptrs, mask=mask, other=0.0).to(tl.float32)
    return ((values * scale).to(dtype).to(tl.float32) * norm[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rotate(
    heads_ptr,
    norm_ptr,
    eps,
    first_head,
    cosine,
    sine,
    dim,
    num_heads,
    stride_head,
    HEAD_TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for a tile of heads of one token."""
    head = first_head + tl.arange(0, HEAD_TILE)[:, None]
    mask = (head < num_heads) & (dim < HALF)[None, :]
    first_ptrs = heads_ptr + head * stride_head + dim[None, :]
    second_ptrs = first_ptrs + HALF
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptrs, mask=mask, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    if norm_ptr is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = _scaled(first, scale, norm_ptr + dim, dim < HALF, dtype)
        second = _scaled(second, scale, norm_ptr + HALF + dim, dim < HALF, dtype)
    tl.store(first_ptrs, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(second_ptrs, (second * cosine + first * sine).to(dtype), mask=mask)


@triton.jit(
    do_not_specialize=["num_positions", "position_stride"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _rotary_embedding_kernel(
    query_ptr,
    key_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    eps,
    num_positions,
    position_stride,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_QUERY_TILES: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Rotate the heads of one token by the angles of its position."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token * position_stride).to(tl.int64)
    if (position >= 0) & (position < num_positions):
        dim = tl.arange(0, DIM_TILE)
        cosine = tl.load(cos_ptr + position * cos_stride + dim, mask=dim < HALF, other=0.0)
        sine = tl.load(sin_ptr + position * sin_stride + dim, mask=dim < HALF, other=0.0)
        cosine = cosine.to(tl.float32)[None, :]
        sine = sine.to(tl.float32)[None, :]
        if tile < NUM_QUERY_TILES:
            _rotate(
                query_ptr + token * query_stride_token,
                query_norm_ptr,
                eps,
                tile * HEAD_TILE,
                cosine,
                sine,
                dim,
                NUM_HEADS,
                query_stride_head,
                HEAD_TILE,
                HALF,
            )
        else:
            _rotate(
                key_ptr + token * key_stride_token,
                key_norm_ptr,
                eps,
                (tile - NUM_QUERY_TILES) * HEAD_TILE,
                cosine,
                sine,
                dim,
                NUM_KV_HEADS,
                key_stride_head,
                HEAD_TILE,
                HALF,
            )


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    norms: HeadNorms | None,
) -> None:
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, half = key.shape[1], cos.shape[1]
    dim_tile = padded_to_power_of_two(half)
    largest = max(1, _MAX_TILE_ELEMENTS // dim_tile)
    head_tile = min(padded_to_power_of_two(max(num_heads, num_kv_heads)), largest)
    num_query_tiles, num_key_tiles = -(-num_heads // head_tile), -(-num_kv_heads // head_tile)
    with on_device_of(query):
        _rotary_embedding_kernel[num_tokens, num_query_tiles + num_key_tiles](
            query,
            key,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            cos,
            sin,
            positions,
            0.0 if norms is None else norms.eps,
            cos.shape[0],
            positions.stride(0),
            *query.stride()[:2],
            *key.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            NUM_QUERY_TILES=num_query_tiles,
            HALF=half,
            HEAD_TILE=head_tile,
            DIM_TILE=dim_tile,
            num_warps=4,
        )


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
) -> None:
    """Rotate queries and keys in place by the angles of their positions, in float32.

    Dim `i < half` is rotated against dim `i + half` (Hugging Face's rotate-half order); dims from
    `2 * half` on stay. A token whose position is not in the table is left as it is: padded rows may
    hold anything.

    Args:
        query (float, [num_tokens, num_heads, head_dim], device): Rotated in place; last dim dense.
        key (float, [num_tokens, num_kv_heads, head_dim], device): The same.
        cos (float, [num_positions, half], device): Cosine of each angle; last dim dense. float32
            keeps the precision of the angles.
        sin (float, [num_positions, half], device): Sine of each angle, same dtype.
        positions (int64 or int32, [num_tokens], device): Position of each token, any stride.
        norms: Where given, each head is first scaled to root mean square 1 and multiplied by the
            weight, as `rms_norm` does (Qwen3); all of a head is rotated then.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    device = launch_device("query", query)
    check_tensor("query", query, FLOAT_DTYPES, [None] * 3, device, is_last_dim_dense=True)
    num_tokens, _, head_dim = query.shape
    key_shape = [num_tokens, None, head_dim]
    check_tensor("key", key, [query.dtype], key_shape, device, is_last_dim_dense=True)
    check_tensor("cos", cos, FLOAT_DTYPES, [None, None], device, is_last_dim_dense=True)
    check_tensor("sin", sin, [cos.dtype], cos.shape, device, is_last_dim_dense=True)
    check_tensor("positions", positions, INT_DTYPES, [num_tokens], device)
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise InvalidArgumentError(
            f"cos must have between 1 and head_dim / 2 = {head_dim // 2} columns, got "
            f"{cos.shape[1]}"
        )
    if norms is not None:
        if 2 * cos.shape[1] != head_dim:
            raise InvalidArgumentError(
                f"cos must have head_dim / 2 = {head_dim / 2:g} columns where heads are "
                f"normalised, got {cos.shape[1]}"
            )
        for name, norm in (("norms.query", norms.query), ("norms.key", norms.key)):
            check_tensor(name, norm, [query.dtype], [head_dim], device, is_last_dim_dense=True)
    if num_tokens > 0:
        _launch(query, key, cos, sin, positions, norms)
