"""Attention of few new tokens per sequence over a paged cache; one loop does not split the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.reference.paged_attention import paged_attention

if TYPE_CHECKING:
    import torch

_PROGRAMS_PER_PROCESSOR = 2
_MIN_TOKENS_PER_SPLIT = 128
_MAX_NUM_SPLITS = 128


def choose_num_splits(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, num_processors: int
) -> int:
    """Return how many programs should share a sequence, in [1, 128]."""
    num_programs = max(num_seqs * num_kv_heads, 1)
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    useful = max(max_seq_len // _MIN_TOKENS_PER_SPLIT, 1)
    return min(wanted, useful, _MAX_NUM_SPLITS)


def decode_workspace_size(num_tokens: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return how many float32 elements the kernel's workspace needs; none for one split."""
    return 0 if num_splits == 1 else num_tokens * num_heads * num_splits * (head_dim + 2)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    max_query_len: int = 1,  # noqa: ARG001 division of work, not meaning
    is_causal: bool = True,
    sliding_window: int | None = None,
    num_splits: int = 1,  # noqa: ARG001 the same
    workspace: torch.Tensor | None = None,  # noqa: ARG001 the same
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over each sequence; see `extkv.kernels.decode_attention.decode_attention`."""
    return paged_attention(
        query,
        key_cache,
        value_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        out=out,
    )
