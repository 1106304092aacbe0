"""Growth latency while the GPU is busy, and what growth does to the running copies.

The main thread keeps 8 GiB device-to-device copies queued, CUDA events around each. Another thread
grows a tensor step by step. Each cycle times quiet copies and then copies during growth, so both
see the same clocks.

Run from the repository root: `python -m bench.memory.bench_growth_under_load --out FILE`.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import extkv
import torch

from bench.memory.bench_commit import driver_call_deltas
from bench.timing import GIB, MIB, Report, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda:0"
NUM_QUIET_COPIES = 40
NUM_DROPPED_COPIES = 4
# Copies queued ahead: a growth that waited for the stream would take at least this many copy times.
QUEUE_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to grow.

    `pause_s` after each growth sets how many copies see one. A zeroed 1 GiB step writes 1 GiB
    itself, about 6 % of what one 8 GiB copy moves, so copies are held to 2 % only where at most one
    copy in five meets a fill; 2 MiB steps that zero back to back have no target.

    The first growth after gigabytes were freed takes some 7 ms: the driver takes the freed memory
    back in it. A server that grows has not freed gigabytes just before, so that growth is timed
    only where `is_first_timed`, in a case of its own without target.
    """

    step_bytes: int
    num_steps: int
    zero_new: bool
    stream: str
    pause_s: float
    copies_have_target: bool
    is_first_timed: bool = False

    @property
    def name(self) -> str:
        """Short text for the table."""
        zero = "zero_new" if self.zero_new else "no zeroing"
        pause = f"pause {self.pause_s * 1e3:.0f} ms"
        start = ", first after a free" if self.is_first_timed else ""
        return f"{self.step_bytes // MIB} MiB {zero}, {self.stream} stream, {pause}{start}"


CASES = (
    Case(GIB, 100, zero_new=False, stream="side", pause_s=0.004, copies_have_target=True),
    Case(GIB, 100, zero_new=True, stream="side", pause_s=0.004, copies_have_target=False),
    Case(GIB, 100, zero_new=True, stream="side", pause_s=0.025, copies_have_target=True),
    Case(GIB, 100, zero_new=False, stream="default", pause_s=0.004, copies_have_target=True),
    Case(2 * MIB, 4096, zero_new=False, stream="side", pause_s=0.0, copies_have_target=True),
    Case(2 * MIB, 4096, zero_new=True, stream="side", pause_s=0.0, copies_have_target=False),
    Case(
        GIB,
        8,
        zero_new=False,
        stream="side",
        pause_s=0.004,
        copies_have_target=False,
        is_first_timed=True,
    ),
)
SETTLE_S = 1.0


