"""Attention of packed queries over a paged cache: any mix of decode rows and prefill chunks."""

from __future__ import annotations

import torch
from torch.nn import functional


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    is_causal: bool = True,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over each sequence; see `extkv.kernels.paged_attention.paged_attention`."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0 or seq_len == 0:
            out[rows] = 0
            continue
        begin = 0
        if sliding_window is not None:
            begin = max(seq_len - query_len - sliding_window + int(is_causal), 0)
        out[rows] = _attend(
            query[rows].to(torch.float32),
            gather(key_cache, block_table[seq], begin, seq_len),
            gather(value_cache, block_table[seq], begin, seq_len),
            scale,
            sliding_window,
            is_causal=is_causal and query_len > 1,
        )
    out[starts[-1] :] = 0
    return out


def gather(
    cache: torch.Tensor, block_table_row: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Copy tokens [begin, end) of one sequence out of the cache; no other slot is read.

    Args:
        cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): Keys or values.
        block_table_row (int, [max_blocks], device): Blocks of the sequence.
        begin: First position.
        end: Position after the last one.

    Returns:
        Tensor (float32, [end - begin, num_kv_heads, head_dim], device).
    """
    block_size = cache.shape[1]
    first_block, last_block = begin // block_size, end // block_size
    num_whole = (last_block - first_block) * block_size
    tokens = torch.empty(
        (end - first_block * block_size, *cache.shape[2:]), dtype=cache.dtype, device=cache.device
    )
    whole = tokens[:num_whole].view(-1, *cache.shape[1:])
    torch.index_select(cache, 0, block_table_row[first_block:last_block], out=whole)
    if num_whole < tokens.shape[0]:
        rest = cache[int(block_table_row[last_block])]
        tokens[num_whole:] = rest[: end - last_block * block_size]
    return tokens[begin - first_block * block_size :].to(torch.float32)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Return softmax(scale * query . keys) . values of one sequence, in float32.

    Args:
        query (float32, [query_len, num_heads, head_dim], device): The last tokens.
        keys (float32, [num_keys, num_kv_heads, head_dim], device): Keys up to the last token.
        values (float32, [num_keys, num_kv_heads, head_dim], device): Their values.
        scale: Factor of the scores.
        sliding_window: Number of keys that a causal row sees; None for all.
        is_causal: Whether rows see different keys.
    """
    query_len, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if is_causal and query_len == num_keys and sliding_window is None:
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)
    visible = None
    if is_causal:
        key_ids = torch.arange(num_keys, device=query.device)
        last_ids = key_ids[num_keys - query_len :, None]
        visible = key_ids <= last_ids
        if sliding_window is not None:
            visible &= key_ids > last_ids - sliding_window
        visible = visible.repeat(num_heads // num_kv_heads, 1)
    # The heads of one KV head become rows of it: [1, num_kv_heads, heads * query_len, head_dim].
    rows = query.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=visible, scale=scale
    )
    return attended.reshape(num_heads, query_len, head_dim).transpose(0, 1)
