"""Attention of packed queries over a paged cache: any mix of decode rows and prefill chunks.

No address at or past a sequence's length is formed, let alone read: lanes of a ragged tile point at
the last valid token. So the cache may be a view of growable memory with nothing behind its tail.
`decode_attention` is faster where every sequence has few new tokens.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.launch.arguments import on_device_of
from extkv.kernels.launch.attention import AttentionCall, LaunchSettings, heads_per_row_tile


@triton.jit
def sequence_of(
    query_start_loc_ptr, index, num_seqs, TOKEN_TILE: tl.constexpr, NUM_SPARE_TILES: tl.constexpr
):
    """Return the last s up to num_seqs with start(s) // TOKEN_TILE + s * NUM_SPARE_TILES <= index.

    `num_seqs` stands for the tokens after all sequences. With one spare tile per sequence every
    sequence has enough tiles (https://github.com/vllm-project/vllm/pull/16828).
    """
    low = tl.full((), 0, tl.int32)
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(query_start_loc_ptr + middle)
        is_at_or_before = start // TOKEN_TILE + middle * NUM_SPARE_TILES <= index
        low = tl.where(is_at_or_before, middle, low)
        high = tl.where(is_at_or_before, high, middle - 1)
    return low


@triton.jit
def visible_range(query_position, context_len, seq_len, window, IS_CAUSAL: tl.constexpr):
    """Return the half-open range of key positions that a query may see; a window of 0 is none."""
    if IS_CAUSAL:
        end = tl.minimum(query_position + 1, seq_len)
        begin = tl.where(window > 0, tl.maximum(query_position + 1 - window, 0), 0)
    else:
        end = seq_len + query_position * 0
        begin = tl.where(window > 0, tl.maximum(context_len - window, 0), 0) + query_position * 0
    return begin, end


@triton.jit
def attend_tile(
    query,
    accumulator,
    row_max,
    row_sum,
    start,
    row_begin,
    row_end,
    last_position,
    scale_log2,
    table_row_ptr,
    key_ptr,
    value_ptr,
    key_stride_block,
    key_stride_position,
    value_stride_block,
    value_stride_position,
    key_dim_offset,
    value_dim_offset,
    dim_mask,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HAS_DIM_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add keys [start, start + KEY_TILE) to a running softmax: its maximum, sum and outputs."""
    lane = start + tl.arange(0, KEY_TILE)
    position = tl.minimum(lane, last_position) if IS_MASKED else lane
    if BLOCK_SIZE % KEY_TILE == 0:
        # `start` is a multiple of KEY_TILE: the tile lies in one block.
        block = tl.load(table_row_ptr + start // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table_row_ptr + position // BLOCK_SIZE).to(tl.int64)
    in_block = (position % BLOCK_SIZE).to(tl.int64)

    key_offset = block * key_stride_block + in_block * key_stride_position
    key_ptrs = key_ptr + key_offset[:, None] + key_dim_offset[None, :]
    if HAS_DIM_MASK:
        key = tl.load(key_ptrs, mask=dim_mask[None, :], other=0.0)
    else:
        key = tl.load(key_ptrs)
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
    if IS_MASKED:
        visible = lane[None, :] < row_end[:, None]
        if HAS_WINDOW:
            visible = visible & (lane[None, :] >= row_begin[:, None])
        scores = tl.where(visible, scores, -float("inf"))

    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps -inf, and -inf - -inf is NaN.
    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None]

    value_offset = block * value_stride_block + in_block * value_stride_position
    value_ptrs = value_ptr + value_offset[:, None] + value_dim_offset[None, :]
    if HAS_DIM_MASK:
        value = tl.load(value_ptrs, mask=dim_mask[None, :], other=0.0)
    else:
        value = tl.load(value_ptrs)
    accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="tf32x3")
    return accumulator, new_max, row_sum


