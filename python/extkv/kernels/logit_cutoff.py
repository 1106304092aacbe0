"""Top-k, top-p and min-p of logits as one number per row: logits at or above it may be chosen.

No sort: a cut-off is found by bisection of the float32 numbers in order, eight ways per pass over
the row, and the passes end as soon as one candidate is left. One program does a row, so this costs
up to 11 passes for each of top-k and top-p; rows that use neither leave at once.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
)

MAX_VOCAB_SIZE = 2**24
# Below it a row is greedy (vLLM's limit).
LEAST_TEMPERATURE = tl.constexpr(1e-5)
_NUM_PIVOTS = tl.constexpr(8)
_VOCAB_TILE = 2048


@triton.jit
def load_logits(row_ptr, start, vocab_size, VOCAB_TILE: tl.constexpr):
    """Return logits [start, start + VOCAB_TILE) in float32; NaN and lanes past the row are -inf."""
    token = start + tl.arange(0, VOCAB_TILE)
    values = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf"))
    values = values.to(tl.float32)
    return tl.where(values != values, -float("inf"), values)  # noqa: PLR0124 NaN


@triton.jit
def softmax_weight(values, largest, inverse_temperature):
    """Return exp((value - largest) / T): 0 for -inf, and 1 at the maximum even if that is +inf."""
    weights = tl.exp((values - largest) * inverse_temperature)
    weights = tl.where(values == largest, 1.0, weights)
    return tl.where(values == -float("inf"), 0.0, weights)


@triton.jit
def load_or(ptr, offset, default):
    """Load a number; a parameter that was left out has the default."""
    return default if ptr is None else tl.load(ptr + offset)


@triton.jit
def _order_key(values):
    """Map float32 to int32 such that the order stays; -0.0 and 0.0 get the same key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    """Invert `_order_key`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row_ptr,
    vocab_size,
    lowest,
    largest,
    target,
    inverse_temperature,
    IS_MASS: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
):
    """Return a t >= lowest such that the logits >= t, but no fewer of them, reach the target.

    Without IS_MASS the target is a number of logits. With it, the target is a fraction of the
    softmax mass of all logits >= lowest. `low` reaches the target and `high` does not.
    """
    step = tl.arange(0, _NUM_PIVOTS)
    low = _order_key(lowest).to(tl.int64)
    high = _order_key(largest).to(tl.int64) + 1
    goal = target
    is_first_pass = True
    num_between = 2.0
    num_above = 0.0
    while (high - low > 1) & (num_between > 1):
        pivots = low + (high - low) * step // _NUM_PIVOTS
        counts = tl.zeros((VOCAB_TILE, _NUM_PIVOTS), tl.float32)
        masses = tl.zeros((VOCAB_TILE, _NUM_PIVOTS), tl.float32)
        for start in range(0, vocab_size, VOCAB_TILE):
            values = load_logits(row_ptr, start, vocab_size, VOCAB_TILE)
            is_above = _order_key(values)[:, None] >= pivots.to(tl.int32)[None, :]
            counts += tl.where(is_above, 1.0, 0.0)
            if IS_MASS:
                weights = softmax_weight(values, largest, inverse_temperature)
                masses += tl.where(is_above, weights[:, None], 0.0)
        count = tl.sum(counts, axis=0)
        reached = tl.sum(masses, axis=0) if IS_MASS else count
        if IS_MASS:
            everything = tl.sum(tl.where(step == 0, reached, 0.0), axis=0)
            goal = tl.where(is_first_pass, target * everything, goal)
            is_first_pass = False
        # Adding in one order keeps `reached` monotone, rounding included.
        last = tl.sum(tl.where(reached >= goal, 1, 0), axis=0) - 1
        last = tl.maximum(last, 0)
        num_at_low = tl.sum(tl.where(step == last, count, 0.0), axis=0)
        is_top = last == _NUM_PIVOTS - 1
        next_count = tl.sum(tl.where(step == last + 1, count, 0.0), axis=0)
        next_pivot = tl.sum(tl.where(step == last + 1, pivots, 0), axis=0)
        num_above = tl.where(is_top, num_above, next_count)
        high = tl.where(is_top, high, next_pivot)
        low = tl.sum(tl.where(step == last, pivots, 0), axis=0)
        num_between = num_at_low - num_above
    return _value_of(low.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        "temperature_stride",
        "top_k_stride",
        "top_p_stride",
        "min_p_stride",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
    ],
)
def _logit_cutoff_kernel(
    out_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    logits_stride,
    vocab_size,
    VOCAB_TILE: tl.constexpr,
):
    """Largest of: max + T log(min_p), and what parts the top_k and the top_p logits from others."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top_k = load_or(top_k_ptr, row * top_k_stride, vocab_size)
    top_k = tl.where(top_k < 1, vocab_size, top_k)
    top_p = load_or(top_p_ptr, row * top_p_stride, 1.0)
    min_p = load_or(min_p_ptr, row * min_p_stride, 0.0)

    cutoff = tl.full((), -float("inf"), tl.float32)
    is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
    if is_filtered & (temperature >= LEAST_TEMPERATURE):
        maxima = tl.full((VOCAB_TILE,), -float("inf"), tl.float32)
        for start in range(0, vocab_size, VOCAB_TILE):
            maxima = tl.maximum(maxima, load_logits(row_ptr, start, vocab_size, VOCAB_TILE))
        largest = tl.max(maxima, axis=0)
        if largest > -float("inf"):
            inverse_temperature = 1.0 / temperature
            lowest = largest + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
            cutoff = tl.where(min_p > 0.0, lowest, cutoff)
            if top_k < vocab_size:
                cutoff = _search(
                    row_ptr,
                    vocab_size,
                    cutoff,
                    largest,
                    top_k.to(tl.float32),
                    inverse_temperature,
                    False,
                    VOCAB_TILE,
                )
            if top_p < 1.0:
                cutoff = _search(
                    row_ptr,
                    vocab_size,
                    cutoff,
                    largest,
                    top_p,
                    inverse_temperature,
                    True,
                    VOCAB_TILE,
                )
    tl.store(out_ptr + row, cutoff)


