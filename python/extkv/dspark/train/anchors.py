"""Where blocks of training begin, and which of their rows are supervised."""

from __future__ import annotations

import torch


def draw_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors of each text, uniformly without replacement.

    A position can be an anchor if it and the one after it are answer.

    Args:
        loss_mask (bool, [num_texts, num_tokens], CPU): Tokens of answers.
        num_anchors: Blocks per text.
        generator: Source of random numbers, on the CPU.

    Returns:
        Positions (int64, [num_texts, num_anchors]), ascending, and whether each is more than
        padding (bool, the same shape). Padding comes last and has position 0.
    """
    num_texts, num_tokens = loss_mask.shape
    can_be = loss_mask[:, :-1] & loss_mask[:, 1:]
    keys = torch.rand((num_texts, num_tokens - 1), generator=generator)
    keys = keys.masked_fill(~can_be, -1.0)
    drawn = keys.topk(min(num_anchors, num_tokens - 1), dim=1)
    positions = drawn.indices.masked_fill(drawn.values < 0, num_tokens).sort(dim=1).values
    missing = num_anchors - positions.shape[1]
    positions = torch.nn.functional.pad(positions, (0, missing), value=num_tokens)
    is_real = positions < num_tokens
    return positions.masked_fill(~is_real, 0), is_real


def supervised(
    loss_mask: torch.Tensor, anchors: torch.Tensor, is_real: torch.Tensor, num_drafts: int
) -> torch.Tensor:
    """Return which drafts have a label: those before the first one outside the answer.

    Args:
        loss_mask (bool, [num_texts, num_tokens]): Tokens of answers.
        anchors (int64, [num_texts, num_anchors]): Position of each anchor.
        is_real (bool, [num_texts, num_anchors]): Blocks that are more than padding.
        num_drafts: Drafts of a block.

    Returns:
        Tensor (bool, [num_texts, num_anchors, num_drafts]).
    """
    num_tokens = loss_mask.shape[1]
    labels = anchors[..., None] + torch.arange(1, num_drafts + 1, device=anchors.device)
    is_inside = labels < num_tokens
    flat = labels.clamp(max=num_tokens - 1).flatten(1)
    is_answer = loss_mask.gather(1, flat).view(labels.shape)
    has_label = is_inside & is_answer & is_real[..., None]
    return has_label.to(torch.int32).cumprod(dim=-1).to(torch.bool)


def slot_weights(num_drafts: int, decay: float) -> torch.Tensor:
    """Return the weight of each draft, `exp(-k / decay)` (float32, [num_drafts])."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / decay)
