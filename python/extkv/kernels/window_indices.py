"""Cache slots that a draft block attends to through a sliding window, as index lists."""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.draft_block_inputs import slot_of
from extkv.kernels.launch.arguments import (
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

WIDTH_MULTIPLE = 128


@triton.jit(
    do_not_specialize=[
        "anchor_stride",
        "block_table_stride",
        "indices_stride",
        "max_blocks",
        "max_position",
    ],
    do_not_specialize_on_alignment=[
        "indices_ptr",
        "lengths_ptr",
        "anchor_positions_ptr",
        "block_table_ptr",
    ],
)
def _window_indices_kernel(
    indices_ptr,
    lengths_ptr,
    anchor_positions_ptr,
    block_table_ptr,
    anchor_stride,
    block_table_stride,
    indices_stride,
    max_blocks,
    max_position,
    WINDOW: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """indices[query, i] = slot of position max(P - WINDOW, 0) + i, up to P + NUM_QUERIES - 1."""
    query = tl.program_id(0).to(tl.int64)
    request = query // NUM_QUERIES
    anchor = tl.load(anchor_positions_ptr + request * anchor_stride)
    first = tl.maximum(anchor - WINDOW, 0)
    limit = tl.minimum(max_position, max_blocks * BLOCK_SIZE)
    end = tl.minimum(anchor + NUM_QUERIES, limit)
    length = tl.where(anchor >= 0, tl.maximum(end - first, 0), 0)
    index = tl.arange(0, TILE)
    slot = slot_of(
        block_table_ptr + request * block_table_stride,
        first + index,
        limit,
        BLOCK_SIZE,
        max_blocks,
        index < length,
    )
    tl.store(indices_ptr + query * indices_stride + index, slot.to(tl.int32), mask=index < WIDTH)
    tl.store(lengths_ptr + query, length.to(tl.int32))


def window_width(window: int, num_queries: int) -> int:
    """Return the least multiple of 128 that holds a window and a block."""
    return -(-(window + num_queries) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def window_indices(
    anchor_positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    window: int,
    num_queries: int,
    block_size: int,
    max_position: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the cache slots that each query of a draft block sees.

    All queries of a request see the same positions, max(P - window, 0) to P + num_queries - 1 with
    the anchor at P: the window hangs on the block, not on each query, and is not causal. Positions
    at or past `max_position`, or past the block table, are left out.

    Args:
        anchor_positions (int64, [num_reqs], device): Position P; -1 for padding, which sees
            nothing. Any stride.
        block_table (int32, [num_reqs, max_blocks], device): Last dim dense.
        window: Positions before the anchor, at least 0.
        num_queries: Slots of the block, at least 1.
        block_size: Tokens per block.
        max_position: Positions there are.
        out (tuple): Receives indices, rows of any stride with a dense last dim, and lengths, dense.

    Returns:
        indices (int32, [num_reqs * num_queries, width], device): Slots in order of positions, then
            -1; the width is `window_width`, or that of `out` if it is larger.
        lengths (int32, [num_reqs * num_queries], device): Slots of each query.

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit.
    """
    device = launch_device("anchor_positions", anchor_positions)
    check_tensor("anchor_positions", anchor_positions, [torch.int64], [None], device)
    num_reqs = anchor_positions.shape[0]
    check_tensor(
        "block_table", block_table, [torch.int32], [num_reqs, None], device, is_last_dim_dense=True
    )
    for name, number, least in (
        ("window", window, 0),
        ("num_queries", num_queries, 1),
        ("block_size", block_size, 1),
        ("max_position", max_position, 1),
    ):
        if number < least:
            raise InvalidArgumentError(f"{name} must be at least {least}, got {number}")
    num_rows, width = num_reqs * num_queries, window_width(window, num_queries)
    if out is None:
        out = (
            torch.empty((num_rows, width), dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )
    indices, lengths = out
    check_tensor(
        "indices", indices, [torch.int32], [num_rows, None], device, is_last_dim_dense=True
    )
    check_tensor("lengths", lengths, [torch.int32], [num_rows], device, is_last_dim_dense=True)
    if indices.shape[1] < width or indices.shape[1] % WIDTH_MULTIPLE:
        raise InvalidArgumentError(
            f"indices must have a width of at least {width} and a multiple of {WIDTH_MULTIPLE}, "
            f"got {indices.shape[1]}"
        )
    if num_rows > 0:
        with on_device_of(anchor_positions):
            _window_indices_kernel[(num_rows,)](
                indices,
                lengths,
                anchor_positions,
                block_table,
                anchor_positions.stride(0),
                block_table.stride(0),
                indices.stride(0),
                block_table.shape[1],
                max_position,
                WINDOW=window,
                NUM_QUERIES=num_queries,
                BLOCK_SIZE=block_size,
                WIDTH=indices.shape[1],
                TILE=padded_to_power_of_two(indices.shape[1]),
                num_warps=4,
            )
    return out
