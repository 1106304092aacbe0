"""Loss of draft tokens against the target's law, and its gradient."""

from __future__ import annotations

import torch

from extkv.drafting import DraftLossRows


def draft_loss(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_rows: torch.Tensor,
    label_ids: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    *,
    ce_weight: float = 0.1,
    tv_weight: float = 0.9,
) -> DraftLossRows:
    """Compare rows of draft logits; see `extkv.kernels.draft_loss.draft_loss`.

    Logits of float64 are compared in float64.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = torch.log_softmax(logits.to(wide), dim=-1)
    target_logprobs = torch.log_softmax(target_logits[target_rows].to(wide), dim=-1)
    q = logprobs.exp()
    difference = q - target_logprobs.exp()
    column = label_ids[:, None]
    rows = DraftLossRows(
        cross_entropy=-logprobs.gather(1, column)[:, 0],
        total_variation=difference.abs().sum(dim=-1),
        target_logprob=target_logprobs.gather(1, column)[:, 0],
        argmax=logits.argmax(dim=-1),
    )
    if row_weights is not None:
        sign = difference.sign_()
        mean_sign = (q * sign).sum(dim=-1, keepdim=True)
        gradient = tv_weight * q * (sign - mean_sign) + ce_weight * q
        gradient.scatter_add_(1, column, torch.full_like(gradient[:, :1], -ce_weight))
        logits.copy_(gradient * row_weights.to(wide)[:, None])
    return rows