@triton.jit
def store_rows(
    out_ptr, accumulator, row_sum, row_id, head, dim, out_stride_token, out_stride_head, mask
):
    """out[row, head] = accumulator / row_sum; a row that saw no key gives zeros."""
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_offset = row_id * out_stride_token + head * out_stride_head
    out_ptrs = out_ptr + out_offset[:, None] + dim[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "window", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _paged_attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    scale_log2,
    window,
    num_seqs,
    num_tokens,
    table_stride,
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_position,
    key_stride_head,
    key_stride_dim,
    value_stride_block,
    value_stride_position,
    value_stride_head,
    value_stride_dim,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """out[t, h] = softmax(scale * query[t, h] . keys) . values over the keys that t may see.

    A row tile holds TOKEN_TILE tokens with HEAD_TILE query heads of one KV head.
    """
    # Late tiles of a causal sequence are the longest: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_head = tl.program_id(1) * HEAD_TILE
    kv_head = (first_head // HEADS_PER_KV_HEAD).to(tl.int64)
    seq = sequence_of(query_start_loc_ptr, tile, num_seqs, TOKEN_TILE, 1)
    is_sequence = seq < num_seqs
    query_start = tl.load(query_start_loc_ptr + seq)
    query_end = tl.load(query_start_loc_ptr + seq + 1, mask=is_sequence, other=0)
    query_end = tl.where(is_sequence, query_end, num_tokens)
    seq_len = tl.load(seq_lens_ptr + seq, mask=is_sequence, other=0)
    query_len = query_end - query_start
    first_token = (tile - query_start // TOKEN_TILE - seq) * TOKEN_TILE
    if first_token >= query_len:
        return

    row = tl.arange(0, ROW_TILE)
    token = first_token + row // HEAD_TILE
    head = first_head + row % HEAD_TILE
    dim = tl.arange(0, DIM_TILE)
    dim_mask = dim < HEAD_DIM
    row_mask = (token < query_len) & (row < TOKEN_TILE * HEAD_TILE)
    mask = row_mask[:, None] & dim_mask[None, :]
    row_id = (query_start + token).to(tl.int64)
    query_offset = row_id * query_stride_token + head * query_stride_head
    query = tl.load(query_ptr + query_offset[:, None] + dim[None, :], mask=mask, other=0.0)

    context_len = seq_len - query_len
    row_begin, row_end = visible_range(context_len + token, context_len, seq_len, window, IS_CAUSAL)
    last_token = tl.minimum(first_token + TOKEN_TILE, query_len) - 1
    begin, first_end = visible_range(
        context_len + first_token, context_len, seq_len, window, IS_CAUSAL
    )
    _, end = visible_range(context_len + last_token, context_len, seq_len, window, IS_CAUSAL)
    begin = begin // KEY_TILE * KEY_TILE
    # Below `dense_end` every row sees every key.
    dense_end = begin if HAS_WINDOW else tl.maximum(first_end, 0) // KEY_TILE * KEY_TILE

    table_row_ptr = block_table_ptr + seq.to(tl.int64) * table_stride
    # Lanes past the head's size repeat its dims: masked, and still inside the cache.
    stored_dim = (dim if HEAD_DIM == DIM_TILE else dim % HEAD_DIM).to(tl.int64)
    key_dim_offset = kv_head * key_stride_head + stored_dim * key_stride_dim
    value_dim_offset = kv_head * value_stride_head + stored_dim * value_stride_dim
    accumulator = tl.zeros((ROW_TILE, DIM_TILE), tl.float32)
    row_max = tl.full((ROW_TILE,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROW_TILE,), tl.float32)
    for start in range(begin, dense_end, KEY_TILE):
        accumulator, row_max, row_sum = attend_tile(
            query,
            accumulator,
            row_max,
            row_sum,
            start,
            row_begin,
            row_end,
            seq_len - 1,
            scale_log2,
            table_row_ptr,
            key_ptr,
            value_ptr,
            key_stride_block,
            key_stride_position,
            value_stride_block,
            value_stride_position,
            key_dim_offset,
            value_dim_offset,
            dim_mask,
            BLOCK_SIZE,
            KEY_TILE,
            HEAD_DIM != DIM_TILE,
            HAS_WINDOW,
            False,
        )
    for start in range(dense_end, end, KEY_TILE):
        accumulator, row_max, row_sum = attend_tile(
            query,
            accumulator,
            row_max,
            row_sum,
            start,
            row_begin,
            row_end,
            seq_len - 1,
            scale_log2,
            table_row_ptr,
            key_ptr,
            value_ptr,
            key_stride_block,
            key_stride_position,
            value_stride_block,
            value_stride_position,
            key_dim_offset,
            value_dim_offset,
            dim_mask,
            BLOCK_SIZE,
            KEY_TILE,
            HEAD_DIM != DIM_TILE,
            HAS_WINDOW,
            True,
        )
    store_rows(
        out_ptr, accumulator, row_sum, row_id, head, dim, out_stride_token, out_stride_head, mask
    )


# By padded head size; what fits the registers and the shared memory of sm_90.
_SETTINGS = {
    64: LaunchSettings(row_tile=128, key_tile=64, num_warps=4, num_stages=3),
    128: LaunchSettings(row_tile=128, key_tile=64, num_warps=8, num_stages=3),
    256: LaunchSettings(row_tile=128, key_tile=32, num_warps=8, num_stages=3),
}
_FLOAT32_SETTINGS = {
    64: LaunchSettings(row_tile=32, key_tile=32, num_warps=4, num_stages=2),
    128: LaunchSettings(row_tile=32, key_tile=32, num_warps=8, num_stages=2),
    256: LaunchSettings(row_tile=16, key_tile=16, num_warps=8, num_stages=2),
}


def launch_settings(dim_tile: int, dtype: torch.dtype) -> LaunchSettings:
    """Choose the tiles for a padded head size."""
    table = _FLOAT32_SETTINGS if dtype == torch.float32 else _SETTINGS
    return table[max(dim_tile, 64)]


def launch(call: AttentionCall, out: torch.Tensor, settings: LaunchSettings) -> None:
    """Run the kernel on a checked call."""
    num_tokens, num_heads, head_dim = call.query.shape
    head_tile = heads_per_row_tile(call.heads_per_kv_head, settings.row_tile)
    token_tile = settings.row_tile // head_tile
    # One tile more than needed per sequence, and for the tokens after all sequences.
    num_tiles = num_tokens // token_tile + call.num_seqs + 1
    with on_device_of(call.query):
        _paged_attention_kernel[num_tiles, num_heads // head_tile](
            out,
            call.query,
            call.key_cache,
            call.value_cache,
            call.query_start_loc,
            call.seq_lens,
            call.block_table,
            call.scale_log2,
            call.sliding_window or 0,
            call.num_seqs,
            num_tokens,
            call.block_table.stride(0),
            *out.stride()[:2],
            *call.query.stride()[:2],
            *call.key_cache.stride(),
            *call.value_cache.stride(),
            HEADS_PER_KV_HEAD=call.heads_per_kv_head,
            HEAD_TILE=head_tile,
            BLOCK_SIZE=call.key_cache.shape[1],
            HEAD_DIM=head_dim,
            DIM_TILE=call.dim_tile,
            ROW_TILE=settings.row_tile,
            TOKEN_TILE=token_tile,
            KEY_TILE=settings.key_tile,
            IS_CAUSAL=call.is_causal,
            HAS_WINDOW=call.sliding_window is not None,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        )


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
    """Attend from the new tokens of each sequence to the sequence's cached tokens.

    Sequence `s` has its new tokens in rows `[query_start_loc[s], query_start_loc[s + 1])`; they are
    the last of its `seq_lens[s]` tokens and are in the cache already. Token `j` of a sequence is
    position `j % block_size` of block `block_table[s, j // block_size]`; its elements lie where
    `kv_append` puts them. With `P = seq_len - query_len` tokens before the new ones, row `i` of a
    sequence sees the keys

    - causal: `j <= P + i`, and `j > P + i - sliding_window`;
    - not causal: all `j < seq_len`, and `j >= P - sliding_window`: the window is anchored at the
      first new token, so that all of them see the same keys (what DSpark drafters do).

    Only slots below `seq_len` are read, and no other address is formed: NaN or unmapped memory
    behind them does no harm. Rows of a sequence of length 0, and rows past the last sequence, give
    zeros and read nothing.

    Args:
        query (float, [num_tokens, num_heads, head_dim], device): Packed queries; head_dim up to 256
            and dense.
        key_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): Same dtype as
            `query`, any strides.
        value_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): The same.
        query_start_loc (int32, [num_seqs + 1], device): First row of each sequence, ascending.
        seq_lens (int32, [num_seqs], device): Cached tokens of each sequence, new ones included.
        block_table (int32, [num_seqs, max_blocks], device): Blocks of each sequence; entries past
            its last block are not read.
        scale: Factor of the scores, usually `head_dim ** -0.5`.
        is_causal: Whether a token sees no later one.
        sliding_window: Number of tokens seen, as above; None for all.
        out (float, [num_tokens, num_heads, head_dim], device): Receives the result.

    Returns:
        Tensor (float, [num_tokens, num_heads, head_dim], device): `out`, or a new tensor.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    call = AttentionCall(
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        is_causal,
        sliding_window,
    )
    call.check()
    out = call.output(out)
    if query.numel() > 0:
        launch(call, out, launch_settings(call.dim_tile, query.dtype))
    return out
