"""One rank decides how many drafts to verify, the others follow.

Float sums differ in the last bit between machines, and clocks differ anyway, so two ranks that
decide for themselves part sooner or later: one runs a draft pass or a graph that the other does
not, and collectives hang. What is sent is small: two numbers before the draft pass, and a number
per request after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from extkv.dspark.plans import Decision, DecisionReason
from extkv.dspark.schedule import Judgement
from extkv.errors import RankError

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.dspark.schedule import DraftRound, DraftSignals, VerifySchedule

    Int32Array = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]

__all__ = ["Broadcast", "SharedSchedule"]

_REASONS = list(DecisionReason)
_NO_BUDGET = -1


class Broadcast(Protocol):
    """Sends numbers from rank 0 to all ranks, which call it in the same order."""

    def __call__(self, values: Int32Array | None, size: int) -> Int32Array:
        """Return rank 0's numbers.

        Args:
            values (int32, [size]): The numbers on rank 0; None on the others.
            size: How many there are.
        """


class SharedSchedule:
    """The schedule of rank 0 on every rank."""

    def __init__(self, own: VerifySchedule | None, broadcast: Broadcast) -> None:
        """Take rank 0's schedule, or none on the other ranks.

        Args:
            own: Decides on rank 0; None elsewhere.
            broadcast: Joins the ranks.
        """
        self._own = own
        self._broadcast = broadcast
        self._newest = self._running = Decision(False, None, None, DecisionReason.STATIC, None)
        self._limits = np.zeros(0, np.int32)

    @property
    def waits(self) -> bool:
        """Whether this rank waits for its draft pass; the others wait for rank 0."""
        return self._own is not None and self._own.waits

    def decide(self, draft_round: DraftRound) -> Decision:
        """Return what rank 0 decides."""
        self._limits = draft_round.limits
        values = None
        if self._own is not None:
            decision = self._own.decide(draft_round)
            budget = _NO_BUDGET if decision.budget is None else decision.budget
            drafts, reason = int(decision.drafts), _REASONS.index(decision.reason)
            values = np.array([drafts, budget, reason], np.int32)
        drafts, budget, reason = self._broadcast(values, 3).tolist()
        self._newest = Decision(
            bool(drafts),
            None if budget == _NO_BUDGET else budget,
            None,
            _REASONS[reason],
            None,
        )
        return self._newest

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return what rank 0 plans.

        Raises:
            RankError: If a length is more than this rank's limit: the ranks' steps differ.
        """
        values = None if self._own is None else self._own.lens(is_alive, signals)
        lens = self._broadcast(values, len(is_alive))
        if lens.shape != is_alive.shape or (lens > np.where(is_alive, self._limits, 0)).any():
            raise RankError(
                f"rank 0 verifies {lens.tolist()} drafts, this rank may verify at most "
                f"{np.where(is_alive, self._limits, 0).tolist()}: the ranks' steps differ"
            )
        return lens

    def start(self) -> None:
        """Start the round on rank 0."""
        self._running = self._newest
        if self._own is not None:
            self._own.start()

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """Let rank 0 learn; the others know the decision only."""
        if self._own is not None:
            return self._own.observe(num_verified, num_accepted, measured_us)
        return Judgement(self._running)

    def reset(self) -> None:
        """Give up rank 0's rounds."""
        if self._own is not None:
            self._own.reset()
