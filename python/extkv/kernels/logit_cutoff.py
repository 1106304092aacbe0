"""Top-k, top-p and min-p of logits as one number per row: logits at or above it may be chosen.

No sort: a cut-off is found by bisection of the float32 numbers in order, sixteen ways per pass over
the rows. A pass is a launch in which several programs share a row; each leaves, for its part, how
many logits reach each pivot and their mass, and the next pass decides from the sums. Nine passes
always suffice; a row that is decided, or uses no filter, costs nothing more. A row's parts depend
on the vocabulary only, so its result does not depend on the batch.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917 -- Triton: untyped pointers, capital constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import TYPE_CHECKING

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
    padded_to_power_of_two,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_VOCAB_SIZE = 2**24
# Below it a row is greedy (vLLM's limit).
LEAST_TEMPERATURE = tl.constexpr(1e-5)
_NUM_PIVOTS = tl.constexpr(16)
# 16 ** 9 intervals part all float32 numbers.
_NUM_PASSES = 9
# Of each row's state: goal, logits above the interval, logits in it, whether it is searched.
_NUM_NUMBERS = tl.constexpr(4)
# Logits of a row that one program looks at.
_PART_SIZE = 4096
_VOCAB_TILE = 512


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
def _decided(
    low, high, goal, num_above, partials_ptr, num_parts, is_mass, pass_index,
    PART_TILE: tl.constexpr,
):  # fmt: skip
    """Narrow the interval [low, high) by what the parts of the pass before `pass_index` found.

    The logits at or above `low` reach the goal and those at or above `high` do not. After the first
    pass a goal of mass, until then a fraction, becomes that fraction of the mass at `low`.
    """
    step = tl.arange(0, _NUM_PIVOTS)
    part = tl.arange(0, PART_TILE)[:, None]
    found_ptrs = partials_ptr + part * (2 * _NUM_PIVOTS) + step[None, :]
    is_part = part < num_parts
    count = tl.sum(tl.load(found_ptrs, mask=is_part, other=0.0), axis=0)
    mass = tl.sum(tl.load(found_ptrs + _NUM_PIVOTS, mask=is_part, other=0.0), axis=0)
    reached = tl.where(is_mass != 0, mass, count)
    everything = tl.sum(tl.where(step == 0, reached, 0.0), axis=0)
    goal = tl.where((is_mass != 0) & (pass_index == 1), goal * everything, goal)
    pivots = low + (high - low) * step // _NUM_PIVOTS
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
    return low, high, goal, num_above, num_at_low - num_above


@triton.jit
def _is_open(low, high, num_between):
    """Whether a row needs another pass."""
    return (high - low > 1) & (num_between > 1)


@triton.jit
def _state(
    keys_ptr, numbers_ptr, partials_ptr, row, num_parts, is_mass, pass_index,
    PART_TILE: tl.constexpr,
):  # fmt: skip
    """Load a row's interval and numbers, narrowed by the pass before `pass_index`."""
    low, high = tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1)
    numbers_ptr += row * _NUM_NUMBERS
    goal, num_above = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    num_between = tl.load(numbers_ptr + 2)
    if (pass_index > 0) & _is_open(low, high, num_between):
        low, high, goal, num_above, num_between = _decided(
            low, high, goal, num_above, partials_ptr + row * num_parts * (2 * _NUM_PIVOTS),
            num_parts, is_mass, pass_index, PART_TILE,
        )  # fmt: skip
    return low, high, goal, num_above, num_between


