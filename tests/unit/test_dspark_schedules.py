"""Schedules by themselves: who waits, what is planned late, how ranks agree, what is learnt."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch
from extkv.dspark.confidence import AcceptanceRates, FittedConfidences
from extkv.dspark.controlled_schedule import ControlledSchedule
from extkv.dspark.cost import CostTable, StepCost
from extkv.dspark.planning import SpeculationController
from extkv.dspark.plans import DecisionReason
from extkv.dspark.schedule import DraftRound, FixedSchedule
from extkv.dspark.shared_schedule import SharedSchedule
from extkv.dspark.step_profile import PassTimes
from extkv.dspark.step_timer import Mark, StepTimer
from extkv.errors import InvalidArgumentError, RankError, SpeculationError

NUM_DRAFTS = 3
FLAT = StepCost(CostTable(token_us=((1, 100.0), (64, 101.0))))
RISING = StepCost(CostTable(token_us=((1, 100.0), (24, 120.0), (64, 900.0))))


def round_of(number: int, num_requests: int = 16, *, generation: int = 1, **changes) -> DraftRound:
    return DraftRound(
        **{
            "number": number,
            "request_ids": np.arange(num_requests, dtype=np.int64) + 100 * generation,
            "slots": np.arange(num_requests, dtype=np.int32),
            "generations": np.full(num_requests, generation, np.uint32),
            "limits": np.full(num_requests, NUM_DRAFTS, np.int32),
            "num_other_tokens": 0,
            "num_context_tokens": 100,
            **changes,
        }
    )


class Signals:
    """Confidence logits, and whether somebody waited for them."""

    def __init__(self, logits) -> None:
        self.logits = np.asarray(logits, np.float32)
        self.num_waits = 0

    def head_logits(self):
        self.num_waits += 1
        return self.logits

    def margins(self):
        self.num_waits += 1
        return np.abs(self.logits)


class Heads:
    """The head's probabilities as they are."""

    needs_signals = True

    def of_round(self, draft_round, signals):
        del draft_round
        return 1 / (1 + np.exp(-signals.head_logits()))

    def observe(self, draft_round, num_verified, num_accepted):
        pass

    def reset(self):
        pass


def controlled(cost, confidences=None, **options) -> ControlledSchedule:
    options = {"min_snapshot_requests": 1, "explore_interval": 0, **options}
    controller = SpeculationController(32, NUM_DRAFTS, cost, **options)
    is_greedy = options.get("planner") == "greedy"
    return ControlledSchedule(controller, confidences or Heads(), has_free_budget=is_greedy)


def run_round(schedule, number: int, logits, *, num_requests: int = 16, generation: int = 1):
    """One round whose verified drafts are all accepted; lengths, and how often it waited early."""
    decision = schedule.decide(round_of(number, num_requests, generation=generation))
    signals = Signals(logits) if decision.drafts else None
    waits = schedule.waits
    lens = schedule.lens(np.ones(num_requests, np.bool_), signals)
    num_waits = 0 if signals is None else signals.num_waits
    schedule.start()
    schedule.observe(lens, lens, None)
    assert waits == (num_waits > 0)
    return lens, num_waits


def test_all_drafts_or_none_need_no_wait():
    high, low = np.full((16, NUM_DRAFTS), 4.0), np.full((16, NUM_DRAFTS), -8.0)
    for cost in (FLAT, None):
        schedule = controlled(cost)
        for number in range(1, 6):
            lens, num_waits = run_round(schedule, number, high)
            assert (lens.tolist(), num_waits) == ([NUM_DRAFTS] * 16, 0)
    # Past the knee a token costs more than a bad draft is worth.
    schedule = controlled(RISING)
    seen = [run_round(schedule, number, low) for number in range(1, 12)]
    assert not seen[-1][0].any()
    assert seen[-1][1] == 0


def test_a_budget_in_between_waits_and_goes_to_the_likeliest():
    logits = np.full((16, NUM_DRAFTS), -0.5)
    logits[3] = 5.0
    schedule = controlled(RISING)
    seen = [run_round(schedule, number, logits) for number in range(1, 12)]
    lens, num_waits = seen[-1]
    assert num_waits == 1
    assert 0 < lens.sum() < 16 * NUM_DRAFTS
    assert lens[3] == NUM_DRAFTS
    assert max(np.delete(lens, 3)) < NUM_DRAFTS


def test_a_confidence_that_is_no_number_still_counts_as_a_draft():
    """A plan for all must be all, else more would be accepted than planned."""
    logits = np.full((16, NUM_DRAFTS), np.nan)
    for cost in (FLAT, None):
        lens, _ = run_round(controlled(cost), 1, logits)
        assert lens.tolist() == [NUM_DRAFTS] * 16


