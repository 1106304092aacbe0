"""Inputs of draft blocks: which token and which position each slot has.

Slot 0 of a block holds the anchor, the last decided token, at its own position `P`; the slots after
it hold masks at `P + 1, P + 2, ...`. Anchor-first, slot `j` predicts position `P + j + 1`; in
fill-in layout slot `j` predicts position `P + j`, and slot 0 nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from extkv.models.dspark.config import DSparkConfig


def block_token_ids(config: DSparkConfig, anchor_token_ids: torch.Tensor) -> torch.Tensor:
    """Return the token of every slot.

    Args:
        config: The drafter.
        anchor_token_ids (int64, [num_blocks]): Anchors.

    Returns:
        Tensor (int64, [num_blocks * block_size]).
    """
    slots = anchor_token_ids.new_full(
        (anchor_token_ids.shape[0], config.block_size), config.mask_token_id
    )
    slots[:, 0] = anchor_token_ids
    return slots.view(-1)


def block_positions(
    config: DSparkConfig, anchor_positions: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """Return the position of every slot, the last one that exists where a block reaches past it.

    Args:
        config: The drafter.
        anchor_positions (int64, [num_blocks]): Position of each anchor.
        num_positions: Number of positions that exist.

    Returns:
        Tensor (int64, [num_blocks * block_size]).
    """
    offsets = torch.arange(config.block_size, device=anchor_positions.device)
    positions = anchor_positions[:, None] + offsets
    return positions.clamp(max=num_positions - 1).view(-1)


def predicted_positions(config: DSparkConfig, anchor_positions: torch.Tensor) -> torch.Tensor:
    """Return the position of every draft: the `num_drafts` positions after the anchor.

    Args:
        config: The drafter.
        anchor_positions (int64, [num_blocks]): Position of each anchor.

    Returns:
        Tensor (int64, [num_blocks, num_drafts]).
    """
    offsets = torch.arange(1, config.num_drafts + 1, device=anchor_positions.device)
    return anchor_positions[:, None] + offsets


def draft_rows(config: DSparkConfig, hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of the slots that predict, without copying.

    Args:
        config: The drafter.
        hidden (float, [num_blocks * block_size, hidden_size]): What `block_forward` returned.

    Returns:
        Tensor (float, [num_blocks, num_drafts, hidden_size]).
    """
    blocks = hidden.view(-1, config.block_size, hidden.shape[-1])
    return blocks[:, config.first_draft_slot :]