class CopyLoad:
    """Copies between two buffers of `num_bytes`, kept queued on `stream`."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Allocate both buffers and fill the source with random bytes."""
        self.stream = stream
        self._source = torch.empty(num_bytes // 8, dtype=torch.int64, device=DEVICE)
        self._source.random_()
        self._target = torch.empty_like(self._source)
        torch.cuda.synchronize()

    def run(self, is_done: Callable[[], bool], at_least: int) -> list[float]:
        """Queue copies until `is_done()` and return the device time of each in microseconds."""
        pending: collections.deque[tuple[torch.cuda.Event, torch.cuda.Event]] = collections.deque()
        times_us: list[float] = []
        while not is_done() or len(times_us) + len(pending) < at_least:
            pending.append(self._enqueue())
            if len(pending) >= QUEUE_DEPTH:
                times_us.append(self._wait_for(*pending.popleft()))
        times_us += [self._wait_for(*events) for events in pending]
        return times_us

    def _enqueue(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            start.record()
            self._target.copy_(self._source)
            end.record()
        return start, end

    @staticmethod
    def _wait_for(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


@dataclasses.dataclass
class Outcome:
    """Timings of all cycles of one case, in microseconds."""

    growth_us: list[float] = dataclasses.field(default_factory=list)
    quiet_us: list[float] = dataclasses.field(default_factory=list)
    busy_us: list[float] = dataclasses.field(default_factory=list)
    driver_calls: list[dict[str, dict[str, float]]] = dataclasses.field(default_factory=list)
    num_handles: int = 0


def grow(tensor: extkv.ExtensibleTensor, case: Case) -> list[float]:
    """Grow step by step and return the host time of each growth in microseconds."""
    times_us: list[float] = []
    if not case.is_first_timed:
        tensor.resize_per_segment_(case.step_bytes)
    for step in range(1 if case.is_first_timed else 2, case.num_steps + 1):
        start = time.perf_counter_ns()
        tensor.resize_per_segment_(step * case.step_bytes, zero_new=case.zero_new)
        times_us.append((time.perf_counter_ns() - start) / 1e3)
        if case.pause_s:
            time.sleep(case.pause_s)
    return times_us


def run_cycle(case: Case, load: CopyLoad, worker: ThreadPoolExecutor, outcome: Outcome) -> None:
    """Time quiet copies, then copies while the worker thread grows a new tensor."""
    time.sleep(SETTLE_S)
    quiet_us = load.run(lambda: True, at_least=NUM_QUIET_COPIES)
    outcome.quiet_us += quiet_us[NUM_DROPPED_COPIES:]
    torch.cuda.synchronize()
    with extkv.ExtensibleTensor(case.step_bytes * case.num_steps, DEVICE) as tensor:
        before = tensor.stats()
        future = worker.submit(grow, tensor, case)
        outcome.busy_us += load.run(future.done, at_least=1)
        outcome.growth_us += future.result()
        after = tensor.stats()
        outcome.driver_calls.append(driver_call_deltas(before, after))
        outcome.num_handles = after.num_handles
        torch.cuda.synchronize()
    torch.cuda.synchronize()


def report_case(report: Report, case: Case, outcome: Outcome) -> None:
    """Add the rows and targets of one case."""
    extra = {"num_handles": outcome.num_handles, "driver_calls": outcome.driver_calls}
    growth = report.add(case.name, "growth (host)", outcome.growth_us, extra=extra)
    quiet = report.add(case.name, "copy, quiet (device)", outcome.quiet_us)
    busy = report.add(case.name, "copy, growing (device)", outcome.busy_us, peer=quiet)
    summary = growth.summary
    worst_create = max(
        (calls["create"]["total_us"] for calls in outcome.driver_calls if "create" in calls),
        default=0.0,
    )
    print(
        f"    growth p50 {summary.median_us:.0f} p99 {summary.p99_us:.0f}"
        f" max {summary.max_us:.0f} us over {summary.count} | handles {outcome.num_handles}"
        f" | most create time in one cycle {worst_create:.0f} us"
        f" | copy max quiet {quiet.summary.max_us:.0f} growing {busy.summary.max_us:.0f} us",
        flush=True,
    )
    if case.step_bytes == GIB and not case.is_first_timed:
        report.at_most(f"{case.name}: growth p99, ms", summary.p99_us / 1e3, 3.0)
    if case.copies_have_target and busy.time_ratio is not None:
        report.at_most(f"{case.name}: copy median over quiet", busy.time_ratio, 1.02)


def warm_up(load: CopyLoad, worker: ThreadPoolExecutor) -> None:
    """Run each path once: the worker's first driver call, a zeroed growth, full clocks."""
    case = Case(64 * MIB, 4, zero_new=True, stream="side", pause_s=0.0, copies_have_target=False)
    for _ in range(2):
        run_cycle(case, load, worker, Outcome())


def main() -> None:
    """Run all cases."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=None, help="cycles per case; default 2")
    parser.add_argument("--copy-gib", type=int, default=8, help="size of each copy")
    arguments = parser.parse_args()
    cycles = arguments.cycles or (1 if arguments.quick else 2)
    # A growth ends in Python: it must not wait 5 ms for the interpreter lock.
    sys.setswitchinterval(1e-4)
    streams = {"side": torch.cuda.Stream(DEVICE), "default": torch.cuda.default_stream(DEVICE)}
    report = Report("bench_growth_under_load", arguments)
    load = CopyLoad(arguments.copy_gib * GIB, streams["side"])
    with ThreadPoolExecutor(max_workers=1) as worker:
        for case in CASES:
            load.stream = streams[case.stream]
            warm_up(load, worker)
            outcome = Outcome()
            for _ in range(cycles):
                run_cycle(case, load, worker, outcome)
            report_case(report, case, outcome)
    report.finish()


if __name__ == "__main__":
    main()
