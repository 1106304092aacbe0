"""Causal grouped-query attention of one sequence, on PyTorch's own kernel."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend from the last tokens of a sequence to the whole of it.

    Args:
        query (float, [num_tokens, num_heads, head_dim]): Queries of the last `num_tokens` tokens.
        keys (float, [seq_len, num_kv_heads, head_dim]): Keys of all tokens, `seq_len >=
            num_tokens`.
        values (float, [seq_len, num_kv_heads, head_dim]): Values of all tokens.
        sliding_window: Number of tokens that a token sees, its own included; None for all.

    Returns:
        Tensor (float, [num_tokens, num_heads, head_dim]): row i sees the first
        `seq_len - num_tokens + i + 1` tokens, the last `sliding_window` of them.
    """
    num_tokens, seq_len = query.shape[0], keys.shape[0]
    if sliding_window is not None and seq_len - num_tokens >= sliding_window:
        # The first row sees no token before its window, so no later row does.
        start = seq_len - num_tokens + 1 - sliding_window
        keys, values, seq_len = keys[start:], values[start:], seq_len - start
    is_windowed = sliding_window is not None and seq_len > sliding_window
    mask = None
    if num_tokens > 1 and (is_windowed or num_tokens < seq_len):
        mask = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal=seq_len - num_tokens)
        if is_windowed and sliding_window is not None:
            mask = mask.triu(diagonal=seq_len - num_tokens + 1 - sliding_window)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, num_heads, num_tokens, head_dim]
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and num_tokens > 1,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
