"""Loss of draft tokens against the target's law, and its gradient, in one pass over the logits.

With `q` the drafter's law, `p` the target's and `y` the label, the loss of a row is
`ce_weight * -log q(y) + tv_weight * sum |q - p|`. Its gradient by the logits,
`ce_weight * (q - [y]) + tv_weight * q * (sign(q - p) - sum q * sign(q - p))`, times the weight of
the row, takes the place of the logits: nothing else of the vocabulary's size is ever in memory.
"""
# ruff: noqa: ANN001, ANN202, N803, PLR0917 -- Triton: untyped pointers, constants in capitals
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.drafting import DraftLossRows
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)

_VOCAB_TILE = 4096


@triton.jit
def _add_tile(values, largest, total):
    """Add exp(values) to a running sum that is kept relative to the largest value so far."""
    tile_largest = tl.maximum(largest, tl.max(values, axis=0))
    total = total * tl.exp(largest - tile_largest) + tl.sum(tl.exp(values - tile_largest), axis=0)
    return tile_largest, total


@triton.jit(
    do_not_specialize=["ce_weight", "tv_weight"],
    do_not_specialize_on_alignment=[
        "target_rows_ptr",
        "label_ids_ptr",
        "row_weights_ptr",
        "cross_entropy_ptr",
        "total_variation_ptr",
        "target_logprob_ptr",
        "argmax_ptr",
    ],
)
def _draft_loss_kernel(  # noqa: PLR0915, one row, three passes
    logits_ptr,
    target_logits_ptr,
    target_rows_ptr,
    label_ids_ptr,
    row_weights_ptr,
    cross_entropy_ptr,
    total_variation_ptr,
    target_logprob_ptr,
    argmax_ptr,
    logits_stride,
    target_stride,
    vocab_size,
    ce_weight,
    tv_weight,
    HAS_GRADIENT: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
):
    """One row: log-sum-exp of both laws, then distance and mean sign, then the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    target_ptr = target_logits_ptr + tl.load(target_rows_ptr + row) * target_stride
    label = tl.load(label_ids_ptr + row)
    lowest = -3.0e38
    largest, total = lowest, 0.0
    target_largest, target_total = lowest, 0.0
    best, best_token = -float("inf"), 0
    for start in range(0, vocab_size, VOCAB_TILE):
        token = start + tl.arange(0, VOCAB_TILE)
        mask = token < vocab_size
        values = tl.load(logits_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
        largest, total = _add_tile(values, largest, total)
        tile_best = tl.max(values, axis=0)
        tile_token = start + tl.argmax(values, axis=0)
        best_token = tl.where(tile_best > best, tile_token, best_token)
        best = tl.maximum(best, tile_best)
        values = tl.load(target_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
        target_largest, target_total = _add_tile(values, target_largest, target_total)
    log_total = largest + tl.log(total)
    target_log_total = target_largest + tl.log(target_total)
    distance, mean_sign = 0.0, 0.0
    for start in range(0, vocab_size, VOCAB_TILE):
        token = start + tl.arange(0, VOCAB_TILE)
        mask = token < vocab_size
        values = tl.load(logits_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
        q = tl.exp(values - log_total)
        values = tl.load(target_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
        difference = q - tl.exp(values - target_log_total)
        distance += tl.sum(tl.abs(difference), axis=0)
        sign = tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, 0.0))
        mean_sign += tl.sum(q * sign, axis=0)
    at_label = tl.load(logits_ptr + label).to(tl.float32)
    tl.store(cross_entropy_ptr + row, log_total - at_label)
    tl.store(total_variation_ptr + row, distance)
    target_at_label = tl.load(target_ptr + label).to(tl.float32)
    tl.store(target_logprob_ptr + row, target_at_label - target_log_total)
    tl.store(argmax_ptr + row, best_token + tl.zeros((), tl.int64))
    if HAS_GRADIENT:
        # The label's logit is read before the loop overwrites it.
        tl.debug_barrier()
        weight = tl.load(row_weights_ptr + row).to(tl.float32)
        for start in range(0, vocab_size, VOCAB_TILE):
            token = start + tl.arange(0, VOCAB_TILE)
            mask = token < vocab_size
            values = tl.load(logits_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
            q = tl.exp(values - log_total)
            values = tl.load(target_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
            difference = q - tl.exp(values - target_log_total)
            sign = tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, 0.0))
            is_label = tl.where(token == label, 1.0, 0.0)
            gradient = ce_weight * (q - is_label) + tv_weight * q * (sign - mean_sign)
            gradient = (weight * gradient).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + token, gradient, mask=mask)


def draft_loss(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_rows: torch.Tensor,
    label_ids: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    *,
    ce_weight: float = 0.1,
    tv_weight: float = 0.9,
) -> DraftLossRows:
    """Compare rows of draft logits with the target's law.

    Args:
        logits (float, [num_rows, vocab_size], device): The drafter's logits; last dim dense. With
            `row_weights`, mutated: they become the gradient of the weighted loss.
        target_logits (float, [num_target_rows, vocab_size], device): The target's; last dim dense.
        target_rows (int64, [num_rows], device): Row of `target_logits` that each row is to match.
        label_ids (int64, [num_rows], device): Token that came, by column.
        row_weights (float32, [num_rows], device): Weight of each row in the gradient; None for
            no gradient.
        ce_weight: Weight of the cross-entropy in the gradient.
        tv_weight: Weight of the distance in the gradient.

    Returns:
        What each row gave, without any weight.

    Raises:
        InvalidArgumentError: If a dtype, shape, stride or device does not fit.
    """
    device = launch_device("logits", logits)
    check_tensor("logits", logits, FLOAT_DTYPES, [None, None], device, is_last_dim_dense=True)
    num_rows, vocab_size = logits.shape
    shape = [None, vocab_size]
    check_tensor(
        "target_logits", target_logits, FLOAT_DTYPES, shape, device, is_last_dim_dense=True
    )
    check_tensor("target_rows", target_rows, [torch.int64], [num_rows], device)
    check_tensor("label_ids", label_ids, [torch.int64], [num_rows], device)
    if row_weights is not None:
        check_tensor("row_weights", row_weights, [torch.float32], [num_rows], device)
    cross_entropy, total_variation, target_logprob = torch.empty(
        (3, num_rows), dtype=torch.float32, device=device
    )
    argmax = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows > 0:
        with on_device_of(logits):
            _draft_loss_kernel[(num_rows,)](
                logits,
                target_logits,
                target_rows.contiguous(),
                label_ids.contiguous(),
                argmax if row_weights is None else row_weights.contiguous(),
                cross_entropy,
                total_variation,
                target_logprob,
                argmax,
                logits.stride(0),
                target_logits.stride(0),
                vocab_size,
                ce_weight,
                tv_weight,
                HAS_GRADIENT=row_weights is not None,
                VOCAB_TILE=min(_VOCAB_TILE, padded_to_power_of_two(vocab_size)),
                num_warps=8,
            )
    return DraftLossRows(cross_entropy, total_variation, target_logprob, argmax)
