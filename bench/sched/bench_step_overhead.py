"""What scheduling costs the host per step: decide, plan, offer, observe, for 256 requests.

The same rounds go through a schedule that never changes; the difference is the price of deciding.
Both tell the scheduler their placeholders, and none waits for a device. Times are of this thread's
processor, so that other programs do not count.

Run from the repository root: `python -m bench.sched.bench_step_overhead --out FILE`.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from extkv.dspark.calibration import Temperatures
from extkv.dspark.confidence import AcceptanceRates, FittedConfidences, HeadConfidences
from extkv.dspark.controlled_schedule import ControlledSchedule
from extkv.dspark.cost import CostTable, StepCost
from extkv.dspark.planning import SpeculationController
from extkv.dspark.rounds import RoundBook
from extkv.dspark.schedule import FixedSchedule

from bench.timing import Report, argument_parser

if TYPE_CHECKING:
    from extkv.dspark.confidence import Confidences
    from extkv.dspark.schedule import VerifySchedule

NUM_REQUESTS, NUM_DRAFTS = 256, 7
LIMIT_US = 150.0
# Weights first, then a price per token: a budget in between, so that every step plans.
COST = StepCost(
    CostTable(
        token_us=((1, 6000.0), (512, 8000.0), (2048, 40000.0)),
        draft_us=((1, 1300.0), (256, 1500.0)),
        tiers=(*range(8, 129, 8), *range(144, 257, 16), *range(288, 2049, 32)),
    )
)


class _Offers:
    """Takes placeholders as the scheduler does."""

    def set_drafts(self, request_id: int, drafts: list[None]) -> None:
        """Drop them."""


class _Signals:
    """Confidence logits that have arrived."""

    def __init__(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self._logits = logits

    def head_logits(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return them."""
        return self._logits

    margins = head_logits


def steps(schedule: VerifySchedule, num_steps: int) -> list[float]:
    """Return the host's microseconds per step, without the tokens' own work."""
    random = np.random.default_rng(1)
    book = RoundBook(
        schedule, torch.device("cpu"), num_drafts=NUM_DRAFTS, max_position=4096, token_sizes=[]
    )
    # Nothing runs here, so the time between two steps says nothing about their costs.
    book._timer.typical_us = lambda *_: (8000.0, False)  # type: ignore[method-assign] # noqa: SLF001
    ids = list(range(NUM_REQUESTS))
    sampled = np.arange(NUM_REQUESTS)
    logits = random.normal(0.5, 1.5, (NUM_REQUESTS, NUM_DRAFTS)).astype(np.float32)
    lens = np.zeros(NUM_REQUESTS, np.int32)
    offers, times = _Offers(), []
    for number in range(1, num_steps + 1):
        rows = lens + 1
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        plan = SimpleNamespace(
            step_id=number,
            request_ids=np.arange(NUM_REQUESTS, dtype=np.uint64),
            request_slots=np.arange(NUM_REQUESTS, dtype=np.int32),
            slot_generations=np.ones(NUM_REQUESTS, np.uint32),
            seq_lens=np.full(NUM_REQUESTS, 500, np.int32) + rows,
            num_draft_tokens=lens,
            num_scheduled_tokens=rows,
            query_start_loc=starts,
            num_decode_requests=NUM_REQUESTS,
            input_token_ids=np.zeros(starts[-1], np.int32),
        )
        accepted = np.minimum(random.geometric(0.35, NUM_REQUESTS) - 1, lens).tolist()
        windows = [[0] * (count + 1) for count in accepted]
        start = time.thread_time_ns()
        book.begin_step()
        made = book.next_round(plan, sampled, int(starts[-1]))  # type: ignore[arg-type]
        assert made is not None
        if made.decision.drafts:
            made.drafts = _Signals(logits)  # type: ignore[assignment]
        book.end_step(ids, windows, ids, offers)  # type: ignore[arg-type]
        times.append((time.thread_time_ns() - start) / 1e3)
        lens = np.zeros(NUM_REQUESTS, np.int32) if made.lens is None else made.lens
    reports = list(book.reports)[20:]
    assert sum(found.has_drafted for found in reports) > 0.9 * len(reports)
    if not isinstance(schedule, FixedSchedule):
        # Neither all nor none: the confidences decide.
        assert all(
            0 < found.num_verified < found.num_available for found in reports if found.has_drafted
        )
    return times


def controlled(confidences: Confidences) -> ControlledSchedule:
    """Make a schedule that plans in every step."""
    controller = SpeculationController(NUM_REQUESTS, NUM_DRAFTS, COST)
    return ControlledSchedule(controller, confidences)


def main() -> None:
    """Measure each schedule in turn, a few times, and keep the quietest turn."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_step_overhead", arguments)
    num_steps = 120 if arguments.quick else 600
    makers = {
        "fixed": lambda: FixedSchedule(NUM_DRAFTS),
        "head": lambda: controlled(HeadConfidences(Temperatures([1.0] * NUM_DRAFTS))),
        "acceptance": lambda: controlled(AcceptanceRates(NUM_REQUESTS, NUM_DRAFTS)),
        "both": lambda: controlled(FittedConfidences(NUM_DRAFTS, "both")),
    }
    best: dict[str, list[float]] = {}
    for _ in range(5):
        for name, make in makers.items():
            times = steps(make(), num_steps)[20:]
            if name not in best or statistics.median(times) < statistics.median(best[name]):
                best[name] = times
    base = statistics.median(best["fixed"])
    for name, times in best.items():
        row = report.add(f"schedule: {name}", f"{NUM_REQUESTS} requests", times)
        if name != "fixed":
            more = row.summary.median_us - base
            print(f"    {name}: {more:.0f} us more than a fixed number")
            report.at_most(f"{name}: us per step more than fixed", more, LIMIT_US)
    report.finish()


if __name__ == "__main__":
    main()
