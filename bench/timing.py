"""Timing, order statistics, environment record, table and JSON file shared by all benchmarks.

Times are microseconds on the host clock unless a name says otherwise. GB is 1e9 bytes, GiB is
2**30. Peers of a comparison run in one process and take turns; nothing here decides what is fair to
compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GB = 10**9
MIB = 2**20
GIB = 2**30

ROW_FORMAT = "{:<50} {:<38} {:>12} {:>12} {:>9} {:>9}  {}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Order statistics of repeated timings, in microseconds.

    Percentiles are nearest-rank: with fewer than 100 samples `p99_us` is the maximum.
    """

    count: int
    min_us: float
    median_us: float
    p95_us: float
    p99_us: float
    max_us: float


def summarize(samples_us: Sequence[float]) -> Summary:
    """Return the order statistics of a non-empty list of timings in microseconds."""
    ordered = sorted(samples_us)

    def nearest_rank(fraction: float) -> float:
        return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]

    return Summary(
        count=len(ordered),
        min_us=ordered[0],
        median_us=statistics.median(ordered),
        p95_us=nearest_rank(0.95),
        p99_us=nearest_rank(0.99),
        max_us=ordered[-1],
    )


def host_us(operation: Callable[[], object]) -> float:
    """Return the host time of one call in microseconds; does not synchronize the device."""
    start = time.perf_counter_ns()
    operation()
    return (time.perf_counter_ns() - start) / 1e3


def synchronized_us(operation: Callable[[], object]) -> float:
    """Return the host time of one call plus the device work it queued, in microseconds."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    operation()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3


def cuda_event_us(operation: Callable[[], object]) -> float:
    """Return the device time of one call on the current stream, in microseconds."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def alternate(
    peers: Mapping[str, Callable[[], float]], rounds: int, warmup_rounds: int = 0
) -> dict[str, list[float]]:
    """Run every peer once per round and return its timings in microseconds.

    Two peers run A B A B. More peers start one further in each round, and odd rounds run in
    reverse, so that a peer does not always follow the same one. Timings of the warm-up rounds are
    dropped.
    """
    names = list(peers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-warmup_rounds, rounds):
        shift = index % len(names)
        order = names[shift:] + names[:shift]
        if index % 2 == 1:
            order.reverse()
        for name in order:
            elapsed_us = peers[name]()
            if index >= 0:
                samples[name].append(elapsed_us)
    return samples


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what was timed and how it compares with the named peer."""

    shape: str
    name: str
    summary: Summary
    samples_us: tuple[float, ...]
    num_bytes: int | None = None
    peer: str | None = None
    time_ratio: float | None = None
    extra: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over the median time, in GB/s."""
        return None if self.num_bytes is None else self.num_bytes / self.summary.median_us / 1e3

    def line(self) -> str:
        """Return the row as fixed-width text."""
        rate = "" if self.gb_per_s is None else f"{self.gb_per_s:.1f}"
        ratio = "" if self.time_ratio is None else f"{self.time_ratio:.3f}"
        median, p95 = f"{self.summary.median_us:.1f}", f"{self.summary.p95_us:.1f}"
        return ROW_FORMAT.format(self.shape, self.name, median, p95, rate, ratio, self.peer or "")


@dataclasses.dataclass(frozen=True)
class Target:
    """A measured ratio or figure and the limit it should keep."""

    name: str
    value: float
    limit: float
    is_upper_limit: bool

    @property
    def is_met(self) -> bool:
        """Whether the value keeps the limit."""
        return self.value <= self.limit if self.is_upper_limit else self.value >= self.limit

    def line(self) -> str:
        """Return `met` or `MISSED` with value and limit."""
        sign = "<=" if self.is_upper_limit else ">="
        word = "met   " if self.is_met else "MISSED"
        return f"{word} {self.name}: {self.value:.3f} (target {sign} {self.limit:g})"


class Report:
    """Rows and targets of one run; prints each row at once and keeps the JSON file current."""

    def __init__(self, title: str, arguments: argparse.Namespace) -> None:
        """Record the environment and print the table's head.

        Args:
            title: name of the benchmark.
            arguments: result of `argument_parser(...)`, with `out` and `commit`.
        """
        self.title = title
        self.environment = environment(arguments.commit)
        self.rows: list[Row] = []
        self.targets: list[Target] = []
        self._out: Path | None = arguments.out
        print(f"{title}: {json.dumps(self.environment)}")
        head = ("shape", "what", "median us", "p95 us", "GB/s", "time/peer", "peer")
        print(ROW_FORMAT.format(*head), flush=True)

    def add(
        self,
        shape: str,
        name: str,
        samples_us: Sequence[float],
        *,
        num_bytes: int | None = None,
        peer: Row | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Row:
        """Append, print and return one row; `time_ratio` is its median over the peer's median."""
        summary = summarize(samples_us)
        row = Row(
            shape=shape,
            name=name,
            summary=summary,
            samples_us=tuple(round(sample, 3) for sample in samples_us),
            num_bytes=num_bytes,
            peer=None if peer is None else peer.name,
            time_ratio=None if peer is None else summary.median_us / peer.summary.median_us,
            extra=extra or {},
        )
        self.rows.append(row)
        print(row.line(), flush=True)
        self._write()
        return row

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Record a target that is met by `value <= limit`."""
        self.targets.append(Target(name, value, limit, is_upper_limit=True))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Record a target that is met by `value >= limit`."""
        self.targets.append(Target(name, value, limit, is_upper_limit=False))

    def finish(self) -> None:
        """Print the targets and write the JSON file for the last time."""
        print("\nTargets")
        for target in self.targets:
            print(target.line())
        self.environment["gpu_state_at_end"] = _gpu_state()
        self._write()
        if self._out is not None:
            print(f"wrote {self._out}")

    def _write(self) -> None:
        if self._out is None:
            return
        rows = [dataclasses.asdict(row) | {"gb_per_s": row.gb_per_s} for row in self.rows]
        targets = [dataclasses.asdict(t) | {"is_met": t.is_met} for t in self.targets]
        content = {
            "title": self.title,
            "environment": self.environment,
            "targets": targets,
            "rows": rows,
        }
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results as JSON to this file"
    )
    parser.add_argument(
        "--commit", default=None, help="commit to record; else EXTKV_COMMIT, else git"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    return parser


def environment(commit: str | None = None) -> dict[str, object]:
    """Return machine, driver, library versions, commit, command line and date of this run."""
    gpu_name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "gpu": gpu_name,
        "gpu_state_at_start": _gpu_state(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit or os.environ.get("EXTKV_COMMIT") or _git_commit(),
        "command": shlex.join(sys.orig_argv),
        "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"),
    }


def _gpu_state() -> str | None:
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"
    return _output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"])


def _git_commit() -> str | None:
    return _output_of(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
