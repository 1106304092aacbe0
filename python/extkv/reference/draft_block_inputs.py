"""Inputs of a draft round from what a verification step left."""

from __future__ import annotations

import torch

from extkv.drafting import DraftBlock


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
    """Prepare draft blocks; see `extkv.kernels.draft_block_inputs.draft_block_inputs`."""
    num_reqs, num_rows, device = anchors.shape[0], positions.shape[0], anchors.device
    num_queries = num_drafts if sample_from_anchor else num_drafts + 1
    skipped = num_queries - num_drafts
    starts = query_start_loc.to(torch.int64)
    kept_ends = starts[1:] - num_rejected
    is_request = kept_ends > starts[:-1]
    query = torch.arange(num_queries, device=device)
    request = torch.arange(num_reqs, device=device)

    anchor_positions = torch.full((num_reqs,), -1, dtype=torch.int64, device=device)
    anchor_positions[is_request] = positions[kept_ends[is_request] - 1] + 1
    block = anchor_positions[:, None] + query
    real = is_request[:, None]
    slots = _slots(block_table, request[:, None].expand_as(block), block, block_size, max_position)
    token_ids = torch.full((num_reqs, num_queries), mask_token_id, device=device)
    token_ids[is_request, 0] = anchors[is_request].clamp(0, vocab_size - 1)
    sampled = block[:, :num_drafts] + 1
    seq_lens = (anchor_positions + num_queries).clamp(max=max_position)

    row = torch.arange(num_rows, device=device)
    owner = torch.searchsorted(starts, row, right=True) - 1
    is_kept = (owner < num_reqs) & (row < torch.cat([kept_ends, starts[-1:]])[owner])
    context = torch.where(is_kept, positions, 0)
    context_slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    context_slots[is_kept] = _slots(
        block_table, owner[is_kept], context[is_kept], block_size, max_position
    )
    result = DraftBlock(
        token_ids,
        torch.where(real, block.clamp(max=max_position - 1), 0),
        torch.where(real, slots, -1),
        request[:, None] * num_queries + query[:num_drafts] + skipped,
        torch.where(real, sampled, 0),
        anchor_positions,
        torch.where(is_request, seq_lens, 0).to(torch.int32),
        context.clamp(max=max_position - 1),
        context_slots,
    )
    if out is None:
        return result
    for target, found in zip(out, result, strict=True):
        target.copy_(found)
    return out


def _slots(
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    max_position: int,
) -> torch.Tensor:
    """Return the cache slot of each position, -1 where there is none."""
    blocks = positions // block_size
    has_slot = (positions >= 0) & (positions < max_position) & (blocks < block_table.shape[1])
    slots = torch.full_like(positions, -1)
    block_ids = block_table[requests[has_slot], blocks[has_slot]].to(torch.int64)
    slots[has_slot] = block_ids * block_size + positions[has_slot] % block_size
    return slots
