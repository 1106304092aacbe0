"""Changes to logits before sampling: allowed and bad tokens, logit bias, penalties.

All work in place on float32 logits [num_rows, vocab_size]. The tokens of all rows are packed: row
`r` has entries `[row_offsets[r], row_offsets[r + 1])` of the arrays beside it. vLLM applies them in
the order in which they stand here, and before the temperature.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.launch.arguments import check_tensor, launch_device, on_device_of

_ENTRY_TILE = 512
_VOCAB_TILE = 1024


@triton.jit(
    do_not_specialize=["num_steps"],
    do_not_specialize_on_alignment=["token_ids_ptr", "row_offsets_ptr"],
)
def _mask_allowed_tokens_kernel(
    logits_ptr,
    token_ids_ptr,
    row_offsets_ptr,
    num_steps,
    logits_stride,
    vocab_size,
    VOCAB_TILE: tl.constexpr,
):
    """logits[row, t] = -inf unless a binary search finds t among the ascending entries."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(row_offsets_ptr + row)
    end = tl.load(row_offsets_ptr + row + 1)
    if begin < end:
        token = tl.program_id(1) * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
        mask = token < vocab_size
        # The last entry that is not above the token lies in [low, high), if there is one.
        low = tl.zeros((VOCAB_TILE,), tl.int32) + begin
        high = tl.zeros((VOCAB_TILE,), tl.int32) + end
        for _ in range(num_steps):
            middle = (low + high) // 2
            is_narrowed = high - low > 1
            is_above = tl.load(token_ids_ptr + middle, mask=is_narrowed, other=0) > token
            high = tl.where(is_narrowed & is_above, middle, high)
            low = tl.where(is_narrowed & (is_above == 0), middle, low)
        is_allowed = tl.load(token_ids_ptr + low) == token
        logit_ptrs = logits_ptr + row * logits_stride + token
        tl.store(logit_ptrs, -float("inf"), mask=mask & (is_allowed == 0))


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr", "row_offsets_ptr"])
def _mask_bad_tokens_kernel(
    logits_ptr, token_ids_ptr, row_offsets_ptr, logits_stride, ENTRY_TILE: tl.constexpr
):
    """logits[row, token] = -inf for each entry."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1)
    for start in range(tl.load(row_offsets_ptr + row), end, ENTRY_TILE):
        entry = start + tl.arange(0, ENTRY_TILE)
        token = tl.load(token_ids_ptr + entry, mask=entry < end, other=0)
        logit_ptrs = logits_ptr + row * logits_stride + token
        tl.store(logit_ptrs, -float("inf"), mask=entry < end)


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr", "biases_ptr", "row_offsets_ptr"])
def _add_logit_bias_kernel(
    logits_ptr, token_ids_ptr, biases_ptr, row_offsets_ptr, logits_stride, ENTRY_TILE: tl.constexpr
):
    """logits[row, token] += bias for each entry."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1)
    for start in range(tl.load(row_offsets_ptr + row), end, ENTRY_TILE):
        entry = start + tl.arange(0, ENTRY_TILE)
        mask = entry < end
        token = tl.load(token_ids_ptr + entry, mask=mask, other=0)
        logit_ptrs = logits_ptr + row * logits_stride + token
        bias = tl.load(biases_ptr + entry, mask=mask, other=0.0)
        tl.store(logit_ptrs, tl.load(logit_ptrs, mask=mask, other=0.0) + bias, mask=mask)


