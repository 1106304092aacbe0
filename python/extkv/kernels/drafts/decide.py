"""First part of verification: probabilities of the drafts, and which of them are accepted.

One program does the window of one request. It leaves per row what later parts need, and per request
the row that its next token comes from and how. Block verification is decided later, in the draw.
"""
# ruff: noqa: ANN001, ANN201, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.logit_cutoff import LEAST_TEMPERATURE, softmax_weight
from extkv.kernels.philox import Stream, uniform_of, words_of

ACCEPT_STREAM = tl.constexpr(int(Stream.ACCEPT))
# How the next token of a request is found.
DONE = tl.constexpr(0)
FROM_TARGET = tl.constexpr(1)
FROM_RESIDUAL = tl.constexpr(2)
BLOCK = tl.constexpr(3)


@triton.jit
def accept_uniform(seeds_ptr, positions_ptr, seeds_stride, positions_stride, row, lane, mask):
    """Return the uniform that decides on the draft after each row; its lane is the draft's slot."""
    seed = tl.load(seeds_ptr + row * seeds_stride, mask=mask, other=0)
    position = tl.load(positions_ptr + row * positions_stride, mask=mask, other=0)
    lane = position * 0 + lane
    word, _, _, _ = words_of(seed, position, lane * 0 + ACCEPT_STREAM, lane)
    return uniform_of(word)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "temperature_stride",
        "seeds_stride",
        "positions_stride",
        "token_ids_stride",
        "logits_stride_row",
        "logits_stride_slot",
        "log_sum_exp_stride_row",
        "log_sum_exp_stride_slot",
    ],
    do_not_specialize_on_alignment=[
        "num_accepted_ptr",
        "next_tokens_ptr",
        "flags_ptr",
        "token_ids_ptr",
        "window_starts_ptr",
        "temperature_ptr",
        "cutoff_ptr",
        "seeds_ptr",
        "positions_ptr",
        "draft_logits_ptr",
        "log_sum_exp_ptr",
        "draft_rows_ptr",
        "rates_ptr",
    ],
)
def decide_kernel(  # noqa: PLR0915 one program does a window
    num_accepted_ptr,
    next_tokens_ptr,
    flags_ptr,
    kinds_ptr,
    work_rows_ptr,
    work_drafts_ptr,
    work_slots_ptr,
    log_scale_ptr,
    log_p_ptr,
    largest_ptr,
    log_total_ptr,
    statistics_ptr,
    target_ptr,
    token_ids_ptr,
    window_starts_ptr,
    temperature_ptr,
    cutoff_ptr,
    seeds_ptr,
    positions_ptr,
    draft_logits_ptr,
    log_sum_exp_ptr,
    draft_rows_ptr,
    rates_ptr,
    target_stride,
    token_ids_stride,
    temperature_stride,
    seeds_stride,
    positions_stride,
    logits_stride_row,
    logits_stride_slot,
    log_sum_exp_stride_row,
    log_sum_exp_stride_slot,
    num_rows,
    vocab_size,
    IS_BLOCK: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Accept draft i while u_i < p_i(x_i) / q_i(x_i), or while it is the argmax of a greedy row."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(window_starts_ptr + request).to(tl.int64)
    end = tl.load(window_starts_ptr + request + 1).to(tl.int64)
    length = tl.minimum(end - start, MAX_DRAFTS + 1)
    index = tl.arange(0, WINDOW)
    is_row = index < length
    row = start + index
    tiles = tl.arange(0, TILES_PADDED)
    size = num_rows.to(tl.int64) * NUM_TILES
    statistic_ptrs = statistics_ptr + row[:, None] * NUM_TILES + tiles[None, :]
    mask = is_row[:, None] & (tiles < NUM_TILES)[None, :]
    maxima = tl.load(statistic_ptrs, mask=mask, other=-float("inf"))
    argmaxes = tl.load(statistic_ptrs + size, mask=mask, other=0.0)
    has_nan = tl.load(statistic_ptrs + 3 * size, mask=mask, other=0.0)
    largest = tl.max(maxima, axis=1)
    first_tile = tl.min(
        tl.where(mask & (maxima == largest[:, None]), tiles[None, :], TILES_PADDED), axis=1
    )
    is_first = tiles[None, :] == first_tile[:, None]
    argmax = tl.max(tl.where(is_first, argmaxes, 0.0), axis=1).to(tl.int64)
    flag = tl.where(tl.max(has_nan, axis=1) > 0.0, 1, 0)
    flag += tl.where(largest == -float("inf"), 2, 0)

    heat = tl.load(temperature_ptr + row * temperature_stride, mask=is_row, other=0.0)
    # A NaN is no temperature to draw at; the comparison makes it greedy.
    is_greedy = (heat >= LEAST_TEMPERATURE) == 0
    inverse = 1.0 / tl.where(is_greedy, 1.0, heat)
    sums = tl.load(statistic_ptrs + 2 * size, mask=mask, other=0.0)
    masses = sums * softmax_weight(maxima, largest[:, None], inverse[:, None])
    log_total = tl.log(tl.sum(masses, axis=1))
    tl.store(largest_ptr + row, largest, mask=is_row)
    tl.store(log_total_ptr + row, log_total, mask=is_row)

    has_draft = index + 1 < length
    draft = tl.load(token_ids_ptr + (row + 1) * token_ids_stride, mask=has_draft, other=-1)
    is_draft = has_draft & (draft >= 0) & (draft < vocab_size) & (flag == 0)
    draft_row = request if draft_rows_ptr is None else tl.load(draft_rows_ptr + request)
    log_q = tl.zeros((WINDOW,), tl.float32)
    if draft_logits_ptr is not None:
        logits_ptrs = draft_logits_ptr + draft_row * logits_stride_row + index * logits_stride_slot
        logit = tl.load(logits_ptrs, mask=is_draft, other=0.0)
        log_sum_exp_ptrs = log_sum_exp_ptr + draft_row * log_sum_exp_stride_row
        log_sum_exp_ptrs += index * log_sum_exp_stride_slot
        log_sum_exp = tl.load(log_sum_exp_ptrs, mask=is_draft, other=0.0)
        log_q = logit * inverse - log_sum_exp
        # A draft whose law is not known counts as none: the token comes from the target alone.
        is_draft &= is_greedy | (tl.abs(log_q) < float("inf"))
    num_drafts = tl.min(tl.where(is_draft, WINDOW, index), axis=0)

    values = tl.load(target_ptr + row * target_stride + draft, mask=is_draft, other=-float("inf"))
    values = values.to(tl.float32)
    if cutoff_ptr is not None:
        cutoff = tl.load(cutoff_ptr + row, mask=is_row, other=-float("inf"))
        values = tl.where(values >= cutoff, values, -float("inf"))
    log_p = tl.where(values == largest, 0.0, (values - largest) * inverse) - log_total
    log_p = tl.where(values == -float("inf"), -float("inf"), log_p)
    log_ratio = log_p - log_q
    uniform = accept_uniform(
        seeds_ptr, positions_ptr, seeds_stride, positions_stride, row, index, is_row
    )
    if rates_ptr is None:
        accepts = tl.where(is_greedy, draft == argmax, uniform < tl.exp(log_ratio))
    else:
        accepts = uniform < tl.load(rates_ptr + index, mask=has_draft, other=0.0)
    accepts &= index < num_drafts
    num_accepted = tl.min(tl.where(accepts, WINDOW, index), axis=0)
    is_next = index == num_accepted
    is_next_greedy = tl.max(tl.where(is_next & is_row & (is_greedy == 0), 1, 0), axis=0) == 0
    next_token = tl.max(tl.where(is_next, argmax, 0), axis=0)

    is_block = IS_BLOCK & (is_next_greedy == 0)
    is_rejected = (num_accepted < num_drafts) & (rates_ptr is None)
    kind = tl.where(is_rejected, FROM_RESIDUAL, FROM_TARGET)
    kind = tl.where(is_next_greedy, DONE, tl.where(is_block, BLOCK, kind))
    tl.store(kinds_ptr + request, kind)
    tl.store(next_tokens_ptr + request, next_token)
    tl.store(num_accepted_ptr + request, tl.where(is_block, num_drafts, num_accepted))
    next_flag = tl.max(tl.where(is_next & is_row, flag, 0), axis=0)
    tl.store(flags_ptr + request, next_flag)

    tl.store(log_p_ptr + row, log_p, mask=is_row)
    if IS_BLOCK:
        # log P_i for i = 0 .. num_drafts: P_0 = 1, P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i)).
        log_scales = tl.zeros((WINDOW,), tl.float32)
        log_scale = tl.full((), 0.0, tl.float32)
        for i in tl.static_range(WINDOW - 1):
            ratio = tl.max(tl.where(index == i, log_ratio, -float("inf")), axis=0)
            log_scale = tl.minimum(log_scale + ratio, 0.0)
            log_scales = tl.where(index == i + 1, log_scale, log_scales)
        tl.store(log_scale_ptr + row, log_scales, mask=is_row)
        is_work = is_block & (index < num_drafts)
        tl.store(work_rows_ptr + row, tl.where(is_work, row, -1).to(tl.int32), mask=is_row)
        tl.store(work_drafts_ptr + row, (draft_row + index * 0).to(tl.int32), mask=is_row)
        tl.store(work_slots_ptr + row, index, mask=is_row)
        # Rows past the maximum, and after the last window, are no work.
        end = tl.where(request == tl.num_programs(0) - 1, num_rows, end)
        for first in range(start + length, end, WINDOW):
            rest = first + index
            tl.store(work_rows_ptr + rest, index * 0 - 1, mask=rest < end)
    else:
        is_work = kind == FROM_RESIDUAL
        work_row = tl.where(is_work, start + num_accepted, -1).to(tl.int32)
        tl.store(work_rows_ptr + request, work_row)
        tl.store(work_drafts_ptr + request, draft_row.to(tl.int32))
        tl.store(work_slots_ptr + request, num_accepted)
        tl.store(log_scale_ptr + request, 0.0)
