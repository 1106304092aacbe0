"""Time of planning 512 requests of 7 drafts on one core, against the same in numpy and in Python.

Run from the repository root: `python -m bench.sched.bench_plan --out FILE`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from extkv import _extkv
from extkv.dspark.cost import StepCost
from extkv.dspark.planning import SpeculationController, VerifyPlanner, survival

from bench.sched.cost_tables import roofline_8b
from bench.timing import Report, alternate, argument_parser, host_us

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Cells = npt.NDArray[np.float32]

NUM_DRAFTS = 7
LIMIT_US = 100.0


def python_top(cells: list[list[float]], num_drafts: int) -> list[int]:
    """Return the lengths of the drafts of largest survival, in plain Python."""
    order = sorted(
        (-value, position, row)
        for row, values in enumerate(cells)
        for position, value in enumerate(values)
    )
    lens = [0] * len(cells)
    for _, _, row in order[:num_drafts]:
        lens[row] += 1
    return lens


def numpy_top(cells: Cells, num_drafts: int) -> npt.NDArray[np.int64]:
    """Return the same with numpy; the stable sort of columns first breaks ties in our order."""
    order = np.argsort(-cells.T.ravel(), kind="stable")[:num_drafts]
    return np.bincount(order % len(cells), minlength=len(cells))


def numpy_budget(cells: Cells, times_us: npt.NDArray[np.float64]) -> int:
    """Return the number of drafts with the most tokens per time, with numpy."""
    falling = np.sort(cells.ravel())[::-1]
    tokens = len(cells) + np.concatenate(([0.0], np.cumsum(falling, dtype=np.float64)))
    return int(np.argmax(tokens / times_us))


def run_planners(report: Report, num_requests: int, rounds: int) -> None:
    """Time each planner over one batch."""
    random = np.random.default_rng(num_requests)
    cells = survival(random.beta(4, 1.5, (num_requests, NUM_DRAFTS)))
    cost = StepCost(roofline_8b())
    planner = VerifyPlanner(num_requests, NUM_DRAFTS)
    native = _extkv.VerifyPlanner(num_requests, NUM_DRAFTS)
    buffer, half = cells.tobytes(), num_requests * NUM_DRAFTS // 2
    load = (num_requests, 0, 0)
    times_us = np.asarray(
        [
            cost.step_us(num_requests=num_requests, num_drafts=k, drafts=True)
            for k in range(num_requests * NUM_DRAFTS + 1)
        ]
    )
    budget = planner.budget(cells, cost).num_drafts
    if budget != numpy_budget(cells, times_us):
        raise AssertionError("budgets disagree")
    if planner.top(cells, half).verify_lens.tolist() != numpy_top(cells, half).tolist():
        raise AssertionError("plans disagree")
    rows = cells.tolist()
    everything = StepCost.from_json('{"format": "extkv.step_cost.v1", "token_us": [[1, 10.0]]}')
    peers: dict[str, Callable[[], object]] = {
        "python top": lambda: python_top(rows, half),
        "numpy top": lambda: numpy_top(cells, half),
        "numpy budget": lambda: numpy_budget(cells, times_us),
        "top, binding": lambda: native.top(buffer, None, *load, None, half),
        "budget, binding": lambda: native.budget(buffer, None, *load, cost.native, None, 0.0, True),
        "greedy, binding": lambda: native.greedy(buffer, None, *load, cost.native, None),
        "greedy of all, binding": lambda: native.greedy(
            buffer, None, *load, everything.native, None
        ),
        "top, arrays": lambda: planner.top(cells, half),
        "budget, arrays": lambda: planner.budget(cells, cost, fill_tier=True),
    }
    timers = {name: (lambda call=call: host_us(call)) for name, call in peers.items()}
    samples = alternate(timers, rounds, warmup_rounds=3)
    shape = f"requests={num_requests} drafts={NUM_DRAFTS}"
    named = {name: report.add(shape, name, samples[name]) for name in ("python top", "numpy top")}
    named["numpy budget"] = report.add(shape, "numpy budget", samples["numpy budget"])
    for name in list(peers)[3:]:
        peer = named["numpy budget" if "budget" in name else "numpy top"]
        row = report.add(shape, name, samples[name], peer=peer)
        if num_requests == 512 and "binding" in name:
            report.at_most(f"512 x 7, {name}, us", row.summary.median_us, LIMIT_US)
        if num_requests == 512 and name == "top, binding":
            ratio = named["python top"].summary.median_us / row.summary.median_us
            report.at_least("512 x 7, python over top", ratio, 20.0)


def run_controller(report: Report, num_requests: int, rounds: int) -> None:
    """Time the controller's three calls of a drafting step."""
    random = np.random.default_rng(1)
    cost = StepCost(roofline_8b())
    controller = SpeculationController(num_requests, NUM_DRAFTS, cost, explore_interval=0)
    slots = np.arange(num_requests, dtype=np.uint32)
    generations = np.ones(num_requests, np.uint32)
    confidences = random.beta(4, 1.5, (num_requests, NUM_DRAFTS)).astype(np.float32)
    samples: dict[str, list[float]] = {"decide": [], "plan": [], "observe": [], "whole step": []}
    for step_id in itertools.count(1):
        if len(samples["decide"]) == rounds:
            break
        decisions = []
        decide_us = host_us(
            lambda step_id=step_id, decisions=decisions: decisions.append(
                controller.decide(step_id, slots, generations)
            )
        )
        if not decisions[0].drafts:
            controller.observe()
            continue
        plans = []
        plan_us = host_us(lambda plans=plans: plans.append(controller.plan(confidences)))
        lens = plans[0].verify_lens
        rows = survival(confidences).cumsum(axis=1)
        expected = np.where(lens > 0, rows[np.arange(num_requests), np.maximum(lens, 1) - 1], 0)
        accepted = np.minimum(np.floor(expected + random.random(num_requests)), lens)
        accepted = accepted.astype(np.uint32)
        us = cost.step_us(num_requests=num_requests, num_drafts=int(lens.sum()), drafts=True)
        observe_us = host_us(lambda accepted=accepted, us=us: controller.observe(accepted, us))
        if step_id <= 20:
            continue
        times = (decide_us, plan_us, observe_us)
        for name, elapsed in zip(samples, (*times, sum(times)), strict=True):
            samples[name].append(elapsed)
    shape = f"requests={num_requests} drafts={NUM_DRAFTS}"
    for name, values in samples.items():
        row = report.add(shape, f"controller: {name}", values)
        if num_requests == 256 and name == "whole step":
            report.at_most("256 requests, controller's step, us", row.summary.median_us, 150.0)


def main() -> None:
    """Time planners and controller at several loads."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_plan", arguments)
    rounds = 100 if arguments.quick else 400
    for num_requests in (8, 64, 256, 512):
        run_planners(report, num_requests, rounds)
    for num_requests in (8, 64, 256, 512):
        run_controller(report, num_requests, rounds)
    report.finish()


if __name__ == "__main__":
    main()