@triton.jit(
    do_not_specialize=["repetition_stride", "frequency_stride", "presence_stride"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "output_counts_ptr",
        "row_offsets_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ],
)
def _apply_penalties_kernel(
    logits_ptr,
    token_ids_ptr,
    output_counts_ptr,
    row_offsets_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_stride,
    frequency_stride,
    presence_stride,
    logits_stride,
    ENTRY_TILE: tl.constexpr,
):
    """Per entry: x = (x > 0 ? x / rep : x * rep) - freq * count - pres * (count > 0)."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row * repetition_stride)
    frequency = tl.load(frequency_ptr + row * frequency_stride)
    presence = tl.load(presence_ptr + row * presence_stride)
    end = tl.load(row_offsets_ptr + row + 1)
    for start in range(tl.load(row_offsets_ptr + row), end, ENTRY_TILE):
        entry = start + tl.arange(0, ENTRY_TILE)
        mask = entry < end
        token = tl.load(token_ids_ptr + entry, mask=mask, other=0)
        count = tl.load(output_counts_ptr + entry, mask=mask, other=0).to(tl.float32)
        logit_ptrs = logits_ptr + row * logits_stride + token
        logit = tl.load(logit_ptrs, mask=mask, other=0.0)
        logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
        logit -= frequency * count
        logit -= tl.where(count > 0.0, presence, 0.0)
        tl.store(logit_ptrs, logit, mask=mask)


def _check(
    logits: torch.Tensor, token_ids: torch.Tensor, row_offsets: torch.Tensor
) -> torch.device:
    device = launch_device("logits", logits)
    check_tensor("logits", logits, [torch.float32], [None, None], device, is_last_dim_dense=True)
    check_tensor("token_ids", token_ids, [torch.int32], [None], device, is_last_dim_dense=True)
    check_tensor(
        "row_offsets",
        row_offsets,
        [torch.int32],
        [logits.shape[0] + 1],
        device,
        is_last_dim_dense=True,
    )
    return device


def mask_allowed_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Set the logits of all tokens but the allowed ones to -inf.

    Args:
        logits (float32, [num_rows, vocab_size], device): Changed in place; rows of any stride.
        token_ids (int32, [num_entries], device): Allowed tokens, ascending within a row, in range.
        row_offsets (int32, [num_rows + 1], device): First entry of each row. A row without entries
            allows every token.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    _check(logits, token_ids, row_offsets)
    num_rows, vocab_size = logits.shape
    if logits.numel() > 0 and token_ids.numel() > 0:
        with on_device_of(logits):
            _mask_allowed_tokens_kernel[num_rows, -(-vocab_size // _VOCAB_TILE)](
                logits,
                token_ids,
                row_offsets,
                token_ids.shape[0].bit_length(),
                logits.stride(0),
                vocab_size,
                VOCAB_TILE=_VOCAB_TILE,
                num_warps=4,
            )


def mask_bad_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Set the logits of bad tokens to -inf.

    Args:
        logits (float32, [num_rows, vocab_size], device): Changed in place; rows of any stride.
        token_ids (int32, [num_entries], device): Bad tokens, in range.
        row_offsets (int32, [num_rows + 1], device): First entry of each row.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    _check(logits, token_ids, row_offsets)
    if logits.numel() > 0 and token_ids.numel() > 0:
        with on_device_of(logits):
            _mask_bad_tokens_kernel[(logits.shape[0],)](
                logits,
                token_ids,
                row_offsets,
                logits.stride(0),
                ENTRY_TILE=_ENTRY_TILE,
                num_warps=4,
            )


def add_logit_bias(
    logits: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor, row_offsets: torch.Tensor
) -> None:
    """Add a number to the logits of some tokens.

    Args:
        logits (float32, [num_rows, vocab_size], device): Changed in place; rows of any stride.
        token_ids (int32, [num_entries], device): Tokens, distinct within a row, in range.
        biases (float32, [num_entries], device): What is added.
        row_offsets (int32, [num_rows + 1], device): First entry of each row.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = _check(logits, token_ids, row_offsets)
    check_tensor("biases", biases, [torch.float32], token_ids.shape, device, is_last_dim_dense=True)
    if logits.numel() > 0 and token_ids.numel() > 0:
        with on_device_of(logits):
            _add_logit_bias_kernel[(logits.shape[0],)](
                logits,
                token_ids,
                biases,
                row_offsets,
                logits.stride(0),
                ENTRY_TILE=_ENTRY_TILE,
                num_warps=4,
            )


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Make tokens that stand in the prompt or the output less likely, as vLLM does.

    Repetition divides positive and multiplies other logits of every token listed; frequency is
    subtracted once per occurrence in the output, presence once for a token that is in the output.

    Args:
        logits (float32, [num_rows, vocab_size], device): Changed in place; rows of any stride.
        token_ids (int32, [num_entries], device): Tokens of prompt and output, distinct within a
            row, in range.
        output_counts (int32, [num_entries], device): Occurrences in the output; 0 for a token that
            is in the prompt only.
        row_offsets (int32, [num_rows + 1], device): First entry of each row.
        repetition (float32, [num_rows], device): 1 for none. Any stride.
        frequency (float32, [num_rows], device): 0 for none. Any stride.
        presence (float32, [num_rows], device): 0 for none. Any stride.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = _check(logits, token_ids, row_offsets)
    check_tensor(
        "output_counts",
        output_counts,
        [torch.int32],
        token_ids.shape,
        device,
        is_last_dim_dense=True,
    )
    penalties = {"repetition": repetition, "frequency": frequency, "presence": presence}
    for name, tensor in penalties.items():
        check_tensor(name, tensor, [torch.float32], [logits.shape[0]], device)
    if logits.numel() > 0 and token_ids.numel() > 0:
        with on_device_of(logits):
            _apply_penalties_kernel[(logits.shape[0],)](
                logits,
                token_ids,
                output_counts,
                row_offsets,
                *penalties.values(),
                *(tensor.stride(0) for tensor in penalties.values()),
                logits.stride(0),
                ENTRY_TILE=_ENTRY_TILE,
                num_warps=4,
            )
