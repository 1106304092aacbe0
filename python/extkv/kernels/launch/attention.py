"""Arguments of an attention kernel, checked once, and the sizes that its grid follows from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    check_tensor,
    launch_device,
    padded_to_power_of_two,
)

MAX_HEAD_DIM = 256


class AttentionCall(NamedTuple):
    """Inputs of an attention kernel, as `paged_attention` documents them."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scale: float
    is_causal: bool
    sliding_window: int | None

    @property
    def num_seqs(self) -> int:
        """Sequences, padded ones included."""
        return self.seq_lens.shape[0]

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.query.shape[1] // self.key_cache.shape[2]

    @property
    def dim_tile(self) -> int:
        """Head size padded to what a matrix instruction takes."""
        return padded_to_power_of_two(self.query.shape[2], least=16)

    @property
    def scale_log2(self) -> float:
        """Factor of the scores for a softmax with base 2."""
        return self.scale * math.log2(math.e)

    def check(self) -> None:
        """Check dtypes, shapes, strides and devices.

        Raises:
            InvalidArgumentError: If one does not fit.
        """
        query, cache, indices = self.query, self.key_cache, (torch.int32,)
        device = launch_device("query", query)
        check_tensor("query", query, FLOAT_DTYPES, [None] * 3, device, is_last_dim_dense=True)
        _, num_heads, head_dim = query.shape
        check_tensor("key_cache", cache, [query.dtype], [None, None, None, head_dim], device)
        check_tensor("value_cache", self.value_cache, [query.dtype], cache.shape, device)
        check_tensor("seq_lens", self.seq_lens, indices, [None], device, is_last_dim_dense=True)
        for name, tensor, shape in (
            ("query_start_loc", self.query_start_loc, [self.num_seqs + 1]),
            ("block_table", self.block_table, [self.num_seqs, None]),
        ):
            check_tensor(name, tensor, indices, shape, device, is_last_dim_dense=True)
        if cache.shape[1] == 0:
            raise InvalidArgumentError("block_size must be at least 1, got 0")
        if not 0 < head_dim <= MAX_HEAD_DIM:
            raise InvalidArgumentError(f"head_dim must be in [1, {MAX_HEAD_DIM}], got {head_dim}")
        num_kv_heads = cache.shape[2]
        if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
            raise InvalidArgumentError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidArgumentError(
                f"sliding_window must be at least 1, got {self.sliding_window}"
            )

    def output(self, out: torch.Tensor | None) -> torch.Tensor:
        """Return `out` once checked, or a new tensor.

        Raises:
            InvalidArgumentError: If `out` does not fit.
        """
        query = self.query
        if out is None:
            return torch.empty(query.shape, dtype=query.dtype, device=query.device)
        check_tensor("out", out, [query.dtype], query.shape, query.device, is_last_dim_dense=True)
        return out


class LaunchSettings(NamedTuple):
    """Tile sizes and launch options of an attention kernel."""

    row_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


def heads_per_row_tile(heads_per_kv_head: int, row_tile: int) -> int:
    """Return the most query heads of one KV head that share a row tile and divide them evenly."""
    largest = min(heads_per_kv_head, row_tile)
    return next(n for n in range(largest, 0, -1) if heads_per_kv_head % n == 0)
