"""A cost table measured when the engine starts, from passes that touch no cache.

It takes a second or two on CUDA, some seconds on the host. What it leaves out (attention over long
contexts, the host's work, verification) the controller learns while the engine runs, as drift; a
table of whole steps tells costs apart better.
"""

from __future__ import annotations

import itertools
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from extkv.dspark.cost import CostTable, StepCost
from extkv.errors import CostTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extkv.dspark.speculator import Speculator
    from extkv.engine.runner import ModelRunner

__all__ = ["PassTimes", "measure_passes", "measure_step_cost"]

_NUM_REPEATS = 5
# On the host, of all repeats of a size together: short passes run more often, long ones less.
_LEAST_US, _ENOUGH_US = 20_000.0, 200_000.0
# Of the shortest pass; the rest of it counts for tokens, so that drift can tell the two apart.
_FIXED_SHARE = 0.9


@dataclass(frozen=True)
class PassTimes:
    """Microseconds of passes that touch no cache: the fastest of some.

    Attributes:
        target_us: Of the target, by tokens.
        draft_us: Of the draft pass, by requests.
        tiers: Numbers of tokens that steps run at; none if each runs as it is.
    """

    target_us: dict[int, float]
    draft_us: dict[int, float]
    tiers: tuple[int, ...]

    def table(self, source: dict[str, str] | None = None) -> CostTable:
        """Return the times as a cost table.

        Noise only adds time, so a pass takes at most what a larger one was seen to take.
        """
        target_us = _rising(self.target_us)
        bias_us = _FIXED_SHARE * target_us[0][1]
        return CostTable(
            token_us=tuple((size, us - bias_us) for size, us in target_us),
            bias_us=bias_us,
            draft_us=tuple(_rising(self.draft_us)),
            tiers=self.tiers,
            source=source or {},
        )


def measure_passes(
    runner: ModelRunner, speculator: Speculator, num_repeats: int = _NUM_REPEATS
) -> PassTimes:
    """Time the target over numbers of tokens, and the draft pass over numbers of requests.

    Args:
        runner: Started, before its first step.
        speculator: Its speculator.
        num_repeats: Timed runs of each size, after one that is not. On the host fewer where passes
            are long, down to two, the first one included.
    """
    device = runner.model.device
    query_len = 1 + speculator.num_drafts
    max_num_seqs = runner.config.max_num_seqs
    tiers = runner.graph_token_sizes
    sizes = tiers or range(1, max_num_seqs * query_len + 1)
    target_us = {1: _least_us(lambda: runner.run_blank(1, 1), device, num_repeats)}
    for size in _spread(sizes):
        target_us[size] = _least_us(
            lambda size=size: runner.run_blank(size, query_len),  # type: ignore[misc]
            device,
            num_repeats,
        )
    requests = runner.graph_sizes or range(1, max_num_seqs + 1)
    draft_us = {
        size: _least_us(
            lambda size=size: speculator.run_blank(size),  # type: ignore[misc]
            device,
            num_repeats,
        )
        for size in _spread(requests)
    }
    return PassTimes(target_us, draft_us, (1, *tiers) if tiers else ())


def measure_step_cost(runner: ModelRunner, speculator: Speculator) -> StepCost | None:
    """Measure a table; None with a warning if it is flat.

    Without a table every draft is verified.
    """
    started = time.perf_counter()
    times = measure_passes(runner, speculator)
    runner.startup_s["step cost"] = time.perf_counter() - started
    try:
        return StepCost.measured(times.table({"device": str(runner.model.device)}))
    except CostTableError as error:
        warnings.warn(
            f"the step costs measured at start-up cannot be used, so every draft is verified: "
            f"{error}. Give step_cost, a table of `extkv profile`",
            stacklevel=2,
        )
        return None


def _spread(sizes: Sequence[int]) -> list[int]:
    """Choose the sizes next to 1, 1.5, 2, 3, 4, 6, 8, … times the smallest, and the largest."""
    powers = range((sizes[-1] // sizes[0]).bit_length())
    wanted = [sizes[0] * 2**power * factor for power in powers for factor in (1, 1.5)]
    chosen = {min((abs(size - near), size) for size in sizes)[1] for near in wanted}
    return sorted({*chosen, sizes[-1]})


def _rising(times_us: dict[int, float]) -> list[tuple[int, float]]:
    """Return sizes and times, each the least of its own and of all larger sizes' times."""
    sizes = sorted(times_us, reverse=True)
    least = itertools.accumulate((times_us[size] for size in sizes), min)
    return list(zip(sizes, least, strict=True))[::-1]


def _least_us(run: Callable[[], None], device: torch.device, num_repeats: int) -> float:
    if device.type != "cuda":
        return _least_us_on_host(run, num_repeats)
    run()
    # All are queued before the first is awaited, so that the device does not idle in between.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_repeats + 1)]  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    marks[0].record(stream)
    for mark in marks[1:]:
        run()
        mark.record(stream)
    marks[-1].synchronize()
    pairs = itertools.pairwise(marks)
    return float(min(a.elapsed_time(b) * 1e3 for a, b in pairs))


def _least_us_on_host(run: Callable[[], None], num_repeats: int) -> float:
    first = _host_us(run)
    times = [_host_us(run)]
    while (len(times) < num_repeats and first + sum(times) < _ENOUGH_US) or sum(times) < _LEAST_US:
        # Other programs disturb short passes more.
        times.append(_host_us(run))
    # What the first one adds, new memory, hardly shows in a long pass.
    return min(times) if len(times) >= num_repeats else min(first, *times)


def _host_us(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
