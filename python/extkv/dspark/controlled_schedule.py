"""Verify lengths by a `SpeculationController`: budgets from history, shared out by confidence.

Where a decision says all drafts or none, the lengths are known and the host goes on; the
confidences are read when they are there. For a number in between the host waits for the draft pass,
whose last result they are, and only then plans the step: the price is the host's work for a step,
some hundred microseconds, which would else hide behind the draft pass. Confidences that are
history, as `AcceptanceRates`, cost no wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from extkv.dspark.plans import DecisionReason
from extkv.dspark.schedule import Judgement

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.dspark.confidence import Confidences
    from extkv.dspark.planning import SpeculationController
    from extkv.dspark.plans import Decision, VerifyPlan
    from extkv.dspark.schedule import DraftRound, DraftSignals

    Int32Array = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]

__all__ = ["ControlledSchedule"]

# A draft without any confidence is planned as one of nearly none, so that "all" means all: the
# product over a block must stay above what float32 takes for 0.
_LEAST_CONFIDENCE, _LEAST_SURVIVAL, _CERTAIN = 1e-3, 1e-30, np.float32(1.0)
_EVERYTHING = (DecisionReason.STATIC, DecisionReason.NO_COST_TABLE)


@dataclass(eq=False)
class _Round:
    """A round from its decision to its outcome."""

    draft_round: DraftRound
    decision: Decision
    is_alive: BoolArray
    all_alive: bool = True
    signals: DraftSignals | None = None
    plan: VerifyPlan | None = None


class ControlledSchedule:
    """A controller, fed with an engine's rounds."""

    def __init__(
        self,
        controller: SpeculationController,
        confidences: Confidences,
        *,
        has_free_budget: bool = False,
    ) -> None:
        """Join a controller and a source of confidences.

        Args:
            controller: With room for two steps in flight (a lag of 2).
            confidences: Where confidences come from.
            has_free_budget: Whether the number of drafts is known after the draft pass only, as of
                Algorithm 1.
        """
        self.controller = controller
        self._confidences = confidences
        self._has_free_budget = has_free_budget
        self._newest: _Round | None = None
        self._running: _Round | None = None

    @property
    def waits(self) -> bool:
        """Whether confidences of the newest round decide, and come from the draft pass."""
        newest = self._newest
        return (
            newest is not None
            and newest.decision.drafts
            and self._confidences.needs_signals
            and self._known_lens(newest) is None
        )

    def decide(self, draft_round: DraftRound) -> Decision:
        """Decide from history."""
        decision = self.controller.decide(
            draft_round.number,
            draft_round.slots,
            draft_round.generations,
            num_other_tokens=draft_round.num_other_tokens,
            num_context_tokens=draft_round.num_context_tokens,
            limits=draft_round.limits,
        )
        is_alive = np.ones(len(draft_round.slots), np.bool_)
        self._newest = _Round(draft_round, decision, is_alive)
        return decision

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return the lengths, which the confidences decide where the budget leaves a choice."""
        newest = self._newest
        assert newest is not None
        newest.is_alive, newest.signals = is_alive, signals
        newest.all_alive = bool(is_alive.all())
        if not newest.decision.drafts:
            return np.zeros(len(is_alive), np.int32)
        known = self._known_lens(newest)
        if known is not None and self._confidences.needs_signals:
            return known
        plan = newest.plan = self._plan(newest)
        lens = plan.verify_lens
        return lens if newest.all_alive else np.where(is_alive, lens, 0).astype(np.int32)

    def start(self) -> None:
        """Plan what needed no confidences: the controller learns from them all the same."""
        running = self._running = self._newest
        self._newest = None
        if running is not None and running.decision.drafts and running.plan is None:
            running.plan = self._plan(running)

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """Tell the controller and the source what came of the round."""
        running = self._running
        assert running is not None
        self._running = None
        accepted = num_accepted if running.decision.drafts else ()
        report = self.controller.observe(accepted, measured_us)
        if running.decision.drafts:
            self._confidences.observe(running.draft_round, num_verified, num_accepted)
        gain = None if report.prediction is None else report.prediction.gain
        return Judgement(running.decision, report.predicted_us, gain)

    def reset(self) -> None:
        """Give up the rounds in flight."""
        while self.controller.cancel_newest_step() is not None:
            pass
        self._newest = self._running = None
        self._confidences.reset()

    def _known_lens(self, found: _Round) -> Int32Array | None:
        """Return the lengths if no confidence can change them."""
        lens = found.draft_round.limits
        if not found.all_alive:
            lens = np.where(found.is_alive, lens, 0).astype(np.int32)
        most = int(lens.sum())
        if found.decision.reason in _EVERYTHING or most == 0:
            return lens
        budget = found.decision.budget
        if self._has_free_budget or budget is None:
            return None
        if budget == 0:
            return np.zeros_like(lens)
        return lens if budget >= most else None

    def _plan(self, found: _Round) -> VerifyPlan:
        given = self._confidences.of_round(found.draft_round, found.signals)
        least = np.float32(max(_LEAST_CONFIDENCE, _LEAST_SURVIVAL ** (1 / given.shape[1])))
        # The larger of two numbers of which one is NaN is the other one.
        confidences = np.minimum(np.fmax(given, least), _CERTAIN)
        if not found.all_alive:
            confidences[~found.is_alive] = 0.0
        return self.controller.plan(confidences)
