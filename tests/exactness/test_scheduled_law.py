"""The output follows the target's law with every planner in the loop, and not with one that peeks.

Seeds go in pairs: a planner shares its drafts out between the two requests of a pair. Confidences
depend strongly on the token before a draft, so a plan that looks at a draft, or at what comes after
it, bends the law.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from chains import Chain, Run, Tables, exact_law, p_value
from extkv.dspark.controlled_schedule import ControlledSchedule
from extkv.dspark.cost import CostTable, StepCost
from extkv.dspark.planning import SpeculationController, VerifyPlanner, survival
from extkv.dspark.schedule import DraftRound
from extkv.reference.markov_step import markov_step
from extkv.reference.rejection import verify_drafts

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

CPU = torch.device("cpu")
TWINS = types.SimpleNamespace(markov_step=markov_step, verify_drafts=verify_drafts)
NUM_SEEDS = 20_000
LEAST_P = 1e-4
NUM_DRAFTS = 3
CHAIN = Chain(vocab_size=3, num_tokens=3, num_drafts=NUM_DRAFTS, seed=7)
# A second draft costs more than the first, and stairs.
COST = StepCost(CostTable(token_us=((2, 10.0), (4, 14.0), (8, 30.0)), tiers=(2, 3, 5, 8)))
METHODS = pytest.mark.parametrize("method", ["standard", "block"])


def confidences(previous: torch.Tensor) -> npt.NDArray[np.float32]:
    """Confidences of drafts after these tokens ([R, K]): far apart between tokens."""
    table = torch.tensor([[0.95, 0.30, 0.60], [0.15, 0.90, 0.50], [0.80, 0.05, 0.97]])
    slots = torch.arange(previous.shape[1])
    return table[slots[None, :], previous].numpy()


def generated(
    chain: Chain, plan: Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[Run, list[int]]:
    """Run all seeds; `plan` gets the seeds that are active and their windows [R, 1 + K]."""
    run = Run(chain, Tables(chain, CPU), TWINS, NUM_SEEDS)
    lengths_seen: list[int] = []
    while True:
        active = (run.counts < chain.num_tokens).nonzero()[:, 0]
        if active.numel() == 0:
            return run, lengths_seen
        anchors = run.tokens[active, run.counts[active]]
        # Drafts are a function of their keys: the round draws these again.
        drafts, _ = run.draft(active, anchors, run.counts[active])
        lengths = plan(run, active, torch.cat([anchors[:, None], drafts], dim=1))
        lengths_seen += lengths.unique().tolist()
        run.round(active, lengths)


def in_pairs(choose: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.int32]]):
    """A plan that chooses for each pair of seeds by itself, from their confidences."""

    def plan(run: Run, active: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        del run
        found = confidences(windows[:, :-1])
        pairs = (active // 2).numpy()
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        ends = np.append(starts[1:], len(pairs))
        lens = [choose(found[a:b]) for a, b in zip(starts, ends, strict=True)]
        return torch.from_numpy(np.concatenate(lens)).to(torch.int64)

    return plan


PLANNER = VerifyPlanner(2, NUM_DRAFTS)
CHOICES = {
    "greedy": lambda c: PLANNER.greedy(survival(c), COST).verify_lens,
    "greedy-capped": lambda c: PLANNER.greedy(survival(c), COST, max_num_drafts=2).verify_lens,
    "top-2": lambda c: PLANNER.top(survival(c), 2).verify_lens,
    "top-3": lambda c: PLANNER.top(survival(c), 3, cost=COST).verify_lens,
    "fixed-1": lambda c: PLANNER.fixed(survival(c), 1).verify_lens,
    "none": lambda c: PLANNER.fixed(survival(c), 0).verify_lens,
}


@METHODS
@pytest.mark.parametrize("name", CHOICES)
def test_every_planner_keeps_the_law(name: str, method: str):
    chain = Chain(**{**vars(CHAIN), "method": method})
    run, lengths = generated(chain, in_pairs(CHOICES[name]))
    assert p_value(run, exact_law(chain, run.tables)) > LEAST_P
    assert len(set(lengths)) > 1 or name in {"fixed-1", "none"}


@METHODS
def test_sees_confidences_of_the_drafts_themselves(method: str):
    """The confidence of the token that was drawn, in place of the one before."""
    chain = Chain(**{**vars(CHAIN), "method": method})

    def plan(run: Run, active: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        return in_pairs(CHOICES["top-2"])(run, active, windows.roll(-1, dims=1))

    run, _ = generated(chain, plan)
    assert p_value(run, exact_law(chain, run.tables)) < LEAST_P


@METHODS
def test_sees_a_search_past_a_dip(method: str):
    """All drafts or none, by what all of them promise: the first one decides about itself."""
    chain = Chain(**{**vars(CHAIN), "method": method})
    dip = StepCost(CostTable(token_us=((2, 10.0), (3, 20.0), (8, 22.0))))

    def best(found: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        none = PLANNER.fixed(survival(found), 0, cost=dip)
        whole = PLANNER.fixed(survival(found), NUM_DRAFTS, cost=dip)
        assert none.prediction is not None
        assert whole.prediction is not None
        return (whole if whole.prediction.gain > 0 else none).verify_lens

    run, lengths = generated(chain, in_pairs(best))
    assert set(lengths) == {0, NUM_DRAFTS}
    assert p_value(run, exact_law(chain, run.tables)) < LEAST_P
    stops = in_pairs(lambda found: PLANNER.greedy(survival(found), dip).verify_lens)
    run, _ = generated(chain, stops)
    assert p_value(run, exact_law(chain, run.tables)) > LEAST_P


class _Heads:
    """Confidences of a head, from the windows of a round."""

    needs_signals = True

    def of_round(self, draft_round, signals):
        del draft_round
        return confidences(signals[:, :-1])

    def observe(self, draft_round, num_verified, num_accepted):
        pass

    def reset(self):
        pass


@METHODS
@pytest.mark.parametrize("planner", ["lagged", "greedy"])
@pytest.mark.parametrize("cost", [COST, None], ids=["stairs", "no-table"])
def test_an_engines_schedule_keeps_the_law(planner: str, method: str, cost: StepCost | None):
    """A schedule of pairs in turn: budgets from the pairs before, gates, probes, explorations."""
    chain = Chain(**{**vars(CHAIN), "method": method, "seed": 9})
    controller = SpeculationController(
        2,
        NUM_DRAFTS,
        cost,
        planner=planner,
        min_snapshot_requests=1,
        probe_interval=2,
        max_probe_interval=4,
        max_probe_share=1.0,
        explore_interval=5,
    )
    schedule = ControlledSchedule(controller, _Heads(), has_free_budget=planner == "greedy")
    reasons = set()
    number = 0

    def plan(run: Run, active: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        nonlocal number
        del run
        pairs = (active // 2).numpy()
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        lens = []
        for start, end in zip(starts, np.append(starts[1:], len(pairs)), strict=True):
            number += 1
            size = end - start
            # Each pair is another occupant of the two slots.
            draft_round = DraftRound(
                number=number,
                request_ids=active[start:end].numpy(),
                slots=np.arange(size, dtype=np.int32),
                generations=np.full(size, number, np.uint32),
                limits=np.full(size, NUM_DRAFTS, np.int32),
                num_other_tokens=0,
                num_context_tokens=0,
            )
            decision = schedule.decide(draft_round)
            reasons.add(decision.reason.value)
            signals = windows[start:end] if decision.drafts else None
            found = schedule.lens(np.ones(size, np.bool_), signals)
            schedule.start()
            # What is learnt must be history: a coin of the next pairs' past, not of these drafts.
            accepted = np.minimum(found, number % 3).astype(np.int32)
            schedule.observe(found, accepted, 20.0 + number % 7 if cost else None)
            lens.append(found)
        return torch.from_numpy(np.concatenate(lens)).to(torch.int64)

    run, lengths = generated(chain, plan)
    assert p_value(run, exact_law(chain, run.tables)) > LEAST_P
    if cost is not None:
        assert {"gain", "no_gain", "probe", "explore"} & reasons
        assert len(set(lengths)) > 1
