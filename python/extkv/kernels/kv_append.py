"""Write the keys and values of new tokens into a paged cache, whatever its memory layout."""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

_MAX_TILE_ELEMENTS = 4096


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _kv_append_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    slot_stride,
    key_stride_token,
    key_stride_head,
    key_stride_dim,
    value_stride_token,
    value_stride_head,
    value_stride_dim,
    key_cache_stride_block,
    key_cache_stride_position,
    key_cache_stride_head,
    key_cache_stride_dim,
    value_cache_stride_block,
    value_cache_stride_position,
    value_cache_stride_head,
    value_cache_stride_dim,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, :] = new[token, head, :]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        position = slot % BLOCK_SIZE
        # A cache may have its heads or dims outermost: every product is int64.
        head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)[:, None]
        dim = tl.arange(0, DIM_TILE).to(tl.int64)[None, :]
        mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)

        source = token * key_stride_token + head * key_stride_head + dim * key_stride_dim
        target = (
            block * key_cache_stride_block
            + position * key_cache_stride_position
            + head * key_cache_stride_head
            + dim * key_cache_stride_dim
        )
        tl.store(key_cache_ptr + target, tl.load(key_ptr + source, mask=mask), mask=mask)

        source = token * value_stride_token + head * value_stride_head + dim * value_stride_dim
        target = (
            block * value_cache_stride_block
            + position * value_cache_stride_position
            + head * value_cache_stride_head
            + dim * value_cache_stride_dim
        )
        tl.store(value_cache_ptr + target, tl.load(value_ptr + source, mask=mask), mask=mask)


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    dim_tile = padded_to_power_of_two(head_dim)
    head_tile = min(padded_to_power_of_two(num_kv_heads), max(1, _MAX_TILE_ELEMENTS // dim_tile))
    grid = (num_tokens, -(-num_kv_heads // head_tile))
    with on_device_of(key):
        _kv_append_kernel[grid](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            slot_mapping.stride(0),
            *key.stride(),
            *value.stride(),
            *key_cache.stride(),
            *value_cache.stride(),
            BLOCK_SIZE=key_cache.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_TILE=head_tile,
            DIM_TILE=dim_tile,
            num_warps=4,
        )


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store one key and one value per token.

    Slot `s` is position `s % block_size` of block `s // block_size`. The element of head `h`, dim
    `d` lies at `block * stride(0) + position * stride(1) + h * stride(2) + d * stride(3)` in int64,
    with the strides of each cache: K/V-split, interleaved and head-outermost caches, and views of a
    reservation larger than 2^31 elements, all work.

    Args:
        key (float, [num_tokens, num_kv_heads, head_dim], device): New keys, any strides.
        value (float, [num_tokens, num_kv_heads, head_dim], device): New values, any strides.
        key_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): Written in
            place, any strides. May be a full view of growable memory; only the slots named are
            touched.
        value_cache (float, [num_blocks, block_size, num_kv_heads, head_dim], device): The same.
        slot_mapping (int64, [num_tokens], device): Target slot of each token, or any negative
            value to skip it. Slots are distinct, and committed; neither is checked.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = launch_device("key", key)
    check_tensor("key", key, FLOAT_DTYPES, [None, None, None], device)
    num_tokens, num_kv_heads, head_dim = key.shape
    check_tensor("value", value, [key.dtype], key.shape, device)
    cache_shape = [None, None, num_kv_heads, head_dim]
    check_tensor("key_cache", key_cache, [key.dtype], cache_shape, device)
    check_tensor("value_cache", value_cache, [key.dtype], key_cache.shape, device)
    check_tensor("slot_mapping", slot_mapping, [torch.int64], [num_tokens], device)
    if key.numel() > 0:
        _launch(key, value, key_cache, value_cache, slot_mapping)
