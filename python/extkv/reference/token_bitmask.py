"""Grammar masks on logits: one bit per token says whether it may be chosen."""

from __future__ import annotations

import torch

# Bounds the memory of the bits of some rows, spread.
_ELEMENTS = 2**22


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, row_ids: torch.Tensor) -> None:
    """Set logits of tokens whose bit is 0 to -inf; see `extkv.kernels.token_bitmask`."""
    token = torch.arange(logits.shape[1], device=logits.device)
    num_rows = max(1, _ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, row_ids.shape[0], num_rows):
        rows, words = row_ids[start : start + num_rows], bitmask[start : start + num_rows]
        is_forbidden = (words[:, token // 32] >> (token % 32)) & 1 == 0
        logits[rows] = logits[rows].masked_fill(is_forbidden, -torch.inf)