def check_rows(
    rows: dict[str, torch.Tensor | None],
    num_rows: int,
    device: torch.device,
) -> None:
    """Check parameters that have one number per row; None stands for a parameter left out.

    Raises:
        InvalidArgumentError: If one has another dtype, length or device.
    """
    for name, tensor in rows.items():
        if tensor is not None:
            dtypes = INT_DTYPES if name == "top_k" else [torch.float32]
            check_tensor(name, tensor, dtypes, [num_rows], device)


def check_logits(logits: torch.Tensor) -> torch.device:
    """Check logits [num_rows, vocab_size] and return their device.

    Raises:
        InvalidArgumentError: If dtype, shape or device do not fit.
    """
    device = launch_device("logits", logits)
    check_tensor("logits", logits, FLOAT_DTYPES, [None, None], device, is_last_dim_dense=True)
    if not 0 < logits.shape[1] <= MAX_VOCAB_SIZE:
        raise InvalidArgumentError(
            f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {logits.shape[1]}"
        )
    return device


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def logit_cutoff(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a number per row that parts what top-k, top-p and min-p leave from other logits.

    A token stays if its logit is at least the cut-off, so tokens tied with the last one stay too.
    The cut-off is at most the smallest logit that stays and above the largest one that does not. In
    vLLM's order: min-p keeps tokens with probability at least `min_p` times the largest; top-k
    keeps the `top_k` largest of them; top-p keeps as few of the largest as have a share of at least
    `top_p` in what is left. The largest logit always stays. NaN counts as -inf.

    Args:
        logits (float, [num_rows, vocab_size], device): Rows of any stride, not yet divided by the
            temperature.
        temperature (float32, [num_rows], device): Rows below 1e-5 are greedy and have no cut-off.
        top_k (int32 or int64, [num_rows], device): Tokens to keep; below 1 keeps all. None for all
            rows.
        top_p (float32, [num_rows], device): Share to keep; 1 or more keeps all.
        min_p (float32, [num_rows], device): Share of the largest probability, at most 1; 0 keeps
            all.
        out (float32, [num_rows], device): Receives the result; dense.

    Returns:
        Tensor (float32, [num_rows], device): Cut-offs; -inf for a row without any.

    Raises:
        InvalidArgumentError: If a dtype, shape or device does not fit.
    """
    device = check_logits(logits)
    num_rows, vocab_size = logits.shape
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    check_rows(parameters, num_rows, device)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=device)
    else:
        check_tensor("out", out, [torch.float32], [num_rows], device, is_last_dim_dense=True)
    if num_rows > 0:
        with on_device_of(logits):
            _logit_cutoff_kernel[(num_rows,)](
                out,
                logits,
                *parameters.values(),
                *(_stride(tensor) for tensor in parameters.values()),
                logits.stride(0),
                vocab_size,
                VOCAB_TILE=_VOCAB_TILE,
                num_warps=16,
            )
    return out
