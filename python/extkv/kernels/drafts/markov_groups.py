"""How a token is drawn from draft logits that never reach memory.

The vocabulary is cut into groups of 64 tokens. A tile leaves one number per row and group: log2 of
its mass for a row that is drawn, its largest logit for one that is not. A row then draws a group,
computes only that group again, and draws inside it, each with a word of its own. A group with a NaN
or +inf is left out and flags its row.
"""
# ruff: noqa: ANN001, ANN201, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.kernels.drafts.logits import draft_logits_of_row
from extkv.kernels.logit_cutoff import LEAST_TEMPERATURE
from extkv.kernels.philox import Stream, uniform_of, words_of
from extkv.kernels.sampling import pick

# It decides which token a uniform picks, so it is the same for all batch sizes.
GROUP_SIZE = 64
_GROUP = tl.constexpr(GROUP_SIZE)
# Columns of a matrix product that lie in one warp: reduced first, without a barrier.
_STRIP = tl.constexpr(16)
_DRAFT_STREAM = tl.constexpr(int(Stream.DRAFT))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scale_of(heat):
    """Return log2(e) / T, so that exp2(scale * logit) is a weight; of T = 1 for rows not drawn."""
    return _LOG2_E / tl.where(heat >= LEAST_TEMPERATURE, heat, 1.0)


@triton.jit
def store_groups(
    groups_ptr,
    logits,
    row,
    is_row,
    tile,
    num_groups,
    heat,
    IS_DRAWN: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """Store a number per group of logits [VOCAB_TILE, ROW_TILE]; NaN for one that is left out."""
    num_tile_groups: tl.constexpr = VOCAB_TILE // _GROUP
    strips = tl.reshape(logits, (num_tile_groups, _GROUP // _STRIP, _STRIP, ROW_TILE))
    strip_largest = tl.max(strips, axis=2)
    largest = tl.max(strip_largest, axis=1)
    if IS_DRAWN:
        scale = scale_of(heat)
        # Of -inf alone: no weight, and no NaN. Of +inf: NaN, as of NaN.
        reference = tl.where(strip_largest == -float("inf"), 0.0, strip_largest)
        weights = tl.exp2((strips - reference[:, :, None, :]) * scale[None, None, None, :])
        group_reference = tl.where(largest == -float("inf"), 0.0, largest)
        shifts = (strip_largest - group_reference[:, None, :]) * scale[None, None, :]
        mass = tl.sum(tl.sum(weights, axis=2) * tl.exp2(shifts), axis=1)
        is_bad = mass != mass  # noqa: PLR0124 NaN
        logarithm = tl.where(is_bad, mass, tl.log2(mass) + group_reference * scale[None, :])
        kept = tl.where(is_bad, mass, largest)
        number = tl.where((heat >= LEAST_TEMPERATURE)[None, :], logarithm, kept)
    else:
        is_bad = (strips != strips) | (strips == float("inf"))  # noqa: PLR0124 NaN
        has_bad = tl.max(tl.max(tl.where(is_bad, 1, 0), axis=2), axis=1) > 0
        number = tl.where(has_bad, float("nan"), largest)
    group = tile * num_tile_groups + tl.arange(0, num_tile_groups)
    ptrs = groups_ptr + row[None, :] * num_groups + group[:, None]
    tl.store(ptrs, number, mask=is_row[None, :] & (group < num_groups)[:, None])


@triton.jit
def draw_of_row(
    groups_ptr,
    row,
    base_ptr,
    base_stride_column,
    projection_ptr,
    projection_stride,
    codes_ptr,
    codes_offset,
    heat,
    seed,
    position,
    slot,
    vocab_size,
    num_groups,
    RANK: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
):
    """Return token, its logit, log of the sum of exp(logits / T), and flag of a row."""
    groups = tl.arange(0, GROUPS_PADDED)
    is_group = groups < num_groups
    number_ptrs = groups_ptr + row * num_groups + groups
    numbers = tl.load(number_ptrs, mask=is_group, other=-float("inf"))
    is_bad = numbers != numbers  # noqa: PLR0124 NaN
    numbers = tl.where(is_bad, -float("inf"), numbers)
    largest = tl.max(numbers, axis=0)
    has_bad = tl.max(tl.where(is_bad, 1, 0), axis=0) > 0
    flag = tl.where(has_bad, 1, 0) + tl.where(largest == -float("inf"), 2, 0)
    group = tl.min(tl.where(numbers == largest, groups, GROUPS_PADDED - 1), axis=0)
    scale = scale_of(heat)
    is_sampled = (heat >= LEAST_TEMPERATURE) & (largest > -float("inf"))
    log_sum_exp = tl.where(heat >= LEAST_TEMPERATURE, largest, 0.0)
    token_uniform = tl.full((), 0.0, tl.float32)
    if is_sampled:
        masses = tl.exp2(numbers - largest)
        log_sum_exp = (largest + tl.log2(tl.sum(masses, axis=0))) * _LN_2
        lane = position * 0 + slot
        word, second_word, _, _ = words_of(seed, position, lane * 0 + _DRAFT_STREAM, lane)
        group = pick(masses, uniform_of(word), GROUPS_PADDED)
        token_uniform = uniform_of(second_word)
    column = group * _GROUP + tl.arange(0, _GROUP)
    values = draft_logits_of_row(
        column,
        column < vocab_size,
        base_ptr,
        base_stride_column,
        projection_ptr,
        projection_stride,
        codes_ptr,
        codes_offset,
        RANK,
        _GROUP,
        DEPTH_TILE,
    )
    best = tl.max(values, axis=0)
    place = tl.min(tl.where(values == best, tl.arange(0, _GROUP), _GROUP - 1), axis=0)
    if is_sampled:
        place = pick(tl.exp2((values - best) * scale), token_uniform, _GROUP)
    logit = tl.max(tl.where(tl.arange(0, _GROUP) == place, values, -float("inf")), axis=0)
    token = tl.where(largest > -float("inf"), group * _GROUP + place, 0)
    # The law of a row with groups left out is not that of its logits: verification takes the draft
    # for none.
    return token, tl.where(has_bad, float("nan"), logit), log_sum_exp, flag
