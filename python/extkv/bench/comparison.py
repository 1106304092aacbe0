"""Medians of two contestants that took turns, as a table and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def environment() -> dict[str, Any]:
    """Return machine and library versions."""
    import torch

    has_cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_cuda else None,
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "transformers", "extkv")},
    }


@dataclass(frozen=True)
class Row:
    """Compare one figure.

    Attributes:
        name: What was measured.
        unit: Its unit.
        extkv: Figures of extkv, one per round.
        transformers: Figures of transformers.
        is_rate: Whether more is better.
    """

    name: str
    unit: str
    extkv: tuple[float, ...]
    transformers: tuple[float, ...]
    is_rate: bool = False

    @property
    def speedup(self) -> float:
        """How many times faster extkv is, by the medians."""
        ours, theirs = statistics.median(self.extkv), statistics.median(self.transformers)
        return ours / theirs if self.is_rate else theirs / ours


@dataclass(frozen=True)
class Comparison:
    """Hold a bench's result.

    Attributes:
        title: Name of the bench.
        settings: What was asked for.
        startup_s: Seconds of each phase of extkv's start, up to its first token.
        rows: Figures.
        equal_ratio: Share of answers in which both chose the same tokens.
        environment: Machine and library versions.
    """

    title: str
    settings: dict[str, Any]
    startup_s: dict[str, float]
    rows: tuple[Row, ...]
    equal_ratio: float
    environment: dict[str, Any] = field(default_factory=environment)

    def to_json(self) -> str:
        """Return everything, with medians and ratios, as one JSON object."""
        values = asdict(self)
        for row, entry in zip(self.rows, values["rows"], strict=True):
            entry["extkv_median"] = statistics.median(row.extkv)
            entry["transformers_median"] = statistics.median(row.transformers)
            entry["speedup"] = row.speedup
        return json.dumps(values)

    def table(self) -> str:
        """Return the result for people."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        head = _line("median of", "extkv", "transformers", "unit", "speedup")
        lines = [f"{self.title}: {settings}", "", head]
        for row in self.rows:
            medians = (statistics.median(row.extkv), statistics.median(row.transformers))
            numbers = (f"{value:,.2f}" for value in medians)
            lines.append(_line(row.name, *numbers, row.unit, f"{row.speedup:.2f} x"))
        lines += ["", f"same tokens in {self.equal_ratio:.0%} of the answers", ""]
        total = sum(self.startup_s.values())
        phases = [*self.startup_s.items(), ("together", total)]
        lines += [f"{'start-up of extkv':<28}{'seconds':>14}"]
        return "\n".join([*lines, *(f"{name:<28}{seconds:>14.2f}" for name, seconds in phases)])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def turns(num_rounds: int) -> Sequence[tuple[int, tuple[str, str]]]:
    """Return the rounds and who goes first in each: the two alternate."""
    order = ("extkv", "transformers")
    return [(number, order if number % 2 == 0 else order[::-1]) for number in range(num_rounds)]


def _line(name: str, *cells: str) -> str:
    ours, theirs, unit, speedup = cells
    return f"{name:<28}{ours:>14}{theirs:>14}  {unit:<9}{speedup:>9}"
