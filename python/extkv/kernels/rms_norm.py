"""Root-mean-square normalisation, with the residual addition before it."""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

MAX_HIDDEN_SIZE = 32_768
_MIN_TILE_ELEMENTS = 1024
_ELEMENTS_PER_WARP = 512


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    num_rows,
    out_stride_token,
    out_stride_head,
    hidden_stride_token,
    hidden_stride_head,
    residual_stride_token,
    residual_stride_head,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
):
    """Residual += hidden; out = weight * residual / sqrt(mean(residual^2) + eps)."""
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)[:, None]
    column = tl.arange(0, SIZE_TILE)[None, :]
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    mask = (row < num_rows) & (column < SIZE)

    hidden_offset = token * hidden_stride_token + head * hidden_stride_head + column
    values = tl.load(hidden_ptr + hidden_offset, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        residual_offset = token * residual_stride_token + head * residual_stride_head + column
        values += tl.load(residual_ptr + residual_offset, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(residual_ptr + residual_offset, rounded, mask=mask)
        values = rounded.to(tl.float32)
    mean_square = tl.sum(values * values, axis=1) / SIZE
    # Rounded before the weight is applied, as Hugging Face models do.
    normed = (values * tl.rsqrt(mean_square + eps)[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    out_offset = token * out_stride_token + head * out_stride_head + column
    tl.store(out_ptr + out_offset, (normed * weight).to(dtype), mask=mask)


def _launch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    size = hidden.shape[-1]
    size_tile = padded_to_power_of_two(size)
    row_tile = max(1, _MIN_TILE_ELEMENTS // size_tile)
    num_rows = hidden.numel() // size
    num_heads = hidden.shape[1] if hidden.dim() == 3 else 1  # noqa: PLR2004 tokens, heads, size
    with on_device_of(hidden):
        _rms_norm_kernel[(-(-num_rows // row_tile),)](
            out,
            hidden,
            residual,
            weight,
            eps,
            num_rows,
            *_leading_strides(out),
            *_leading_strides(hidden),
            *_leading_strides(hidden if residual is None else residual),
            NUM_HEADS=num_heads,
            SIZE=size,
            ROW_TILE=row_tile,
            SIZE_TILE=size_tile,
            num_warps=min(16, max(1, row_tile * size_tile // _ELEMENTS_PER_WARP)),
        )


def _leading_strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the strides of tokens and heads; a tensor without heads has one head."""
    return tensor.stride(0), tensor.stride(-2) if tensor.dim() > 2 else 0  # noqa: PLR2004


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale each row to root mean square 1 and multiply it by the weight.

    Arithmetic is float32; the normalised row is rounded to the dtype before the weight is applied,
    and the residual sum before it is normalised, as in Hugging Face's llama and Qwen3.

    Args:
        hidden (float, [num_tokens, size] or [num_tokens, num_heads, size], device): Input; leading
            dimensions of any stride, the last one dense. size up to 32,768.
        weight (float, [size], device): Same dtype.
        eps: Added to the mean square.
        residual (float, shape of hidden, device): If given, `hidden` is added to it in place, and
            the sum is normalised.
        out (float, shape of hidden, device): Receives the result; may be `hidden`.

    Returns:
        Tensor (float, shape of hidden, device): `out`, or a new tensor.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    device = launch_device("hidden", hidden)
    if hidden.dim() not in {2, 3} or not 0 < hidden.shape[-1] <= MAX_HIDDEN_SIZE:
        raise InvalidArgumentError(
            "hidden must be [num_tokens, size] or [num_tokens, num_heads, size] with size in "
            f"[1, {MAX_HIDDEN_SIZE}], got {list(hidden.shape)}"
        )
    shape = hidden.shape
    check_tensor("hidden", hidden, FLOAT_DTYPES, shape, device, is_last_dim_dense=True)
    check_tensor("weight", weight, [hidden.dtype], shape[-1:], device, is_last_dim_dense=True)
    if residual is not None:
        check_tensor("residual", residual, [hidden.dtype], shape, device, is_last_dim_dense=True)
    if out is None:
        out = torch.empty(shape, dtype=hidden.dtype, device=device)
    else:
        check_tensor("out", out, [hidden.dtype], shape, device, is_last_dim_dense=True)
    if hidden.numel() > 0:
        _launch(hidden, weight, eps, residual, out)
    return out
