"""Gated activation: SiLU of the first half of each row times the second half."""
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
)

_COLUMN_TILE = 1024


@triton.jit
def _silu_and_mul_kernel(
    out_ptr, gate_up_ptr, out_stride, gate_up_stride, SIZE: tl.constexpr, COLUMN_TILE: tl.constexpr
):
    """Output = gate / (1 + exp(-gate)) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    mask = column < SIZE
    gate_ptrs = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product, as torch does.
    dtype = out_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, (activated * up).to(dtype), mask=mask)


def _launch(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    num_rows, size = out.shape
    with on_device_of(gate_up):
        _silu_and_mul_kernel[num_rows, -(-size // _COLUMN_TILE)](
            out,
            gate_up,
            out.stride(0),
            gate_up.stride(0),
            SIZE=size,
            COLUMN_TILE=_COLUMN_TILE,
            num_warps=4,
        )


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply SiLU of the first half of each row by the second half.

    Args:
        gate_up (float, [num_tokens, 2 * size], device): Gate, then up projection; last dim dense.
        out (float, [num_tokens, size], device): Receives the result; last dim dense.

    Returns:
        Tensor (float, [num_tokens, size], device): `out`, or a new tensor.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    device = launch_device("gate_up", gate_up)
    check_tensor("gate_up", gate_up, FLOAT_DTYPES, [None, None], device, is_last_dim_dense=True)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise InvalidArgumentError(f"gate_up must have an even number of columns, got {width}")
    shape = [num_tokens, width // 2]
    if out is None:
        out = torch.empty(shape, dtype=gate_up.dtype, device=device)
    else:
        check_tensor("out", out, [gate_up.dtype], shape, device, is_last_dim_dense=True)
    if out.numel() > 0:
        _launch(gate_up, out)
    return out
