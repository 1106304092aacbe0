"""Paged attention inputs with poisoned caches, and the formula in float64."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import extkv
import torch

# Largest difference to float64. Outputs are averages of standard normal values. float32: sums of
# some hundred terms; on the GPU its products are three tf32 products. The half types: output and
# softmax weights are rounded to 8 (bfloat16) or 11 bits.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYOUTS = ("split", "interleaved", "heads_first", "heads_outermost", "dims_outermost")
NO_BLOCK = -(2**30)


@dataclass
class PagedCase:
    """Inputs of an attention call."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @property
    def scale(self) -> float:
        """The usual factor of the scores."""
        return float(self.query.shape[2]) ** -0.5

    @property
    def arguments(self) -> dict[str, object]:
        """All arguments by name."""
        return {**self.__dict__, "scale": self.scale}


def cache_pair(
    layout: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    fill: float = torch.nan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value cache [num_blocks, block_size, num_kv_heads, head_dim] of a layout."""
    num_blocks, block_size, num_heads, head_dim = shape
    stored_shape, order = {
        "split": ((2, num_blocks, block_size, num_heads, head_dim), (0, 1, 2, 3)),
        "interleaved": ((num_blocks, 2, block_size, num_heads, head_dim), (0, 1, 2, 3)),
        "heads_first": ((2, num_blocks, num_heads, block_size, head_dim), (0, 2, 1, 3)),
        "heads_outermost": ((2, num_heads, num_blocks, block_size, head_dim), (1, 2, 0, 3)),
        "dims_outermost": ((2, head_dim, num_blocks, block_size, num_heads), (1, 2, 3, 0)),
    }[layout]
    stored = torch.full(stored_shape, fill, dtype=dtype, device=device)
    if layout == "interleaved":
        return stored[:, 0], stored[:, 1]
    return stored[0].permute(order), stored[1].permute(order)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    device: torch.device,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "split",
    fill: float = torch.nan,
    num_padded_tokens: int = 0,
) -> PagedCase:
    """Make a batch of sequences of (query_len, seq_len) in shuffled blocks.

    Every slot that no token owns holds `fill`, every unused block table entry `NO_BLOCK`, and rows
    after the last sequence hold NaN.
    """
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + head_dim + block_size)
    blocks_per_seq = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks_per_seq) + 3
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache, value_cache = cache_pair(layout, shape, dtype, device, fill)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    width = max([*blocks_per_seq, 0]) + 2
    block_table = torch.full((len(lengths), width), NO_BLOCK, dtype=torch.int32)
    for seq, (_, seq_len) in enumerate(lengths):
        for index in range(blocks_per_seq[seq]):
            block = free.pop()
            block_table[seq, index] = block
            num_tokens = min(block_size, seq_len - index * block_size)
            for cache in (key_cache, value_cache):
                numbers = torch.randn((num_tokens, num_kv_heads, head_dim), generator=generator)
                cache[block, :num_tokens] = numbers.to(device, dtype)
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0)
    num_tokens = int(starts[-1])
    query = torch.full((num_tokens + num_padded_tokens, num_heads, head_dim), torch.nan)
    query[:num_tokens] = torch.randn((num_tokens, num_heads, head_dim), generator=generator)
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    return PagedCase(
        query=query.to(device, dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=seq_lens.to(device),
        block_table=block_table.to(device),
    )


def far_case(device: torch.device, seq_len: int, query_len: int) -> PagedCase:
    """Make a sequence in blocks past 2^31 elements of a committed reservation."""
    case = make_case(
        [(query_len, seq_len)],
        device=device,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
    )
    num_blocks, block_elements = 131_072 + 64, 16 * 8 * 128
    memory = extkv.ExtensibleTensor(2 * num_blocks * block_elements * 2, device, 2)
    memory.resize_per_segment_(num_blocks * block_elements * 2)
    shape = (num_blocks, 16, 8, 128)
    far = torch.arange(num_blocks - 1, num_blocks - 128, -1, dtype=torch.int32, device=device)
    table = torch.full_like(case.block_table, -1)
    used = -(-seq_len // 16)
    table[0, :used] = far[:used]
    caches = []
    for segment, source in enumerate((case.key_cache, case.value_cache)):
        cache = memory.view(torch.bfloat16, shape, segment=segment, full=True)
        cache[far[:used].long()] = source[case.block_table[0, :used].long()]
        caches.append(cache)
    return dataclasses.replace(case, key_cache=caches[0], value_cache=caches[1], block_table=table)


def committed_edge_case(device: torch.device, seq_len: int, query_len: int) -> PagedCase:
    """Make a sequence whose last block ends where the committed memory of each segment ends."""
    case = make_case(
        [(query_len, seq_len)],
        device=device,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        block_size=256,
        dtype=torch.bfloat16,
    )
    block_bytes = 256 * 8 * 128 * 2
    memory = extkv.ExtensibleTensor(2 * 64 * block_bytes, device, 2, growth="exact")
    memory.resize_per_segment_(4 * block_bytes)
    assert memory.stats().committed_bytes == 8 * block_bytes
    caches = []
    for segment, source in enumerate((case.key_cache, case.value_cache)):
        cache = memory.view(torch.bfloat16, (64, 256, 8, 128), segment=segment, full=True)
        cache[:4] = source[case.block_table[0, :4].long()]
        caches.append(cache)
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    return dataclasses.replace(case, key_cache=caches[0], value_cache=caches[1], block_table=table)


def explicit_attention(
    case: PagedCase, *, is_causal: bool = True, sliding_window: int | None = None
) -> torch.Tensor:
    """Return softmax(scale * query . keys) . values in float64, zero for rows without keys."""
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    block_size = case.key_cache.shape[1]
    heads_per_kv_head = case.query.shape[1] // case.key_cache.shape[2]
    starts = case.query_start_loc.tolist()
    for seq, seq_len in enumerate(case.seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        if seq_len == 0 or query_len == 0:
            continue
        key_ids = torch.arange(seq_len, device=case.query.device)
        blocks = case.block_table[seq, key_ids // block_size].to(torch.int64)
        keys = case.key_cache[blocks, key_ids % block_size].to(torch.float64)
        values = case.value_cache[blocks, key_ids % block_size].to(torch.float64)
        keys = keys.repeat_interleave(heads_per_kv_head, dim=1)  # [seq_len, num_heads, head_dim]
        values = values.repeat_interleave(heads_per_kv_head, dim=1)
        query = case.query[starts[seq] : starts[seq + 1]].to(torch.float64)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * case.scale
        context_len = seq_len - query_len
        query_ids = torch.arange(context_len, seq_len, device=case.query.device)[:, None]
        is_visible = torch.ones_like(scores[0], dtype=torch.bool)
        if is_causal:
            is_visible &= key_ids <= query_ids
        if sliding_window is not None:
            anchor = query_ids + 1 if is_causal else context_len
            is_visible &= key_ids >= anchor - sliding_window
        weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
        out[starts[seq] : starts[seq + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def assert_matches(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless every element is finite and within the tolerance of the result's dtype."""
    assert bool(found.isfinite().all()), "result has NaN or infinity"
    difference = float((found.to(torch.float64) - expected).abs().max()) if found.numel() else 0.0
    assert difference <= TOLERANCES[found.dtype], difference
