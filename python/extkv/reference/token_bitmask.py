"""Grammar masks on logits: one bit per token says whether it may be chosen."""

from __future__ import annotations

import torch


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, row_ids: torch.Tensor) -> None:
    """Set logits of tokens whose bit is 0 to -inf; see `extkv.kernels.token_bitmask`."""
    token = torch.arange(logits.shape[1], device=logits.device)
    for words, row in zip(bitmask, row_ids.tolist(), strict=True):
        is_forbidden = (words[token // 32] >> (token % 32)) & 1 == 0
        logits[row, is_forbidden] = -torch.inf
