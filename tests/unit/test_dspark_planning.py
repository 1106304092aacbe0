"""Planning from Python: worked numbers, the controller's loop, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from extkv.dspark.cost import CostTable, StepCost
from extkv.dspark.planning import (
    DecisionReason,
    SpeculationController,
    VerifyPlanner,
    survival,
)
from extkv.errors import ExtkvError, SpeculationError

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = [0.9, 0.8, 0.5], [0.6, 0.9, 0.9]


def cost_of_times(*times: float) -> StepCost:
    return StepCost(CostTable(token_us=tuple(enumerate(times, start=1))))


def test_worked_budgets_give_worked_lengths():
    planner = VerifyPlanner(max_num_requests=2, num_drafts=3)
    rows = survival([A, B])
    np.testing.assert_allclose(rows, [[0.9, 0.72, 0.36], [0.6, 0.54, 0.486]], rtol=1e-6)
    assert planner.top(rows, 4).verify_lens.tolist() == [2, 2]
    assert planner.top(rows, 5).verify_lens.tolist() == [2, 3]


@pytest.mark.parametrize("second", [0.9, 0.0])
def test_appendix_a_stops_before_the_dip(second: float):
    planner = VerifyPlanner(max_num_requests=1, num_drafts=2)
    cost = cost_of_times(1.0, 1 / 0.5, 1 / 0.45)
    plan = planner.greedy(survival([[0.8, second]]), cost)
    assert plan.verify_lens.tolist() == [0]
    assert plan.prediction is not None
    assert plan.prediction.gain == pytest.approx(0.0)


def test_b63_the_total_is_of_old_confidences_and_the_split_of_new_ones():
    planner = VerifyPlanner(max_num_requests=2, num_drafts=3)
    # Three drafts of two requests cost little, a fourth much.
    cost = cost_of_times(1.0, 1.0, 1.02, 1.04, 1.06, 9.0, 9.0, 9.0)
    old = survival([[0.95, 0.95, 0.95], [0.3, 0.3, 0.3]])  # favours A
    new = survival([[0.3, 0.3, 0.3], [0.95, 0.95, 0.95]])  # favours B
    budget = planner.budget(old, cost)
    assert budget.num_drafts == 3
    assert planner.top(old, budget.num_drafts).verify_lens.tolist() == [3, 0]
    assert planner.top(new, budget.num_drafts).verify_lens.tolist() == [0, 3]
    even = survival([[0.9, 0.5, 0.5], [0.95, 0.9, 0.5]])
    assert planner.top(even, budget.num_drafts).verify_lens.tolist() == [1, 2]


def test_stairs_need_the_global_maximum():
    planner = VerifyPlanner(max_num_requests=1, num_drafts=3)
    cost = cost_of_times(1.0, 1.95, 1.95, 1.95)
    rows = survival([[0.9, 0.95, 0.95]])
    assert planner.greedy(rows, cost).num_admitted == 0
    budget = planner.budget(rows, cost)
    assert (budget.num_drafts, budget.is_worthwhile) == (3, True)
    assert planner.budget(rows, cost, min_predicted_gain=9.0).num_drafts == 0


def test_a_report_tells_requested_from_landed_trim():
    table = CostTable(token_us=((4, 10.0), (8, 11.0), (16, 20.0)), tiers=(4, 8, 16))
    planner = VerifyPlanner(max_num_requests=3, num_drafts=3)
    plan = planner.top(survival([A] * 3), 7, cost=StepCost(table))
    assert (plan.requested_trim, plan.landed_trim, plan.num_padding_tokens) == (2, 0, 6)
    plan = planner.top(survival([A] * 3), 5, cost=StepCost(table))
    assert (plan.requested_trim, plan.landed_trim, plan.num_padding_tokens) == (4, 8, 0)


def test_no_requests_make_an_empty_plan():
    planner = VerifyPlanner(max_num_requests=4, num_drafts=3)
    assert planner.top(np.zeros((0, 3)), 5).verify_lens.shape == (0,)
    controller = SpeculationController(4, 3, cost_of_times(1.0, 2.0))
    assert controller.decide(1, [], []).reason is DecisionReason.NOTHING_TO_DRAFT
    assert controller.observe().num_tokens == 0


def test_limits_and_other_tokens_count():
    planner = VerifyPlanner(max_num_requests=2, num_drafts=3)
    plan = planner.fixed(survival([A, B]), 3, limits=[0, 2], num_other_tokens=5)
    assert plan.verify_lens.tolist() == [0, 2]
    assert plan.num_executed_tokens == 2 + 2 + 5


def test_the_total_is_history_and_the_present_shares_it():
    controller = SpeculationController(
        2,
        3,
        cost_of_times(1.0, 1.01, 1.02, 1.03, 1.04, 9.0, 9.5, 10.0),
        lag=1,
        fill_tier=False,
        min_snapshot_requests=1,
    )
    controller.decide(1, [0, 1], [1, 1])
    controller.plan([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]])
    controller.observe([0, 0])
    assert controller.decide(2, [0, 1], [1, 1]).budget == 3
    plan = controller.plan([[0.3, 0.3, 0.3], [0.95, 0.9, 0.9]])
    assert plan.verify_lens.tolist() == [0, 3]
    report = controller.observe([0, 2], measured_us=1.1)
    assert (report.num_accepted, report.num_tokens, report.measured_us) == (2, 4, 1.1)
    assert report.predicted_us is not None
    assert controller.stats.num_steps == 2
    assert 0 < controller.acceptance_ratio < 2
    assert len(controller.cost_scale) == 3


def test_a_new_occupant_of_a_slot_starts_sure():
    controller = SpeculationController(
        1, 3, cost_of_times(1.0, 1.3, 1.6, 1.9), lag=1, min_snapshot_requests=1
    )
    controller.decide(1, [0], [1])
    controller.plan([[0.9, 0.0, 0.0]])
    controller.observe([1])
    assert controller.decide(2, [0], [1]).budget == 1
    assert controller.cancel_newest_step() == 2
    assert controller.decide(3, [0], [2]).budget == 3


def test_without_a_table_everything_is_verified():
    controller = SpeculationController(2, 3)
    assert controller.decide(1, [0], [1]).reason is DecisionReason.NO_COST_TABLE
    assert controller.plan([A]).verify_lens.tolist() == [3]
    controller.observe([0])
    controller.set_cost(cost_of_times(1.0, 9.0, 90.0, 900.0))
    decision = controller.decide(2, [0], [1])
    assert (decision.drafts, decision.reason) == (False, DecisionReason.NO_GAIN)
    assert not controller.is_drafting


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "size": (lambda: VerifyPlanner(0, 3), "max_num_requests is 0"),
    "negative": (lambda: VerifyPlanner(-1, 3), r"max_num_requests must be in \[0, 2\*\*32\)"),
    "shape": (lambda: VerifyPlanner(2, 3).top([[0.5]], 1), r"survival has shape \(1, 1\)"),
    "flat": (lambda: VerifyPlanner(2, 3).top([0.5], 1), r"survival has shape \(1,\)"),
    "rows": (lambda: VerifyPlanner(1, 1).top([[0.5]] * 2, 1), "num_requests is 2: at most 1"),
    "limits": (
        lambda: VerifyPlanner(1, 1).top([[0.5]], 1, limits=[1, 2]),
        r"limits has shape \(2,\): \(1,\) needed",
    ),
    "limit": (
        lambda: VerifyPlanner(1, 1).top([[0.5]], 1, limits=[-1]),
        "limits has values from -1 to -1",
    ),
    "float": (
        lambda: VerifyPlanner(1, 1).top([[0.5]], 1, limits=[0.5]),
        "limits has dtype float64: integers needed",
    ),
    "huge": (lambda: VerifyPlanner(1, 1).top([[0.5]], 2**63), "num_drafts must be in"),
    "planner": (
        lambda: SpeculationController(1, 1, planner="best"),  # type: ignore[arg-type]
        'planner must be one of lagged, greedy, verify_all, fixed, none, got "best"',
    ),
    "lag": (lambda: SpeculationController(1, 1, lag=0), "lag is 0"),
    "gain": (
        lambda: SpeculationController(1, 1, min_predicted_gain=float("nan")),
        "min_predicted_gain is NaN",
    ),
    "slot": (lambda: SpeculationController(1, 1).decide(1, [5], [1]), "slot 5 does not exist"),
    "generations": (
        lambda: SpeculationController(1, 1).decide(1, [0], []),
        r"generations has shape \(0,\)",
    ),
    "plan": (lambda: SpeculationController(1, 1).plan(np.zeros((0, 1))), "a decision to draft"),
    "observe": (lambda: SpeculationController(1, 1).observe([0]), "decide comes first"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call: Callable[[], Any], message: str):
    with pytest.raises(SpeculationError, match=message):
        call()


def test_errors_are_value_errors_and_errors_of_extkv():
    assert issubclass(SpeculationError, ExtkvError)
    assert issubclass(SpeculationError, ValueError)


def test_more_accepted_than_verified_is_refused_and_the_step_goes_on():
    controller = SpeculationController(1, 2)
    controller.decide(1, [0], [1])
    controller.plan([[0.5, 0.5]])
    with pytest.raises(SpeculationError, match="row 0 accepts 3 drafts: 2 were verified"):
        controller.observe([3])
    assert controller.observe([2]).num_accepted == 2
    with pytest.raises(SpeculationError, match="step 1 does not follow step 1"):
        controller.decide(1, [0], [1])


def test_calls_from_several_threads_keep_their_results_apart():
    planner = VerifyPlanner(max_num_requests=64, num_drafts=7)
    rows = survival(np.random.default_rng(0).random((64, 7)))
    expected = [planner.top(rows, budget).verify_lens.tolist() for budget in range(40)]
    wrong: list[int] = []

    def plan() -> None:
        wrong.extend(
            budget
            for budget in range(40)
            if planner.top(rows, budget).verify_lens.tolist() != expected[budget]
        )

    threads = [threading.Thread(target=plan) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_planning_imports_no_torch():
    code = (
        "import sys, extkv.dspark.planning, extkv.dspark.calibration, extkv.dspark.simulation;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
