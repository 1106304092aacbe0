"""Measured steps, their file, and the table of them: what the fit leaves open stands beside it.

The file keeps all that a fit reads, so that a table can be made again, for example by a later fit.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from extkv.dspark.cost import (
    CostTable,
    QualityLimits,
    StepCost,
    StepFit,
    StepSample,
    fit_step_cost,
)
from extkv.errors import CostTableError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["MeasuredSteps", "StepProfile", "fit_plain_steps", "fit_steps"]


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps as they were measured.

    Attributes:
        samples: The steps.
        tiers: Numbers of tokens with a captured graph, rising; none if every size ran as it is.
        source: Where they were measured, for people.
        skipped: Loads that the cache had no room for: requests and tokens of each.
    """

    samples: tuple[StepSample, ...]
    tiers: tuple[int, ...] = ()
    source: dict[str, str] = field(default_factory=dict)
    skipped: tuple[tuple[int, int], ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps, one per line."""
        head = {"source": self.source, "tiers": self.tiers, "skipped": self.skipped}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        steps = ",\n".join(f"  {json.dumps(asdict(sample))}" for sample in self.samples)
        lines.append(f' "samples": [\n{steps}\n ]')
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredSteps:
        """Read a file of steps.

        Raises:
            CostTableError: If the file cannot be read or holds something else.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(
                samples=tuple(StepSample(**sample) for sample in values["samples"]),
                tiers=tuple(values["tiers"]),
                source=dict(values["source"]),
                skipped=tuple((load[0], load[1]) for load in values.get("skipped", ())),
            )
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise CostTableError(
                f"cannot read measured steps from {path}: {type(error).__name__}: {error}"
            ) from error

    def profile(self, limits: QualityLimits, **facts: str) -> StepProfile:
        """Make the table.

        Args:
            limits: What is refused.
            **facts: What to add to the table's source.

        Raises:
            CostTableError: If steps are noisy, tokens cost nothing, or the steps do not add up.
        """
        fit = fit_steps(self.samples, self.tiers, limits)
        table = CostTable.from_json(fit.cost.to_json())
        return StepProfile(
            replace(table, source=self.source | facts),
            self.samples,
            fit.worst_residual_ratio,
            fit.mean_residual_ratio,
            self.skipped,
        )


@dataclass(frozen=True)
class StepProfile:
    """A measured table and what it comes from.

    Attributes:
        table: The table, its source included.
        samples: The steps measured.
        worst_residual_ratio: Largest distance of a step from the table, over the step's time.
        mean_residual_ratio: Mean of the same.
        skipped: Loads that the cache has no room for: requests and tokens of each.
    """

    table: CostTable
    samples: tuple[StepSample, ...]
    worst_residual_ratio: float
    mean_residual_ratio: float
    skipped: tuple[tuple[int, int], ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the fields of the table's file, with the steps and the residuals beside them."""
        return {
            **json.loads(self.table.to_json()),
            "worst_residual_ratio": self.worst_residual_ratio,
            "mean_residual_ratio": self.mean_residual_ratio,
            "skipped": [list(load) for load in self.skipped],
            "samples": [asdict(sample) for sample in self.samples],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table's file; what reads it ignores the steps beside it."""
        lines = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in self.as_dict().items())
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def describe(self) -> str:
        """Return the steps and how the table describes them, for people."""
        cost = StepCost(self.table)
        head = ("requests", "tokens", "context", "drafts", "step ms", "spread", "table ms", "off")
        lines = ["".join(f"{name:>10}" for name in head)]
        for sample in self.samples:
            fitted = cost.step_us(
                num_requests=sample.num_requests,
                num_drafts=sample.num_verified,
                num_other_tokens=sample.num_tokens - sample.num_requests - sample.num_verified,
                drafts=sample.drafts,
                num_context_tokens=sample.num_context_tokens,
            )
            cells = (
                f"{sample.num_requests:,}",
                f"{sample.num_tokens:,}",
                f"{sample.num_context_tokens:,}",
                "yes" if sample.drafts else "no",
                f"{sample.step_us / 1e3:.3f}",
                f"{sample.spread_us / sample.step_us:.1%}",
                f"{fitted / 1e3:.3f}",
                f"{fitted / sample.step_us - 1:+.1%}",
            )
            lines.append("".join(f"{cell:>10}" for cell in cells))
        lines.append(
            f"the table is off by {self.mean_residual_ratio:.1%} on average, "
            f"{self.worst_residual_ratio:.1%} at most"
        )
        for num_requests, num_tokens in self.skipped:
            lines.append(
                f"left out: {num_requests} requests of {num_tokens} tokens, which the cache cannot "
                "hold"
            )
        return "\n".join(lines)


def fit_steps(
    samples: Sequence[StepSample], tiers: Sequence[int], limits: QualityLimits
) -> StepFit:
    """Make a table of steps; without any that draft, of plain steps."""
    if any(sample.drafts for sample in samples):
        return fit_step_cost(samples, tiers, limits)
    return fit_plain_steps(samples, tiers, limits)


def fit_plain_steps(
    samples: Sequence[StepSample], tiers: Sequence[int], limits: QualityLimits
) -> StepFit:
    """Make a table of steps without drafts: one token per request, and a slope over the context.

    Raises:
        CostTableError: If there are none, they are noisy, or tokens cost next to nothing.
    """
    if not samples:
        raise CostTableError("no step was measured: the cache has no room for any load")
    for sample in samples:
        ratio = sample.spread_us / sample.step_us
        if ratio > limits.max_spread_ratio:
            raise CostTableError(
                f"repeats of a step of {sample.num_requests} requests spread by {ratio:.0%} of "
                f"their median, more than {limits.max_spread_ratio:.0%}"
            )
    slope = max(_context_slope(samples), 0.0)
    base: dict[int, list[float]] = {}
    for sample in samples:
        rest = sample.step_us - slope * sample.num_context_tokens
        base.setdefault(sample.num_tokens, []).append(rest)
    most = max(sample.num_context_tokens for sample in samples)
    table = CostTable(
        token_us=tuple((at, max(statistics.mean(us), 0.0)) for at, us in sorted(base.items())),
        context_us=((0, 0.0), (most, slope * most)) if slope else (),
        tiers=tuple(tiers),
    )
    cost = StepCost.measured(table, limits)
    ratios = [
        abs(
            cost.step_us(
                num_requests=sample.num_requests, num_context_tokens=sample.num_context_tokens
            )
            / sample.step_us
            - 1
        )
        for sample in samples
    ]
    worst = max(ratios)
    if worst > limits.max_residual_ratio:
        sample = samples[ratios.index(worst)]
        raise CostTableError(
            f"a step of {sample.num_requests} requests with {sample.num_context_tokens} context "
            f"tokens took {sample.step_us:.0f} us, {worst:.0%} from the table, more than "
            f"{limits.max_residual_ratio:.0%}"
        )
    return StepFit(cost, worst, statistics.mean(ratios))


def _context_slope(samples: Sequence[StepSample]) -> float:
    """Return microseconds per context token, by least squares within equal numbers of requests."""
    groups: dict[int, list[StepSample]] = {}
    for sample in samples:
        groups.setdefault(sample.num_requests, []).append(sample)
    covariance = variance = 0.0
    for group in groups.values():
        contexts = np.array([float(sample.num_context_tokens) for sample in group])
        times = np.array([sample.step_us for sample in group])
        contexts -= contexts.mean()
        covariance += float(contexts @ (times - times.mean()))
        variance += float(contexts @ contexts)
    return covariance / variance if variance else 0.0
