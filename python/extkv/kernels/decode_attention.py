"""Attention of few new tokens per sequence over a paged cache, split along the keys.

Made for memory bandwidth: every key and value is read once for all query heads that share it, and
`num_splits` programs share a sequence. The grid depends on host numbers only, so a captured graph
stays right while lengths change. Addresses are formed as in `paged_attention`.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import check_tensor, on_device_of, padded_to_power_of_two
from extkv.kernels.launch.attention import AttentionCall, LaunchSettings, heads_per_row_tile
from extkv.kernels.paged_attention import attend_tile, sequence_of, store_rows, visible_range

MAX_QUERY_LEN = 16
MAX_NUM_SPLITS = 128
_SPLIT_TILE = 16
_PROGRAMS_PER_PROCESSOR = 2
_MIN_TOKENS_PER_SPLIT = 128


@triton.jit
def _split_tiles(
    context_len, seq_len, window, num_splits, IS_CAUSAL: tl.constexpr, KEY_TILE: tl.constexpr
):
    """Return the first key tile of a sequence, their number, and the number per split."""
    begin, _ = visible_range(context_len, context_len, seq_len, window, IS_CAUSAL)
    first_tile = begin // KEY_TILE
    num_tiles = tl.cdiv(seq_len, KEY_TILE) - first_tile
    return first_tile, num_tiles, tl.cdiv(num_tiles, num_splits)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _decode_attention_kernel(
    out_ptr,
    workspace_ptr,
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
    num_splits,
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
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    NUM_TOKEN_TILES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Softmax-weighted values of one part of the keys, or the whole output if there is one part.

    A part leaves in the workspace, per token and head: sum of exp2(score - maximum) * value, the
    maximum, and the sum of exp2(score - maximum).
    """
    first_head = tl.program_id(0) // NUM_TOKEN_TILES * HEAD_TILE
    first_token = tl.program_id(0) % NUM_TOKEN_TILES * TOKEN_TILE
    kv_head = (first_head // HEADS_PER_KV_HEAD).to(tl.int64)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    row = tl.arange(0, ROW_TILE)
    token = first_token + row // HEAD_TILE
    head = first_head + row % HEAD_TILE
    dim = tl.arange(0, DIM_TILE)
    dim_mask = dim < HEAD_DIM
    query_start = tl.load(query_start_loc_ptr + seq)

    if seq == num_seqs:
        # Rows after all sequences; with several splits the reduction writes them.
        if (num_splits == 1) & (first_token == 0):
            for start in range(query_start, num_tokens, TOKEN_TILE):
                mask = (start + token < num_tokens) & (row < TOKEN_TILE * HEAD_TILE)
                store_rows(
                    out_ptr,
                    tl.zeros((ROW_TILE, DIM_TILE), tl.float32),
                    tl.zeros((ROW_TILE,), tl.float32),
                    (start + token).to(tl.int64),
                    head,
                    dim,
                    out_stride_token,
                    out_stride_head,
                    mask[:, None] & dim_mask[None, :],
                )
        return

    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len
    first_tile, num_tiles, tiles_per_split = _split_tiles(
        context_len, seq_len, window, num_splits, IS_CAUSAL, KEY_TILE
    )
    begin_tile = split * tiles_per_split
    end_tile = tl.minimum(begin_tile + tiles_per_split, num_tiles)
    # The reduction skips splits without keys.
    if (first_token >= query_len) | ((num_splits > 1) & (begin_tile >= end_tile)):
        return

    row_mask = (token < query_len) & (row < TOKEN_TILE * HEAD_TILE)
    mask = row_mask[:, None] & dim_mask[None, :]
    row_id = (query_start + token).to(tl.int64)
    query_offset = row_id * query_stride_token + head * query_stride_head
    query = tl.load(query_ptr + query_offset[:, None] + dim[None, :], mask=mask, other=0.0)
    row_begin, row_end = visible_range(context_len + token, context_len, seq_len, window, IS_CAUSAL)

    table_row_ptr = block_table_ptr + seq.to(tl.int64) * table_stride
    stored_dim = (dim if HEAD_DIM == DIM_TILE else dim % HEAD_DIM).to(tl.int64)
    key_dim_offset = kv_head * key_stride_head + stored_dim * key_stride_dim
    value_dim_offset = kv_head * value_stride_head + stored_dim * value_stride_dim
    accumulator = tl.zeros((ROW_TILE, DIM_TILE), tl.float32)
    row_max = tl.full((ROW_TILE,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROW_TILE,), tl.float32)
    for tile in range(first_tile + begin_tile, first_tile + end_tile):
        accumulator, row_max, row_sum = attend_tile(
            query,
            accumulator,
            row_max,
            row_sum,
            tile * KEY_TILE,
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

    if num_splits == 1:
        store_rows(
            out_ptr,
            accumulator,
            row_sum,
            row_id,
            head,
            dim,
            out_stride_token,
            out_stride_head,
            mask,
        )
    else:
        part = (row_id * NUM_HEADS + head) * num_splits + split
        part_ptrs = workspace_ptr + part[:, None] * HEAD_DIM + dim[None, :]
        tl.store(part_ptrs, accumulator, mask=mask)
        num_parts = num_tokens.to(tl.int64) * NUM_HEADS * num_splits
        statistics_ptr = workspace_ptr + num_parts * HEAD_DIM + part * 2
        tl.store(statistics_ptr, row_max, mask=row_mask)
        tl.store(statistics_ptr + 1, row_sum, mask=row_mask)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_splits", "window"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def _reduce_splits_kernel(
    out_ptr,
    workspace_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    window,
    num_seqs,
    num_tokens,
    num_splits,
    out_stride_token,
    out_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Output = sum_i w_i * accumulator_i / sum_i w_i * sum_i, w_i = exp2(maximum_i - maximum)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    seq = sequence_of(query_start_loc_ptr, token, num_seqs, 1, 0)
    is_sequence = seq < num_seqs
    query_start = tl.load(query_start_loc_ptr + seq)
    query_end = tl.load(query_start_loc_ptr + seq + 1, mask=is_sequence, other=0)
    seq_len = tl.load(seq_lens_ptr + seq, mask=is_sequence, other=0)
    _, num_tiles, tiles_per_split = _split_tiles(
        seq_len - (query_end - query_start), seq_len, window, num_splits, IS_CAUSAL, KEY_TILE
    )
    num_used = tl.cdiv(num_tiles, tl.maximum(tiles_per_split, 1))
    num_used = tl.where(is_sequence, num_used, 0)

    first_part = (token.to(tl.int64) * NUM_HEADS + head) * num_splits
    statistics_ptr = workspace_ptr + num_tokens.to(tl.int64) * NUM_HEADS * num_splits * HEAD_DIM
    split = tl.arange(0, SPLITS_PADDED)
    maxima = tl.load(
        statistics_ptr + (first_part + split) * 2, mask=split < num_used, other=-float("inf")
    )
    maximum = tl.max(maxima, axis=0)
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)

    dim = tl.arange(0, DIM_TILE)
    accumulator = tl.zeros((DIM_TILE,), tl.float32)
    total = tl.zeros((SPLIT_TILE,), tl.float32)
    for start in range(0, num_used, SPLIT_TILE):
        part = start + tl.arange(0, SPLIT_TILE)
        is_used = part < num_used
        part_ptrs = statistics_ptr + (first_part + part) * 2
        weight = tl.exp2(tl.load(part_ptrs, mask=is_used, other=-float("inf")) - maximum)
        total += weight * tl.load(part_ptrs + 1, mask=is_used, other=0.0)
        values = tl.load(
            workspace_ptr + (first_part + part)[:, None] * HEAD_DIM + dim[None, :],
            mask=is_used[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        accumulator += tl.sum(weight[:, None] * values, axis=0)
    normalizer = tl.sum(total, axis=0)
    result = accumulator / tl.where(normalizer > 0, normalizer, 1.0)
    out_ptrs = out_ptr + token.to(tl.int64) * out_stride_token + head * out_stride_head + dim
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


# By padded head size: the row tile is the largest one; small batches of rows use 16.
_SETTINGS = {
    64: LaunchSettings(row_tile=64, key_tile=128, num_warps=4, num_stages=3),
    128: LaunchSettings(row_tile=64, key_tile=64, num_warps=4, num_stages=3),
    256: LaunchSettings(row_tile=64, key_tile=32, num_warps=4, num_stages=3),
}
_FLOAT32_SETTINGS = {
    64: LaunchSettings(row_tile=32, key_tile=64, num_warps=4, num_stages=2),
    128: LaunchSettings(row_tile=32, key_tile=32, num_warps=4, num_stages=2),
    256: LaunchSettings(row_tile=16, key_tile=16, num_warps=4, num_stages=2),
}


def launch_settings(dim_tile: int, dtype: torch.dtype) -> LaunchSettings:
    """Choose the tiles for a padded head size."""
    table = _FLOAT32_SETTINGS if dtype == torch.float32 else _SETTINGS
    return table[max(dim_tile, 64)]


def choose_num_splits(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, num_processors: int
) -> int:
    """Return how many programs should share a sequence.

    Args:
        num_seqs: Sequences of the batch, padded ones included.
        num_kv_heads: KV heads; each has its own programs.
        max_seq_len: Longest sequence that the launch will see.
        num_processors: Multiprocessors of the device (132 on an H200).

    Returns:
        A number in [1, 128].
    """
    num_programs = max(num_seqs * num_kv_heads, 1)
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    useful = max(max_seq_len // _MIN_TOKENS_PER_SPLIT, 1)
    return min(wanted, useful, MAX_NUM_SPLITS)


def decode_workspace_size(num_tokens: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return how many float32 elements `decode_attention` needs; none for one split."""
    return 0 if num_splits == 1 else num_tokens * num_heads * num_splits * (head_dim + 2)


class SplitOptions(NamedTuple):
    """How the work of a decode call is divided."""

    max_query_len: int
    num_splits: int
    workspace: torch.Tensor | None

    def check(self, call: AttentionCall) -> None:
        """Check the numbers and the size of the workspace.

        Raises:
            InvalidArgumentError: If one does not fit.
        """
        for name, value, limit in (
            ("max_query_len", self.max_query_len, MAX_QUERY_LEN),
            ("num_splits", self.num_splits, MAX_NUM_SPLITS),
        ):
            if not 1 <= value <= limit:
                raise InvalidArgumentError(f"{name} must be in [1, {limit}], got {value}")
        num_elements = 0
        if self.workspace is not None:
            check_tensor(
                "workspace",
                self.workspace,
                [torch.float32],
                [None],
                call.query.device,
                is_last_dim_dense=True,
            )
            num_elements = self.workspace.numel()
        num_tokens, num_heads, head_dim = call.query.shape
        needed = decode_workspace_size(num_tokens, num_heads, head_dim, self.num_splits)
        if num_elements < needed:
            raise InvalidArgumentError(
                f"workspace must have at least {needed} elements for {self.num_splits} splits, "
                f"got {num_elements}"
            )


def launch(
    call: AttentionCall, options: SplitOptions, out: torch.Tensor, settings: LaunchSettings
) -> None:
    """Run the kernels on a checked call."""
    num_tokens, num_heads, head_dim = call.query.shape
    head_tile = heads_per_row_tile(call.heads_per_kv_head, settings.row_tile)
    row_tile = padded_to_power_of_two(options.max_query_len * head_tile, least=16)
    row_tile = min(row_tile, settings.row_tile)
    token_tile = row_tile // head_tile
    num_token_tiles = -(-options.max_query_len // token_tile)
    num_columns = num_heads // head_tile * num_token_tiles
    workspace = options.workspace
    if workspace is None:
        # Never touched with one split: stands in so that one compiled kernel serves both cases.
        workspace = call.query_start_loc.view(torch.float32)
    with on_device_of(call.query):
        _decode_attention_kernel[num_columns, options.num_splits, call.num_seqs + 1](
            out,
            workspace,
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
            options.num_splits,
            call.block_table.stride(0),
            *out.stride()[:2],
            *call.query.stride()[:2],
            *call.key_cache.stride(),
            *call.value_cache.stride(),
            NUM_HEADS=num_heads,
            HEADS_PER_KV_HEAD=call.heads_per_kv_head,
            HEAD_TILE=head_tile,
            BLOCK_SIZE=call.key_cache.shape[1],
            HEAD_DIM=head_dim,
            DIM_TILE=call.dim_tile,
            ROW_TILE=row_tile,
            TOKEN_TILE=token_tile,
            NUM_TOKEN_TILES=num_token_tiles,
            KEY_TILE=settings.key_tile,
            IS_CAUSAL=call.is_causal,
            HAS_WINDOW=call.sliding_window is not None,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        )
        if options.num_splits == 1:
            return
        _reduce_splits_kernel[num_tokens, num_heads](
            out,
            workspace,
            call.query_start_loc,
            call.seq_lens,
            call.sliding_window or 0,
            call.num_seqs,
            num_tokens,
            options.num_splits,
            *out.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM_TILE=call.dim_tile,
            SPLIT_TILE=_SPLIT_TILE,
            SPLITS_PADDED=MAX_NUM_SPLITS,
            KEY_TILE=settings.key_tile,
            IS_CAUSAL=call.is_causal,
            num_warps=4,
        )


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    max_query_len: int = 1,
    is_causal: bool = True,
    sliding_window: int | None = None,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as `paged_attention` does, for at most 16 new tokens per sequence.

    Result and arguments are those of `paged_attention`; only the work is divided otherwise. With
    `out` and `workspace` passed nothing is allocated. The grid depends on the shapes,
    `max_query_len` and `num_splits`: a captured graph may be replayed with other lengths, block
    tables and queries, and with padded sequences of length 0, which read nothing and give zeros.

    Args:
        query (float, [num_tokens, num_heads, head_dim], device): As in `paged_attention`.
        key_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): The same.
        value_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): The same.
        query_start_loc (int32, [num_seqs + 1], device): The same.
        seq_lens (int32, [num_seqs], device): The same.
        block_table (int32, [num_seqs, max_blocks], device): The same.
        scale: The same.
        max_query_len: Most new tokens that any sequence has, in [1, 16]. Rows past it are not
            written.
        is_causal: As in `paged_attention`.
        sliding_window: The same.
        num_splits: Programs that share a sequence, in [1, 128]; see `choose_num_splits`.
        workspace (float32, [n], device): At least `decode_workspace_size` elements, for
            `num_splits` above 1. Overwritten.
        out (float, [num_tokens, num_heads, head_dim], device): Receives the result.

    Returns:
        Tensor (float, [num_tokens, num_heads, head_dim], device): `out`, or a new tensor.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride, number or device does not fit.
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
    options = SplitOptions(max_query_len, num_splits, workspace)
    options.check(call)
    out = call.output(out)
    if query.numel() > 0:
        launch(call, options, out, launch_settings(call.dim_tile, query.dtype))
    return out
