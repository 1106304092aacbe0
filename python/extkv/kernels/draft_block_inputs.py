"""Inputs of a draft round from what a verification step left, in one launch."""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.drafting import DraftBlock
from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

_ROW_TILE = 256


@triton.jit
def slot_of(block_table_ptr, position, max_position, BLOCK_SIZE, MAX_BLOCKS, mask):
    """Return the cache slot of a position by the block table of its request; -1 past the limit."""
    block_index = position // BLOCK_SIZE
    has_slot = mask & (position >= 0) & (position < max_position) & (block_index < MAX_BLOCKS)
    block = tl.load(block_table_ptr + block_index, mask=has_slot, other=0).to(tl.int64)
    return tl.where(has_slot, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_rows",
        "anchors_stride",
        "positions_stride",
        "num_rejected_stride",
        "block_table_stride",
        "max_blocks",
        "max_position",
    ],
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "query_positions_ptr",
        "slots_ptr",
        "sample_rows_ptr",
        "sample_positions_ptr",
        "anchor_positions_ptr",
        "seq_lens_ptr",
        "context_positions_ptr",
        "context_slots_ptr",
        "anchors_ptr",
        "positions_ptr",
        "query_start_loc_ptr",
        "num_rejected_ptr",
        "block_table_ptr",
    ],
)
def _draft_block_inputs_kernel(
    token_ids_ptr,
    query_positions_ptr,
    slots_ptr,
    sample_rows_ptr,
    sample_positions_ptr,
    anchor_positions_ptr,
    seq_lens_ptr,
    context_positions_ptr,
    context_slots_ptr,
    anchors_ptr,
    positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    block_table_ptr,
    anchors_stride,
    positions_stride,
    num_rejected_stride,
    block_table_stride,
    num_reqs,
    num_rows,
    max_blocks,
    max_position,
    mask_token_id,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """Anchor at position P = last kept row's + 1, its block at P, P + 1, ...; context before P.

    One program per request, and one for rows that no request has.
    """
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if request == num_reqs:
        for first in range(start, num_rows, ROW_TILE):
            row = first + tl.arange(0, ROW_TILE)
            zeros = tl.zeros((ROW_TILE,), tl.int64)
            tl.store(context_positions_ptr + row, zeros, mask=row < num_rows)
            tl.store(context_slots_ptr + row, zeros - 1, mask=row < num_rows)
    else:
        end = tl.load(query_start_loc_ptr + request + 1).to(tl.int64)
        num_rejected = tl.load(num_rejected_ptr + request * num_rejected_stride)
        kept_end = end - num_rejected
        is_request = kept_end > start
        last = tl.load(positions_ptr + (kept_end - 1) * positions_stride, mask=is_request, other=-1)
        anchor_position = tl.where(is_request, last + 1, -1)
        table_ptr = block_table_ptr + request * block_table_stride

        query = tl.arange(0, QUERY_TILE)
        is_query = query < NUM_QUERIES
        position = anchor_position + query
        is_real = is_query & is_request
        anchor = tl.load(anchors_ptr + request * anchors_stride)
        anchor = tl.minimum(tl.maximum(anchor, 0), vocab_size - 1)
        token = tl.where((query == 0) & is_request, anchor, mask_token_id)
        slot = slot_of(table_ptr, position, max_position, BLOCK_SIZE, max_blocks, is_real)
        clamped = tl.where(is_request, tl.minimum(position, max_position - 1), 0)
        offset = request * NUM_QUERIES + query
        tl.store(token_ids_ptr + offset, token.to(tl.int64), mask=is_query)
        tl.store(query_positions_ptr + offset, clamped, mask=is_query)
        tl.store(slots_ptr + offset, slot, mask=is_query)
        # Without the anchor's slot, slot j predicts the token at its own position.
        is_draft = query < NUM_DRAFTS
        offset = request * NUM_DRAFTS + query
        tl.store(
            sample_rows_ptr + offset,
            request * NUM_QUERIES + query + NUM_QUERIES - NUM_DRAFTS,
            mask=is_draft,
        )
        sampled = tl.where(is_request, position + 1, 0)
        tl.store(sample_positions_ptr + offset, sampled, mask=is_draft)
        tl.store(anchor_positions_ptr + request, anchor_position)
        seq_len = tl.minimum(anchor_position + NUM_QUERIES, max_position)
        tl.store(seq_lens_ptr + request, tl.where(is_request, seq_len, 0).to(tl.int32))

        for first in range(start, end, ROW_TILE):
            row = first + tl.arange(0, ROW_TILE)
            is_kept = row < kept_end
            place = tl.load(positions_ptr + row * positions_stride, mask=is_kept, other=0)
            context = slot_of(table_ptr, place, max_position, BLOCK_SIZE, max_blocks, is_kept)
            place = tl.minimum(place, max_position - 1)
            tl.store(context_positions_ptr + row, place, mask=row < end)
            tl.store(context_slots_ptr + row, context, mask=row < end)


def _shapes(num_reqs: int, num_rows: int, num_queries: int, num_drafts: int) -> list[list[int]]:
    """Return the shapes of `DraftBlock`, in its order."""
    block, drafts = [num_reqs, num_queries], [num_reqs, num_drafts]
    return [block, block, block, drafts, drafts, [num_reqs], [num_reqs], [num_rows], [num_rows]]


def _checked_out(
    out: DraftBlock | None, shapes: list[list[int]], device: torch.device
) -> DraftBlock:
    dtypes = [torch.int32 if name == "seq_lens" else torch.int64 for name in DraftBlock._fields]
    if out is None:
        return DraftBlock(
            *(
                torch.empty(shape, dtype=dtype, device=device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        )
    for name, tensor, shape, dtype in zip(DraftBlock._fields, out, shapes, dtypes, strict=True):
        check_tensor(f"out.{name}", tensor, [dtype], shape, device)
        if not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"out.{name} must be contiguous, got strides {tensor.stride()}"
            )
    return out


def draft_block_inputs(
    anchors: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    num_drafts: int,
    mask_token_id: int,
    vocab_size: int,
    max_position: int,
    sample_from_anchor: bool = True,
    out: DraftBlock | None = None,
) -> DraftBlock:
    """Prepare the draft block of each request, and the places of the rows just verified.

    The anchor's position P follows the last row that was kept. With `sample_from_anchor` the block
    is the anchor and `num_drafts - 1` masks, and every slot predicts the token after it. Without it
    the block is the anchor and `num_drafts` masks, and every mask predicts the token at its own
    place. Positions at or past `max_position` get no slot. A request without rows is padding: it
    has slots -1, position 0, mask tokens and length 0. Call it once per KV-cache group, with the
    table and block size of the group.

    Args:
        anchors (int64, [num_reqs], device): Token decided last of each request, any stride; a
            placeholder (-1) is read as token 0.
        positions (int64, [num_rows], device): Positions of the target's rows, any stride.
        query_start_loc (int32, [num_reqs + 1], device): First row of each request; rows after the
            last belong to none. Dense.
        num_rejected (int32, [num_reqs], device): Last rows of each request that were not kept; any
            stride.
        block_table (int32, [num_reqs, max_blocks], device): Last dim dense.
        block_size: Tokens per block.
        num_drafts: Tokens to draft, at least 1.
        mask_token_id: Token of the slots after the anchor.
        vocab_size: Rows of the embedding.
        max_position: Positions there are; the limit of the drafter or of the cache.
        sample_from_anchor: Whether the anchor's own slot predicts.
        out: Receives the result; contiguous.

    Returns:
        The block.

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit.
    """
    device = launch_device("anchors", anchors)
    check_tensor("anchors", anchors, [torch.int64], [None], device)
    num_reqs = anchors.shape[0]
    check_tensor("positions", positions, [torch.int64], [None], device)
    check_tensor("num_rejected", num_rejected, [torch.int32], [num_reqs], device)
    for name, tensor, shape in (
        ("query_start_loc", query_start_loc, [num_reqs + 1]),
        ("block_table", block_table, [num_reqs, None]),
    ):
        check_tensor(name, tensor, [torch.int32], shape, device, is_last_dim_dense=True)
    for name, number in (
        ("block_size", block_size),
        ("num_drafts", num_drafts),
        ("vocab_size", vocab_size),
        ("max_position", max_position),
    ):
        if number < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {number}")
    if not 0 <= mask_token_id < vocab_size:
        raise InvalidArgumentError(
            f"mask_token_id must be in [0, {vocab_size}), got {mask_token_id}"
        )
    num_rows = positions.shape[0]
    num_queries = num_drafts if sample_from_anchor else num_drafts + 1
    out = _checked_out(out, _shapes(num_reqs, num_rows, num_queries, num_drafts), device)
    with on_device_of(anchors):
        _draft_block_inputs_kernel[(num_reqs + 1,)](
            *out,
            anchors,
            positions,
            query_start_loc,
            num_rejected,
            block_table,
            anchors.stride(0),
            positions.stride(0),
            num_rejected.stride(0),
            block_table.stride(0),
            num_reqs,
            num_rows,
            block_table.shape[1],
            max_position,
            mask_token_id,
            vocab_size,
            BLOCK_SIZE=block_size,
            NUM_QUERIES=num_queries,
            NUM_DRAFTS=num_drafts,
            QUERY_TILE=padded_to_power_of_two(num_queries),
            ROW_TILE=_ROW_TILE,
            num_warps=4,
        )
    return out