def test_a_long_block_of_hopeless_drafts_may_be_accepted_all_the_same():
    """The product of 16 small confidences is no float32 above 0."""
    controller = SpeculationController(4, 16, FLAT, min_snapshot_requests=1)
    schedule = ControlledSchedule(controller, Heads())
    limits = np.full(4, 16, np.int32)
    assert schedule.decide(round_of(1, 4, limits=limits)).drafts
    lens = schedule.lens(np.ones(4, np.bool_), Signals(np.full((4, 16), -80.0)))
    assert lens.tolist() == [16] * 4
    schedule.start()
    schedule.observe(lens, lens, None)


def test_requests_that_ended_verify_nothing_and_bias_nothing():
    schedule = controlled(FLAT)
    is_alive = np.array([True] * 8 + [False] * 8)
    for number in range(1, 30):
        assert schedule.decide(round_of(number)).drafts
        lens = schedule.lens(is_alive, Signals(np.full((16, NUM_DRAFTS), 6.0)))
        assert lens.tolist() == [NUM_DRAFTS] * 8 + [0] * 8
        schedule.start()
        schedule.observe(lens, lens, None)
    assert schedule.controller.acceptance_ratio == pytest.approx(1.0, abs=0.02)


def test_two_rounds_may_overlap_and_a_reset_forgets_both():
    schedule = controlled(FLAT)
    signals = Signals(np.full((16, NUM_DRAFTS), 2.0))
    alive = np.ones(16, np.bool_)
    schedule.decide(round_of(1))
    lens = schedule.lens(alive, signals)
    for number in range(2, 6):
        # The step of the round before is launched, and this round decided while it runs.
        schedule.start()
        schedule.decide(round_of(number))
        schedule.observe(lens, lens, 100.0)
        lens = schedule.lens(alive, signals)
    schedule.reset()
    assert schedule.controller.stats.num_steps == 4
    schedule.decide(round_of(6))
    schedule.lens(alive, signals)


def test_a_slots_next_occupant_does_not_inherit_its_survival():
    """With one request the budget is history: a new generation begins at survival 1."""
    low, high = np.full((1, NUM_DRAFTS), -3.0), np.full((1, NUM_DRAFTS), 6.0)
    cost = StepCost(CostTable(token_us=((1, 100.0), (4, 190.0))))
    schedule = controlled(cost, lag=2)
    for number in range(1, 4):
        run_round(schedule, number, high, num_requests=1)
    for number in range(4, 8):
        run_round(schedule, number, low, num_requests=1)
    same = schedule.decide(round_of(8, 1))
    schedule.reset()
    other = schedule.decide(round_of(9, 1, generation=2))
    assert other.drafts
    assert other.budget == NUM_DRAFTS
    assert not same.drafts or same.budget < NUM_DRAFTS


def test_a_fixed_schedule_keeps_to_limits():
    schedule = FixedSchedule(NUM_DRAFTS)
    limits = np.array([3, 1, 0, 3], np.int32)
    schedule.decide(round_of(1, 4, limits=limits))
    alive = np.array([True, True, True, False])
    assert schedule.lens(alive, None).tolist() == [3, 1, 0, 0]
    schedule.verify_len = 0
    assert not schedule.decide(round_of(2, 4)).drafts
    for length in (-1, 4):
        with pytest.raises(InvalidArgumentError, match=f"fixed_verify_len is {length}"):
            schedule.verify_len = length


class Ranks:
    """Broadcasts between threads of one process: rank 0 puts, the others take."""

    def __init__(self, world_size: int) -> None:
        self._queues = [queue.Queue() for _ in range(world_size)]

    def broadcast(self, rank: int):
        def send(values, size):
            if rank == 0:
                assert values.shape == (size,)
                for other in self._queues[1:]:
                    other.put(values.copy())
                return values
            assert values is None
            return self._queues[rank].get(timeout=20)

        return send


@pytest.mark.parametrize("planner", ["lagged", "greedy"])
def test_two_ranks_run_the_same_windows_though_their_clocks_and_logits_differ(planner):
    ranks = Ranks(2)
    seen: list[list] = [[], []]

    def engine(rank: int) -> None:
        own = controlled(RISING, planner=planner, probe_interval=2) if rank == 0 else None
        schedule = SharedSchedule(own, ranks.broadcast(rank))
        random = np.random.default_rng(rank)
        for number in range(1, 60):
            decision = schedule.decide(round_of(number))
            signals = None
            if decision.drafts:
                signals = Signals(random.normal(-0.5, 3.0, (16, NUM_DRAFTS)))
            alive = np.arange(16) != number % 16
            lens = schedule.lens(alive, signals)
            assert signals is None or rank == 0 or signals.num_waits == 0
            schedule.start()
            schedule.observe(lens, lens // 2, float(random.uniform(50, 500)))
            seen[rank].append((decision.drafts, decision.budget, decision.reason, lens.tolist()))

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen[0]) == 59
    assert seen[0] == seen[1]
    assert {reason for _, _, reason, _ in seen[0]} >= {DecisionReason.GAIN}
    assert len({sum(lens) for *_, lens in seen[0]}) > 2


