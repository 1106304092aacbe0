"""Causal grouped-query attention of one sequence, on PyTorch's own kernel."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from the last tokens of a sequence to the whole of it.

    Args:
        query (float, [num_tokens, num_heads, head_dim]): Queries of the last `num_tokens` tokens.
        keys (float, [seq_len, num_kv_heads, head_dim]): Keys of all tokens, `seq_len >=
            num_tokens`.
        values (float, [seq_len, num_kv_heads, head_dim]): Values of all tokens.

    Returns:
        Tensor (float, [num_tokens, num_heads, head_dim]): row i sees the first
        `seq_len - num_tokens + i + 1` tokens.
    """
    num_tokens, seq_len = query.shape[0], keys.shape[0]
    mask = None
    if 1 < num_tokens < seq_len:
        mask = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal=seq_len - num_tokens)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, num_heads, num_tokens, head_dim]
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=1 < num_tokens == seq_len,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
