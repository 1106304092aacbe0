"""Measures what a step costs on a device, and makes the table that scheduled verification reads.

Every shape of step is a number of requests, whether drafts are made, and how many of each request
are verified. No draft is ever accepted, so that all requests advance by one token and a shape stays
what it is. Each shape is warmed up, and its median counts.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from extkv.bench.steady_load import SteadyLoad
from extkv.bench.step_table import MeasuredSteps
from extkv.dspark.cost import QualityLimits, StepSample
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extkv.bench.step_table import StepProfile
    from extkv.bench.verify_pin import VerifyPin

    Progress = Callable[[str, int, int], None]

# A noisy shape is measured again, this often.
_MAX_TRIALS = 4


@dataclass(frozen=True)
class ProfileSettings:
    """Say which shapes to measure, and how often.

    Attributes:
        num_requests: Numbers of requests. Powers of two make tokens of different shapes coincide,
            which tells the parts of the cost apart.
        verify_lens: Drafts verified of each request in steps that draft.
        context_lens: Tokens of each request's prompt.
        num_warmup_steps: Steps of each shape that do not count.
        num_steps: Steps that do.
        limits: What is refused.
    """

    num_requests: tuple[int, ...]
    verify_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_warmup_steps: int = 4
    num_steps: int = 12
    limits: QualityLimits = field(default_factory=QualityLimits)

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_requests", "context_lens"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise InvalidArgumentError(f"{name} is {list(values)}, expected numbers above 0")
        if min(self.verify_lens, default=0) < 0:
            raise InvalidArgumentError(
                f"verify_lens is {list(self.verify_lens)}, expected numbers of at least 0"
            )
        if self.num_warmup_steps < 1 or self.num_steps < 3:  # noqa: PLR2004
            raise InvalidArgumentError(
                f"{self.num_warmup_steps} warm-up steps and {self.num_steps} steps, expected at "
                "least 1 and 3"
            )

    @classmethod
    def default(
        cls,
        *,
        max_num_seqs: int,
        num_drafts: int,
        max_model_len: int,
        is_cuda: bool,
        is_quick: bool,
    ) -> ProfileSettings:
        """Return what is measured where nothing is said.

        Args:
            max_num_seqs: Most requests that the engine runs.
            num_drafts: Drafts that the drafter makes; 0 without one.
            max_model_len: Longest sequence; contexts leave room for the steps.
            is_cuda: Whether the device is a GPU.
            is_quick: Whether to measure fewer shapes and repeats.
        """
        powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
        if is_quick:
            powers = powers[::2]
        lens = sorted({n for n in (0, 1, 3, 7, num_drafts) if n <= num_drafts})
        if is_quick:
            lens = sorted({0, lens[len(lens) // 2], num_drafts})
        contexts = (256, 2048) if is_cuda else (16, 128)
        found = cls(
            num_requests=tuple(sorted({*powers, max_num_seqs})),
            verify_lens=tuple(lens) if num_drafts else (),
            context_lens=contexts[:1] if is_quick else contexts,
            num_steps=7 if is_quick else 12,
        )
        room = max_model_len - found.num_steps_of_load - 2 * (1 + num_drafts)
        fitting = {max(min(context, room), 1) for context in found.context_lens}
        return replace(found, context_lens=tuple(sorted(fitting)))

    @property
    def shapes(self) -> tuple[int | None, ...]:
        """Verify lengths of the steps of a load, None for a step without drafts."""
        return (None, *self.verify_lens)

    @property
    def num_steps_of_load(self) -> int:
        """Most steps of one load of so many requests, repeats of noisy shapes included."""
        of_trial = 2 * (self.num_warmup_steps + self.num_steps) + 4
        return len(self.shapes) * _MAX_TRIALS * of_trial


def profile_steps(
    pin: VerifyPin,
    settings: ProfileSettings,
    source: dict[str, str],
    on_progress: Progress | None = None,
    on_steps: Callable[[MeasuredSteps], object] | None = None,
) -> StepProfile:
    """Measure all shapes of step and make the table.

    Args:
        pin: The engine, in which nothing else runs, and the hand on its drafts.
        settings: What to measure.
        source: Where it is measured, for people; see `provenance`.
        on_progress: Called with a phase, what is done and how much there is.
        on_steps: Called with the steps before a table is made of them, which may be refused.

    Raises:
        CostTableError: If steps are noisy, tokens cost nothing, or the steps do not add up.
        InvalidArgumentError: If a shape does not fit the engine.
    """
    samples: list[StepSample] = []
    skipped: list[tuple[int, int]] = []
    loads = list(itertools.product(settings.context_lens, sorted(settings.num_requests)[::-1]))
    total = len(loads) * len(settings.shapes)
    for context_len in settings.context_lens:
        load = SteadyLoad(pin.llm, context_len)
        try:
            for num_requests in sorted(settings.num_requests, reverse=True):
                needed = context_len + settings.num_steps_of_load + pin.num_lookahead_tokens
                if not pin.fits(num_requests, needed):
                    skipped.append((num_requests, needed))
                    continue
                if load.num_requests and load.room < needed - context_len:
                    load.resize(0)
                for sample in _measure(pin, load, num_requests, settings):
                    samples.append(sample)
                    if on_progress is not None:
                        done = len(samples) + len(skipped) * len(settings.shapes)
                        on_progress("measuring steps", done, total)
        finally:
            pin.release()
            load.close()
    steps = MeasuredSteps(tuple(samples), pin.tiers, source, tuple(skipped))
    if on_steps is not None:
        on_steps(steps)
    return steps.profile(settings.limits)


def _measure(
    pin: VerifyPin, load: SteadyLoad, num_requests: int, settings: ProfileSettings
) -> Iterator[StepSample]:
    """Measure all shapes of a number of requests."""
    pin.set(None)
    load.resize(num_requests)
    for verify_len in settings.shapes:
        pin.set(verify_len)
        trials: list[StepSample] = []
        while len(trials) < _MAX_TRIALS:
            pin.timed_steps(load, settings.num_warmup_steps)
            times = pin.timed_steps(load, settings.num_steps)
            num_drafts = num_requests * (verify_len or 0)
            trials.append(
                StepSample(
                    num_requests=num_requests,
                    num_tokens=pin.num_executed_tokens(num_requests, num_drafts),
                    drafts=verify_len is not None,
                    step_us=statistics.median(times),
                    spread_us=float(np.subtract(*np.percentile(times, [90, 10]))),
                    num_context_tokens=load.num_context_tokens,
                )
            )
            if trials[-1].spread_us <= settings.limits.max_spread_ratio * trials[-1].step_us:
                break
        yield min(trials, key=lambda trial: trial.spread_us / trial.step_us)
