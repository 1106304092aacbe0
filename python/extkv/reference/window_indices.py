"""Cache slots that a draft block attends to through a sliding window, as index lists."""

from __future__ import annotations

import torch

WIDTH_MULTIPLE = 128


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
    """List the slots each query sees; see `extkv.kernels.window_indices.window_indices`."""
    num_reqs, device = anchor_positions.shape[0], anchor_positions.device
    num_rows = num_reqs * num_queries
    if out is None:
        width = window_width(window, num_queries)
        out = (
            torch.empty((num_rows, width), dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )
    indices, lengths = out
    indices.fill_(-1)
    lengths.zero_()
    limit = min(max_position, block_table.shape[1] * block_size)
    for request, anchor in enumerate(anchor_positions.tolist()):
        if anchor < 0:
            continue
        first, end = max(anchor - window, 0), min(anchor + num_queries, limit)
        seen = torch.arange(first, max(first, end), device=device)
        slots = block_table[request, seen // block_size] * block_size + seen % block_size
        queries = slice(request * num_queries, (request + 1) * num_queries)
        indices[queries, : len(slots)] = slots.to(torch.int32)
        lengths[queries] = len(slots)
    return out