@triton.jit
def _maxima_kernel(
    maxima_ptr,
    logits_ptr,
    logits_stride,
    vocab_size,
    num_parts,
    PART_SIZE: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
):
    """Largest logit of each part of each row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    start = part * PART_SIZE
    maxima = tl.full((VOCAB_TILE,), -float("inf"), tl.float32)
    for first in range(start, tl.minimum(start + PART_SIZE, vocab_size), VOCAB_TILE):
        maxima = tl.maximum(maxima, load_logits(row_ptr, first, vocab_size, VOCAB_TILE))
    tl.store(maxima_ptr + row * num_parts + part, tl.max(maxima, axis=0))


@triton.jit(
    do_not_specialize=[
        "is_mass",
        "is_first",
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
def _begin_kernel(
    out_ptr,
    largest_ptr,
    keys_ptr,
    numbers_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    is_mass,
    is_first,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    vocab_size,
    num_parts,
    PART_TILE: tl.constexpr,
):
    """Begin a search for a number of logits, or a share of mass, above the cut-off so far.

    The first search takes max + T log(min_p) as the cut-off so far.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    if is_first:
        part = tl.arange(0, PART_TILE)
        maxima = tl.load(
            maxima_ptr + row * num_parts + part, mask=part < num_parts, other=-float("inf")
        )
        largest = tl.max(maxima, axis=0)
        tl.store(largest_ptr + row, largest)
        min_p = load_or(min_p_ptr, row * min_p_stride, 0.0)
        lowest = largest + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
        cutoff = tl.where(min_p > 0.0, lowest, -float("inf"))
    else:
        largest = tl.load(largest_ptr + row)
        cutoff = tl.load(out_ptr + row)
    top_k = tl.full((), 0.0, tl.float32)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row * top_k_stride).to(tl.float32)
    top_p = load_or(top_p_ptr, row * top_p_stride, tl.full((), 1.0, tl.float32))
    goal = tl.where(is_mass != 0, top_p, top_k)
    is_wanted = tl.where(is_mass != 0, top_p < 1.0, (top_k >= 1.0) & (top_k < vocab_size))
    is_possible = (temperature >= LEAST_TEMPERATURE) & (largest > -float("inf"))
    # A greedy row, or one without a number, has no cut-off.
    cutoff = tl.where(is_possible, cutoff, -float("inf"))
    tl.store(out_ptr + row, cutoff)
    tl.store(keys_ptr + row * 2, _order_key(cutoff).to(tl.int64))
    tl.store(keys_ptr + row * 2 + 1, _order_key(largest).to(tl.int64) + 1)
    numbers_ptr += row * _NUM_NUMBERS
    is_active = is_wanted & is_possible
    tl.store(numbers_ptr, goal)
    tl.store(numbers_ptr + 1, 0.0)
    tl.store(numbers_ptr + 2, tl.where(is_active, 2.0, 0.0))
    tl.store(numbers_ptr + 3, tl.where(is_active, 1.0, 0.0))