def test_ranks_whose_steps_differ_are_told():
    ranks = Ranks(2)
    first = SharedSchedule(FixedSchedule(NUM_DRAFTS), ranks.broadcast(0))
    second = SharedSchedule(None, ranks.broadcast(1))
    first.decide(round_of(1, 2))
    second.decide(round_of(1, 2))
    first.lens(np.array([True, True]), None)
    with pytest.raises(RankError, match=r"rank 0 verifies \[3, 3\].* at most \[3, 0\]"):
        second.lens(np.array([True, False]), None)


def observe_rates(rates, draft_round, verified, accepted):
    rates.observe(draft_round, np.asarray(verified, np.int32), np.asarray(accepted, np.int32))


def test_rates_count_what_was_tried_and_follow_each_request():
    rates = AcceptanceRates(4, NUM_DRAFTS)
    draft_round = round_of(1, 2)
    for _ in range(400):
        observe_rates(rates, draft_round, [3, 3], [1, 3])
    # First: always accepted. Second: half of the time. Third: always, once it is tried.
    assert rates.rates == pytest.approx([1.0, 0.5, 1.0], abs=0.05)
    scaled = rates.of_round(draft_round, None)
    assert scaled[0, 1] < 0.45
    assert scaled[1, 1] > 0.55
    # Another occupant of the first slot is nobody's heir.
    other = rates.of_round(round_of(2, 2, generation=2), None)
    assert other[0] == pytest.approx(np.minimum(rates.rates, 1.0), abs=1e-6)
    before = rates.rates.copy()
    observe_rates(rates, draft_round, [0, 0], [0, 0])
    assert rates.rates == pytest.approx(before)


def test_trimmed_windows_bias_no_rate():
    """A position outside the window is no trial, whatever came before it."""
    random = np.random.default_rng(1)
    truth = np.array([0.9, 0.7, 0.4])
    whole, trimmed = AcceptanceRates(64, NUM_DRAFTS), AcceptanceRates(64, NUM_DRAFTS)
    for number in range(1500):
        drawn = np.minimum.accumulate(random.random((8, NUM_DRAFTS)) < truth, axis=1).sum(1)
        draft_round = round_of(number, 8)
        observe_rates(whole, draft_round, np.full(8, NUM_DRAFTS), drawn)
        windows = random.integers(0, NUM_DRAFTS + 1, 8)
        observe_rates(trimmed, draft_round, windows, np.minimum(drawn, windows))
    assert whole.rates == pytest.approx(truth, abs=0.05)
    assert trimmed.rates == pytest.approx(truth, abs=0.06)


def test_a_fitted_model_learns_what_a_margin_is_worth():
    random = np.random.default_rng(2)
    model = FittedConfidences(NUM_DRAFTS, "margin")
    for number in range(600):
        margins = random.uniform(0, 6, (8, NUM_DRAFTS)).astype(np.float32)
        draft_round = round_of(number, 8)
        model.of_round(draft_round, Signals(margins))
        likely = 1 / (1 + np.exp(2 - margins))
        drawn = np.minimum.accumulate(random.random((8, NUM_DRAFTS)) < likely, axis=1).sum(1)
        observe_rates(model, draft_round, np.full(8, NUM_DRAFTS), drawn)
    margins = np.array([[0.5] * NUM_DRAFTS, [5.5] * NUM_DRAFTS])
    found = model.of_round(round_of(900, 2), Signals(margins))
    assert found[0].max() < 0.4
    assert found[1].min() > 0.85
    with pytest.raises(InvalidArgumentError, match="computes no margin"):
        model.of_round(round_of(901, 2), None)


def test_more_accepted_than_planned_is_refused():
    schedule = controlled(FLAT)
    schedule.decide(round_of(1))
    lens = schedule.lens(np.ones(16, np.bool_), Signals(np.zeros((16, NUM_DRAFTS))))
    schedule.start()
    with pytest.raises(SpeculationError):
        schedule.observe(lens, lens + 1, None)


def test_times_are_typical_from_the_second_step_of_a_shape_on_and_without_pauses():
    timer = StepTimer(torch.device("cpu"))
    marks = [Mark(None, 0.01 * number) for number in range(4)]
    found = [
        timer.typical_us(marks[0], marks[1], 0.001, "a"),
        timer.typical_us(marks[1], marks[2], 0.001, "a"),
        timer.typical_us(marks[1], marks[2], 0.006, "a"),
        timer.typical_us(marks[2], marks[3], 0.001, "b"),
    ]
    assert [elapsed for elapsed, _ in found] == pytest.approx([10_000.0] * 4)
    assert [is_typical for _, is_typical in found] == [False, True, False, False]


def test_passes_that_a_busy_machine_slowed_are_at_most_what_larger_ones_took():
    times = PassTimes({1: 100.0, 2: 500.0, 4: 120.0, 8: 200.0}, {1: 90.0, 8: 80.0}, (1, 2, 4, 8))
    cost = StepCost.measured(times.table())
    assert cost.step_us(num_requests=1) == pytest.approx(100.0)
    assert cost.step_us(num_requests=1, num_drafts=1) == pytest.approx(120.0)
    assert cost.step_us(num_requests=1, num_drafts=4, drafts=True) == pytest.approx(280.0)
