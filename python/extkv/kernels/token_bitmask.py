"""Grammar masks on logits: one bit per token says whether it may be chosen.

Words are int32, 32 tokens each, the first token in the lowest bit: the layout in which grammar
libraries fill them. Only logits of forbidden tokens are written, and none is read.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.launch.arguments import check_tensor, launch_device, on_device_of

_WORD_TILE = 64


@triton.jit(
    do_not_specialize=["bitmask_stride"],
    do_not_specialize_on_alignment=["bitmask_ptr", "row_ids_ptr"],
)
def _apply_token_bitmask_kernel(
    logits_ptr,
    bitmask_ptr,
    row_ids_ptr,
    logits_stride,
    bitmask_stride,
    vocab_size,
    WORD_TILE: tl.constexpr,
):
    """logits[row_ids[m], t] = -inf where bit t % 32 of bitmask[m, t // 32] is 0."""
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids_ptr + mask_row).to(tl.int64)
    word = tl.program_id(1) * WORD_TILE + tl.arange(0, WORD_TILE)
    word_ptrs = bitmask_ptr + mask_row * bitmask_stride + word
    bits = tl.load(word_ptrs, mask=word * 32 < vocab_size, other=0)
    lane = tl.arange(0, 32)
    token = word[:, None] * 32 + lane[None, :]  # [WORD_TILE, 32]
    is_forbidden = ((bits[:, None] >> lane[None, :]) & 1) == 0
    logit_ptrs = logits_ptr + row * logits_stride + token
    tl.store(logit_ptrs, -float("inf"), mask=is_forbidden & (token < vocab_size))


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, row_ids: torch.Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in the rows named.

    Args:
        logits (float32, [num_rows, vocab_size], device): Changed in place; rows of any stride.
        bitmask (int32, [num_masks, ceil(vocab_size / 32)], device): Token `t` is allowed if bit
            `t % 32` of word `t // 32` is 1. Bits past the vocabulary are not looked at. Rows of any
            stride.
        row_ids (int64, [num_masks], device): The row of each mask, in range and distinct; other
            rows stay as they are.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = launch_device("logits", logits)
    check_tensor("logits", logits, [torch.float32], [None, None], device, is_last_dim_dense=True)
    vocab_size = logits.shape[1]
    shape = [None, -(-vocab_size // 32)]
    check_tensor("bitmask", bitmask, [torch.int32], shape, device, is_last_dim_dense=True)
    num_masks, num_words = bitmask.shape
    check_tensor("row_ids", row_ids, [torch.int64], [num_masks], device, is_last_dim_dense=True)
    if logits.numel() > 0 and num_masks > 0:
        with on_device_of(logits):
            _apply_token_bitmask_kernel[num_masks, -(-num_words // _WORD_TILE)](
                logits,
                bitmask,
                row_ids,
                logits.stride(0),
                bitmask.stride(0),
                vocab_size,
                WORD_TILE=_WORD_TILE,
                num_warps=4,
            )