@triton.jit(do_not_specialize=["is_mass", "pass_index", "parity", "num_rows", "temperature_stride"])
def _pass_kernel(
    keys_ptr,
    numbers_ptr,
    partials_ptr,
    logits_ptr,
    largest_ptr,
    temperature_ptr,
    is_mass,
    pass_index,
    num_rows,
    temperature_stride,
    logits_stride,
    vocab_size,
    num_parts,
    PART_SIZE: tl.constexpr,
    PART_TILE: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
):
    """Narrow the interval, and count what one part of the row has at or above 16 pivots in it.

    What even passes write odd passes read, and the other way round.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    old, new = (pass_index % 2).to(tl.int64), ((pass_index + 1) % 2).to(tl.int64)
    partials_size = num_rows.to(tl.int64) * num_parts * (2 * _NUM_PIVOTS)
    low, high, goal, num_above, num_between = _state(
        keys_ptr + old * num_rows * 2, numbers_ptr + old * num_rows * _NUM_NUMBERS,
        partials_ptr + old * partials_size, row, num_parts, is_mass, pass_index, PART_TILE,
    )  # fmt: skip
    if part == 0:
        new_row = new * num_rows + row
        tl.store(keys_ptr + new_row * 2, low)
        tl.store(keys_ptr + new_row * 2 + 1, high)
        is_active = tl.load(numbers_ptr + (old * num_rows + row) * _NUM_NUMBERS + 3)
        numbers_ptr += new_row * _NUM_NUMBERS
        tl.store(numbers_ptr, goal)
        tl.store(numbers_ptr + 1, num_above)
        tl.store(numbers_ptr + 2, num_between)
        tl.store(numbers_ptr + 3, is_active)
    if _is_open(low, high, num_between):
        step = tl.arange(0, _NUM_PIVOTS)
        pivots = (low + (high - low) * step // _NUM_PIVOTS).to(tl.int32)
        counts = tl.zeros((VOCAB_TILE, _NUM_PIVOTS), tl.float32)
        masses = tl.zeros((VOCAB_TILE, _NUM_PIVOTS), tl.float32)
        largest = tl.load(largest_ptr + row)
        inverse_temperature = 1.0 / tl.load(temperature_ptr + row * temperature_stride)
        row_ptr = logits_ptr + row * logits_stride
        start = part * PART_SIZE
        for first in range(start, tl.minimum(start + PART_SIZE, vocab_size), VOCAB_TILE):
            values = load_logits(row_ptr, first, vocab_size, VOCAB_TILE)
            is_above = _order_key(values)[:, None] >= pivots[None, :]
            # Lanes past the row are -inf, as logits may be: neither has mass, and a count is for
            # pivots above -inf unless the row has so few logits that all are kept.
            is_above = is_above & ((first + tl.arange(0, VOCAB_TILE)) < vocab_size)[:, None]
            counts += tl.where(is_above, 1.0, 0.0)
            weights = softmax_weight(values, largest, inverse_temperature)
            masses += tl.where(is_above, weights[:, None], 0.0)
        found_ptrs = partials_ptr + new * partials_size
        found_ptrs += (row * num_parts + part) * (2 * _NUM_PIVOTS) + step
        tl.store(found_ptrs, tl.sum(counts, axis=0))
        tl.store(found_ptrs + _NUM_PIVOTS, tl.sum(masses, axis=0))


@triton.jit(do_not_specialize=["is_mass", "pass_index", "num_rows"])
def _end_kernel(
    out_ptr,
    keys_ptr,
    numbers_ptr,
    partials_ptr,
    is_mass,
    pass_index,
    num_rows,
    num_parts,
    PART_TILE: tl.constexpr,
):
    """Write the cut-off of each row that was searched."""
    row = tl.program_id(0).to(tl.int64)
    old = (pass_index % 2).to(tl.int64)
    partials_ptr += old * num_rows * num_parts * (2 * _NUM_PIVOTS)
    numbers_ptr += old * num_rows * _NUM_NUMBERS
    low, _, _, _, _ = _state(
        keys_ptr + old * num_rows * 2, numbers_ptr, partials_ptr, row, num_parts, is_mass,
        pass_index, PART_TILE,
    )  # fmt: skip
    if tl.load(numbers_ptr + row * _NUM_NUMBERS + 3) > 0:
        tl.store(out_ptr + row, _value_of(low.to(tl.int32)))


class _Search:
    """Buffers of the searches over some rows, and their launches."""

    def __init__(self, logits: torch.Tensor, temperature: torch.Tensor, out: torch.Tensor) -> None:
        num_rows, vocab_size = logits.shape
        device = logits.device
        self._logits, self._temperature, self._out = logits, temperature, out
        self._num_parts = -(-vocab_size // _PART_SIZE)
        self._part_tile = padded_to_power_of_two(self._num_parts)
        self._maxima = _floats((num_rows, self._num_parts), device)
        self._largest = _floats((num_rows,), device)
        self._keys = torch.empty(2, num_rows, 2, dtype=torch.int64, device=device)
        self._numbers = _floats((2, num_rows, _NUM_NUMBERS.value), device)
        size = 2 * _NUM_PIVOTS.value
        self._partials = _floats((2, num_rows, self._num_parts, size), device)
        _maxima_kernel[num_rows, self._num_parts](
            self._maxima,
            logits,
            logits.stride(0),
            vocab_size,
            self._num_parts,
            PART_SIZE=_PART_SIZE,
            VOCAB_TILE=_VOCAB_TILE,
            num_warps=4,
        )

    def begin(
        self, limits: Sequence[torch.Tensor | None], *, is_mass: bool, is_first: bool
    ) -> None:
        """Set the goal of each row, and its cut-off so far; `limits` are top_k, top_p and min_p."""
        num_rows, vocab_size = self._logits.shape
        _begin_kernel[(num_rows,)](
            self._out,
            self._largest,
            self._keys,
            self._numbers,
            self._maxima,
            self._temperature,
            *limits,
            int(is_mass),
            int(is_first),
            self._temperature.stride(0),
            *(_stride(limit) for limit in limits),
            vocab_size,
            self._num_parts,
            PART_TILE=self._part_tile,
            num_warps=1,
        )

    def run(self, *, is_mass: bool) -> None:
        """Search, and write the cut-offs found."""
        num_rows, vocab_size = self._logits.shape
        buffers = (self._keys, self._numbers, self._partials)
        for pass_index in range(_NUM_PASSES):
            _pass_kernel[num_rows, self._num_parts](
                *buffers,
                self._logits,
                self._largest,
                self._temperature,
                int(is_mass),
                pass_index,
                num_rows,
                self._temperature.stride(0),
                self._logits.stride(0),
                vocab_size,
                self._num_parts,
                PART_SIZE=_PART_SIZE,
                PART_TILE=self._part_tile,
                VOCAB_TILE=_VOCAB_TILE,
                num_warps=4,
            )
        _end_kernel[(num_rows,)](
            self._out,
            *buffers,
            int(is_mass),
            _NUM_PASSES,
            num_rows,
            self._num_parts,
            PART_TILE=self._part_tile,
            num_warps=4,
        )


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


def _floats(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


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
    num_rows = logits.shape[0]
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    check_rows(parameters, num_rows, device)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=device)
    else:
        check_tensor("out", out, [torch.float32], [num_rows], device, is_last_dim_dense=True)
    if num_rows > 0:
        with on_device_of(logits):
            search = _Search(logits, temperature, out)
            limits = (top_k, top_p, min_p)
            search.begin(limits, is_mass=False, is_first=True)
            if top_k is not None:
                search.run(is_mass=False)
            if top_p is not None:
                search.begin(limits, is_mass=True, is_first=False)
                search.run(is_mass=True)
    return out
