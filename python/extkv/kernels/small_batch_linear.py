"""Linear layers of up to 16 tokens, with the operations around them in the same kernels.

A decode step of few sequences is bound by reading the weights, and every kernel between two matrix
products costs a launch. Here a product that ends in the residual stream also prepares the
normalisation before the next one: it leaves the stream times the norm's weight, and sums of squares
of its columns. The next product divides by the root mean square at its end, where it is one factor
per token. The sum over the input size runs in one order whatever the number of tokens, so a token's
result does not depend on its batch.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)
from extkv.normalized import ScaledRows

MAX_NUM_TOKENS = 16
# float16 is not among them: a residual stream times a norm's weight can leave its range.
DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def _products(
    input_ptr,
    weight_ptr,
    first_column,
    is_token,
    token_offset,
    weight_stride,
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Products of a tile of weight rows with all tokens; with gates, those of both halves."""
    column = first_column + tl.arange(0, COLUMN_TILE)
    depth = tl.arange(0, DEPTH_TILE)
    weight_offset = column.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    up_ptr = weight_ptr + NUM_COLUMNS * weight_stride.to(tl.int64)
    input_offset = token_offset[None, :] + depth[:, None]
    products = tl.zeros((COLUMN_TILE, TOKEN_TILE), tl.float32)
    up_products = tl.zeros((COLUMN_TILE, TOKEN_TILE), tl.float32)
    for start in range(0, DEPTH, DEPTH_TILE):
        is_depth = start + depth < DEPTH
        mask = (column < NUM_COLUMNS)[:, None] & is_depth[None, :]
        weight = tl.load(weight_ptr + weight_offset + start, mask=mask, other=0.0)
        values = tl.load(
            input_ptr + input_offset + start, mask=is_depth[:, None] & is_token[None, :], other=0.0
        )
        products = tl.dot(weight, values, products, input_precision="ieee")
        if IS_GATED:
            weight = tl.load(up_ptr + weight_offset + start, mask=mask, other=0.0)
            up_products = tl.dot(weight, values, up_products, input_precision="ieee")
    return products, up_products


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _small_batch_linear_kernel(
    out_ptr,
    out_squares_ptr,
    residual_ptr,
    norm_ptr,
    input_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    eps,
    num_tokens,
    num_parts,
    out_stride,
    residual_stride,
    input_stride,
    weight_stride,
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    PART_TILE: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Product, division by the root mean square, bias; then gate, residual sum, or nothing more."""
    first_column = tl.program_id(0) * COLUMN_TILE
    column = first_column + tl.arange(0, COLUMN_TILE)
    token = tl.arange(0, TOKEN_TILE)
    is_column = column < NUM_COLUMNS
    is_token = token < num_tokens
    products, up_products = _products(
        input_ptr,
        weight_ptr,
        first_column,
        is_token,
        token.to(tl.int64) * input_stride,
        weight_stride,
        NUM_COLUMNS,
        DEPTH,
        TOKEN_TILE,
        COLUMN_TILE,
        DEPTH_TILE,
        IS_GATED,
    )
    dtype = out_ptr.dtype.element_ty
    if squares_ptr is not None:
        part = tl.arange(0, PART_TILE)
        squares = tl.load(
            squares_ptr + part[:, None] * TOKEN_TILE + token[None, :],
            mask=(part < num_parts)[:, None] & is_token[None, :],
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(squares, axis=0) / DEPTH + eps)[None, :]
        products *= scale
        up_products *= scale
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        products += bias[:, None]
        if IS_GATED:
            bias = tl.load(bias_ptr + NUM_COLUMNS + column, mask=is_column, other=0.0)
            up_products += bias.to(tl.float32)[:, None]
    if IS_GATED:
        # Rounded where torch rounds.
        gate = products.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        products = activated * up_products.to(dtype).to(tl.float32)
    mask = is_column[:, None] & is_token[None, :]
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + token.to(tl.int64)[None, :] * residual_stride
        residual_ptrs += column[:, None]
        products = products.to(dtype).to(tl.float32)
        products += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        rounded = products.to(dtype)
        tl.store(residual_ptrs, rounded, mask=mask)
        products = rounded.to(tl.float32)
        out_squares = tl.sum(tl.where(mask, products * products, 0.0), axis=0)
        tl.store(out_squares_ptr + tl.program_id(0) * TOKEN_TILE + token, out_squares)
        norm = tl.load(norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        products *= norm[:, None]
    out_ptrs = out_ptr + token.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(out_ptrs, products.to(dtype), mask=mask)


class LinearSettings(NamedTuple):
    """Tiles of a launch."""

    column_tile: int
    depth_tile: int
    num_warps: int
    num_stages: int


SETTINGS = LinearSettings(32, 256, 4, 4)
GATED_SETTINGS = LinearSettings(64, 64, 4, 5)
_FLOAT32_SETTINGS = LinearSettings(16, 64, 4, 2)


class _Sum(NamedTuple):
    """Where a product is added, and what it leaves for the next one."""

    residual: torch.Tensor
    norm: torch.Tensor
    squares: torch.Tensor


def launch(
    values: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: ScaledRows | None = None,
    added: _Sum | None = None,
    is_gated: bool = False,
    settings: LinearSettings,
) -> None:
    """Run the kernel on checked arguments."""
    num_tokens, depth = values.shape
    num_columns = out.shape[1]
    num_parts = 0 if rows is None else rows.squares.shape[0]
    with on_device_of(values):
        _small_batch_linear_kernel[(-(-num_columns // settings.column_tile),)](
            out,
            None if added is None else added.squares,
            None if added is None else added.residual,
            None if added is None else added.norm,
            values,
            None if rows is None else rows.squares,
            weight,
            bias,
            0.0 if rows is None else rows.eps,
            num_tokens,
            num_parts,
            out.stride(0),
            out.stride(0) if added is None else added.residual.stride(0),
            values.stride(0),
            weight.stride(0),
            NUM_COLUMNS=num_columns,
            DEPTH=depth,
            TOKEN_TILE=MAX_NUM_TOKENS,
            COLUMN_TILE=settings.column_tile,
            DEPTH_TILE=settings.depth_tile,
            PART_TILE=padded_to_power_of_two(max(num_parts, 1)),
            IS_GATED=is_gated,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        )


def small_batch_linear(
    rows: ScaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Multiply normalised rows by a weight.

    Args:
        rows: Rows that `small_batch_add_linear` left.
        weight (float, [num_columns, size], device): Same dtype; last dim dense. With `is_gated`
            the first half of its rows are gates.
        bias (float, [num_columns], device): Added, if given.
        is_gated: Return SiLU of the first half of the columns times the second half.

    Returns:
        Tensor (float, [num_tokens, num_columns] or half as many, device).

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    num_columns = _check(rows.values, weight, bias)
    if is_gated:
        if num_columns % 2:
            raise InvalidArgumentError(
                f"weight must have an even number of rows, got {num_columns}"
            )
        num_columns //= 2
    device = rows.values.device
    check_tensor("squares", rows.squares, [torch.float32], [None, MAX_NUM_TOKENS], device)
    out = rows.values.new_empty(rows.values.shape[0], num_columns)
    settings = _settings(rows.values.dtype, is_gated=is_gated)
    launch(rows.values, weight, out, bias=bias, rows=rows, is_gated=is_gated, settings=settings)
    return out


def small_batch_add_linear(
    residual: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor,
    eps: float,
) -> ScaledRows:
    """Add a product to the residual stream, and prepare the next normalisation.

    Args:
        residual (float, [num_tokens, num_columns], device): The stream; mutated. Last dim dense.
        values (float, [num_tokens, size], device): Same dtype; up to 16 tokens; last dim dense.
        weight (float, [num_columns, size], device): Same dtype; last dim dense.
        bias (float, [num_columns], device): Added, if given.
        norm (float, [num_columns], device): Weight of the normalisation that comes next.
        eps: Its constant.

    Returns:
        What `small_batch_linear` takes.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    num_columns = _check(values, weight, bias)
    shape, device, dtype = [values.shape[0], num_columns], values.device, values.dtype
    check_tensor("residual", residual, [dtype], shape, device, is_last_dim_dense=True)
    check_tensor("norm", norm, [dtype], [num_columns], device, is_last_dim_dense=True)
    settings = _settings(dtype, is_gated=False)
    num_parts = -(-num_columns // settings.column_tile)
    squares = torch.empty(num_parts, MAX_NUM_TOKENS, dtype=torch.float32, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    added = _Sum(residual, norm, squares)
    launch(values, weight, out, bias=bias, added=added, settings=settings)
    return ScaledRows(out, squares, eps)


def _settings(dtype: torch.dtype, *, is_gated: bool) -> LinearSettings:
    if dtype == torch.float32:
        return _FLOAT32_SETTINGS
    return GATED_SETTINGS if is_gated else SETTINGS


def _check(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Check a product's arguments and return its number of columns."""
    device = launch_device("values", values)
    check_tensor("values", values, DTYPES, [None, None], device, is_last_dim_dense=True)
    num_tokens, size = values.shape
    if not 1 <= num_tokens <= MAX_NUM_TOKENS:
        raise InvalidArgumentError(f"values must have 1 to {MAX_NUM_TOKENS} rows, got {num_tokens}")
    check_tensor("weight", weight, [values.dtype], [None, size], device, is_last_dim_dense=True)
    num_columns = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, [values.dtype], [num_columns], device, is_last_dim_dense=True)
    return num_columns
