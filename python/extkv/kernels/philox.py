"""Random numbers that are a function of (seed, position, stream, lane): Philox4x32-10.

The key is the 64-bit seed. The counter is (lane, stream, low half of the position, high half), each
32 bits. So a draw does not depend on batch, slot, order or other requests, and no draw is used
twice.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import enum

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import check_tensor, launch_device, on_device_of

_ROW_TILE = 256


class Stream(enum.IntEnum):
    """What a draw is for; draws of different streams are independent.

    Draws of `DRAFT` and `ACCEPT` have the draft's slot in its round as their lane, since the next
    round comes back to the same positions. `RESIDUAL` and `BONUS` have lane 0: a token of a
    position is emitted once.
    """

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@triton.jit
def words_of(seed, position, stream, lane):
    """Return four uint32 words; arguments are integers of one shape, seed and position int64."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, lane.to(tl.uint32), stream.to(tl.uint32), low, high)


@triton.jit
def uniform_of(word):
    """Return (k + 0.5) / 2^23 with the upper 23 bits k: exact in float32, never 0 or 1."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit(
    do_not_specialize=["num_rows", "stream", "seed_stride", "position_stride", "lane_stride"],
    do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr", "lanes_ptr"],
)
def _philox_kernel(
    out_ptr,
    seeds_ptr,
    positions_ptr,
    lanes_ptr,
    stream,
    num_rows,
    seed_stride,
    position_stride,
    lane_stride,
    IS_UNIFORM: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """out[row, :] = Philox4x32-10(key=seed, counter=(lane, stream, position))."""
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    mask = row < num_rows
    seed = tl.load(seeds_ptr + row * seed_stride, mask=mask, other=0)
    position = tl.load(positions_ptr + row * position_stride, mask=mask, other=0)
    lane = tl.load(lanes_ptr + row * lane_stride, mask=mask, other=0)
    first, second, third, fourth = words_of(seed, position, lane * 0 + stream, lane)
    if IS_UNIFORM:
        tl.store(out_ptr + row * 4, uniform_of(first), mask=mask)
        tl.store(out_ptr + row * 4 + 1, uniform_of(second), mask=mask)
        tl.store(out_ptr + row * 4 + 2, uniform_of(third), mask=mask)
        tl.store(out_ptr + row * 4 + 3, uniform_of(fourth), mask=mask)
    else:
        tl.store(out_ptr + row * 4, first.to(tl.int64), mask=mask)
        tl.store(out_ptr + row * 4 + 1, second.to(tl.int64), mask=mask)
        tl.store(out_ptr + row * 4 + 2, third.to(tl.int64), mask=mask)
        tl.store(out_ptr + row * 4 + 3, fourth.to(tl.int64), mask=mask)


def _launch(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    lanes: torch.Tensor,
    out: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    device = launch_device("seeds", seeds)
    check_tensor("seeds", seeds, [torch.int64], [None], device)
    check_tensor("positions", positions, [torch.int64], seeds.shape, device)
    check_tensor("lanes", lanes, [torch.int64], seeds.shape, device)
    if not 0 <= stream < 2**31:
        raise InvalidArgumentError(f"stream must be in [0, 2**31), got {stream}")
    shape = [seeds.shape[0], 4]
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    check_tensor("out", out, [dtype], shape, device)
    if not out.is_contiguous():
        raise InvalidArgumentError(f"out must be contiguous, got strides {out.stride()}")
    if out.numel() > 0:
        with on_device_of(seeds):
            _philox_kernel[(-(-shape[0] // _ROW_TILE),)](
                out,
                seeds,
                positions,
                lanes,
                int(stream),
                shape[0],
                seeds.stride(0),
                positions.stride(0),
                lanes.stride(0),
                IS_UNIFORM=dtype == torch.float32,
                ROW_TILE=_ROW_TILE,
                num_warps=4,
            )
    return out


def philox_words(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    lanes: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return four 32-bit words per row, equal bit for bit on every device.

    Args:
        seeds (int64, [num_rows], device): Seed of each row; its 64 bits are the key.
        positions (int64, [num_rows], device): Absolute position in the sequence.
        stream: What the draw is for, see `Stream`.
        lanes (int64, [num_rows], device): Number of the draw; its low 32 bits are used.
        out (int64, [num_rows, 4], device): Receives the result; contiguous.

    Returns:
        Tensor (int64, [num_rows, 4], device): Words in [0, 2^32).

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit.
    """
    return _launch(seeds, positions, stream, lanes, out, torch.int64)


def philox_uniforms(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    lanes: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return four numbers per row, uniform over the odd multiples of 2^-24 in (0, 1).

    Each is made of the upper 23 bits of its word: never 0 and never 1, and equal bit for bit on
    every device.

    Args:
        seeds (int64, [num_rows], device): As in `philox_words`.
        positions (int64, [num_rows], device): The same.
        stream: The same.
        lanes (int64, [num_rows], device): The same.
        out (float32, [num_rows, 4], device): Receives the result; contiguous.

    Returns:
        Tensor (float32, [num_rows, 4], device).

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit.
    """
    return _launch(seeds, positions, stream, lanes, out, torch.float32)
