"""Throughput per user against total throughput: no drafts, fixed numbers of them, a schedule.

One engine runs all of them in turns, on the same prompts. "No drafts" keeps the drafter's context,
as an engine that may draft again must.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.bench.steady_load import SteadyLoad
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from extkv.bench.verify_pin import VerifyPin

    Progress = Callable[[str, int, int], None]

NO_DRAFTS, SCHEDULED = "no drafts", "scheduled"


@dataclass(frozen=True)
class ScheduleSettings:
    """Say which loads and schedules to compare.

    Attributes:
        num_requests: Loads: requests at once.
        fixed_lens: Fixed numbers of drafts verified of each request.
        context_len: Tokens of each prompt of random tokens.
        num_warmup_steps: Steps of each load and schedule that do not count; the schedule learns.
        num_steps: Steps that do, in each round.
        num_rounds: Rounds over all schedules of a load; their median counts.
        min_seconds: Steps go on for so long, as far as sequences have room: a schedule tries other
            plans now and then, and a window with one try too many says little.
        acceptance_rates: Synthetic chances of acceptance that the engine was made with, if any.
    """

    num_requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    fixed_lens: tuple[int, ...] = (1, 3, 5, 7)
    context_len: int = 32
    num_warmup_steps: int = 60
    num_steps: int = 60
    num_rounds: int = 2
    min_seconds: float = 0.0
    acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.num_requests or min(self.num_requests) < 1:
            raise InvalidArgumentError(
                f"num_requests is {list(self.num_requests)}, expected numbers above 0"
            )
        if min(self.fixed_lens, default=1) < 1:
            raise InvalidArgumentError(
                f"fixed_lens is {list(self.fixed_lens)}, expected numbers above 0"
            )
        for name in ("context_len", "num_warmup_steps", "num_steps", "num_rounds"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not self.min_seconds >= 0:
            raise InvalidArgumentError(f"min_seconds is {self.min_seconds}, expected 0 or more")

    def num_tokens_per_request(self, num_drafts: int) -> int:
        """Return the most tokens that a request may come to, its prompt included."""
        return self.context_len + (2 + self.num_warmup_steps + self.num_steps) * (1 + num_drafts)


@dataclass(frozen=True)
class SchedulePoint:
    """What one schedule brought at one load; medians over rounds.

    Attributes:
        num_requests: Requests at once.
        schedule: Its name.
        tokens_per_second: Of all requests together.
        step_us: Mean time of a step.
        tokens_per_step: Tokens of a request per step.
        rounds: Tokens per second of each round.
    """

    num_requests: int
    schedule: str
    tokens_per_second: float
    step_us: float
    tokens_per_step: float
    rounds: tuple[float, ...]

    @property
    def tokens_per_second_per_user(self) -> float:
        """Tokens per second of one request."""
        return self.tokens_per_second / self.num_requests


@dataclass(frozen=True)
class ScheduleResult:
    """All points, and where they come from.

    Attributes:
        points: By load, then by schedule.
        source: Device, versions, command; see `provenance`.
        acceptance_rates: Synthetic ones; None where drafts were truly verified.
        settings: What was asked for.
    """

    points: tuple[SchedulePoint, ...]
    source: dict[str, str]
    acceptance_rates: tuple[float, ...] | None = None
    settings: ScheduleSettings = field(default_factory=ScheduleSettings)

    @property
    def is_synthetic(self) -> bool:
        """Whether acceptance was drawn by given rates, so that the text means nothing."""
        return self.acceptance_rates is not None

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules, in their order."""
        return tuple(dict.fromkeys(point.schedule for point in self.points))

    def over_best_other(self) -> dict[int, float]:
        """Return by load the schedule's tokens per second over the best of the others'."""
        ratios = {}
        for num_requests in dict.fromkeys(point.num_requests for point in self.points):
            rates = {
                point.schedule: point.tokens_per_second
                for point in self.points
                if point.num_requests == num_requests
            }
            scheduled = rates.pop(SCHEDULED, None)
            if scheduled is not None and rates:
                ratios[num_requests] = scheduled / max(rates.values())
        return ratios

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        points = [
            asdict(point) | {"tokens_per_second_per_user": point.tokens_per_second_per_user}
            for point in self.points
        ]
        values = {
            "title": "bench schedule",
            "is_synthetic": self.is_synthetic,
            "acceptance_rates": self.acceptance_rates,
            "settings": asdict(self.settings),
            "source": self.source,
            "over_best_other": {str(k): v for k, v in self.over_best_other().items()},
            "points": points,
        }
        return json.dumps(values)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ScheduleResult:
        """Read what `to_json` gave, from a file.

        Raises:
            InvalidArgumentError: If the file cannot be read or holds no such result.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            points = tuple(
                SchedulePoint(
                    num_requests=one["num_requests"],
                    schedule=one["schedule"],
                    tokens_per_second=one["tokens_per_second"],
                    step_us=one["step_us"],
                    tokens_per_step=one["tokens_per_step"],
                    rounds=tuple(one["rounds"]),
                )
                for one in values["points"]
            )
            rates = values["acceptance_rates"]
            lists = {name: tuple(v) for name, v in values["settings"].items() if type(v) is list}
            settings = ScheduleSettings(**(values["settings"] | lists))
            source = values["source"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(f"cannot read the schedules {path}: {error!r}") from error
        return cls(points, source, None if rates is None else tuple(rates), settings)

    def table(self) -> str:
        """Return the result for people."""
        head = ("requests", "schedule", "tokens/s", "per user", "step ms", "per step")
        lines = [_line(head)]
        lines += [
            _line(
                (
                    str(point.num_requests),
                    point.schedule,
                    f"{point.tokens_per_second:,.1f}",
                    f"{point.tokens_per_second_per_user:,.1f}",
                    f"{point.step_us / 1e3:,.2f}",
                    f"{point.tokens_per_step:.2f}",
                )
            )
            for point in self.points
        ]
        for num_requests, ratio in self.over_best_other().items():
            lines.append(f"{num_requests} requests: scheduled over best other {ratio:.3f}")
        if self.is_synthetic:
            lines.append("synthetic acceptance: not lossless, the text means nothing")
        return "\n".join(lines)


def bench_schedule(
    pin: VerifyPin,
    settings: ScheduleSettings,
    source: dict[str, str],
    *,
    prompts: Sequence[list[int]] | None = None,
    on_progress: Progress | None = None,
) -> ScheduleResult:
    """Measure every schedule at every load.

    Args:
        pin: An engine made for scheduled verification, and the hand on its drafts.
        settings: What to compare.
        source: Where it is measured; see `provenance`.
        prompts: Prompts to take in turns instead of random tokens; answers go on past their ends.
        on_progress: Called with a phase, what is done and how much there is.

    Raises:
        InvalidArgumentError: If the engine has no drafter, or a load does not fit it.
    """
    _check(pin, settings)
    schedules: dict[str, int | None] = {NO_DRAFTS: None}
    schedules |= {f"fixed {length}": length for length in settings.fixed_lens}
    schedules[SCHEDULED] = None
    points: list[SchedulePoint] = []
    # Of two steps: the engine may work one ahead.
    room = 2 * (1 + pin.num_drafts)
    total = len(settings.num_requests) * settings.num_rounds * len(schedules)
    done = 0
    for num_requests in settings.num_requests:
        rounds: dict[str, list[_Round]] = {name: [] for name in schedules}
        for _ in range(settings.num_rounds):
            for name, length in schedules.items():
                load = SteadyLoad(pin.llm, settings.context_len, prompts=prompts)
                if name == SCHEDULED:
                    pin.release()
                else:
                    pin.set(length)
                rounds[name].append(_run(load, num_requests, settings, room))
                done += 1
                if on_progress is not None:
                    on_progress("measuring schedules", done, total)
        points += [_point(num_requests, name, found) for name, found in rounds.items()]
    pin.release()
    return ScheduleResult(tuple(points), source, settings.acceptance_rates, settings)


@dataclass(frozen=True)
class _Round:
    tokens_per_second: float
    step_us: float
    tokens_per_step: float


def _run(load: SteadyLoad, num_requests: int, settings: ScheduleSettings, room: int) -> _Round:
    try:
        load.resize(num_requests)
        for _ in range(settings.num_warmup_steps):
            load.step_us()
        before, start = load.num_tokens, time.perf_counter()
        elapsed_s, num_steps = 0.0, 0
        while num_steps < settings.num_steps or (
            elapsed_s < settings.min_seconds and load.room >= room
        ):
            load.step_us()
            num_steps += 1
            elapsed_s = time.perf_counter() - start
        num_tokens = load.num_tokens - before
    finally:
        load.close()
    return _Round(
        num_tokens / elapsed_s,
        elapsed_s / num_steps * 1e6,
        num_tokens / num_steps / num_requests,
    )


def _point(num_requests: int, name: str, rounds: Sequence[_Round]) -> SchedulePoint:
    rates = tuple(one.tokens_per_second for one in rounds)
    return SchedulePoint(
        num_requests,
        name,
        statistics.median(rates),
        statistics.median(one.step_us for one in rounds),
        statistics.median(one.tokens_per_step for one in rounds),
        rates,
    )


def _check(pin: VerifyPin, settings: ScheduleSettings) -> None:
    if pin.num_drafts == 0:
        raise InvalidArgumentError("the engine has no drafter: give one, or a random one")
    if max(settings.fixed_lens, default=0) > pin.num_drafts:
        raise InvalidArgumentError(
            f"fixed_lens is {list(settings.fixed_lens)}, the drafter makes {pin.num_drafts} drafts"
        )
    config = pin.llm.config
    needed = settings.num_tokens_per_request(pin.num_drafts)
    if needed > config.max_model_len:
        raise InvalidArgumentError(
            f"a request may come to {needed} tokens, max_model_len is {config.max_model_len}: "
            "measure fewer steps"
        )
    for num_requests in settings.num_requests:
        if num_requests > config.max_num_seqs or not pin.fits(num_requests, needed):
            raise InvalidArgumentError(
                f"{num_requests} requests of up to {needed} tokens do not fit the engine: it runs "
                f"{config.max_num_seqs} at once, its cache holds "
                f"{pin.llm.engine.scheduler.num_blocks * config.block_size} tokens"
            )


def _line(cells: Sequence[str]) -> str:
    count, name, *numbers = cells
    return f"{count:>8}  {name:<12}" + "".join(f"{cell:>13}" for cell in numbers)
