"""How many drafts each request verifies: what an engine asks, and the schedule that never changes.

A round is what the engine drafts after a step and verifies in the next one. Its life, in order:
`decide` before the draft pass, `lens` when the step's tokens are known, `start` when the next step
is launched, `observe` when that step's tokens are known. With asynchronous scheduling `decide` of a
round comes between `start` and `observe` of the round before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from extkv.dspark.plans import Decision, DecisionReason
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]
    BoolArray = npt.NDArray[np.bool_]

__all__ = ["DraftRound", "DraftSignals", "FixedSchedule", "Judgement", "VerifySchedule"]


@dataclass(frozen=True, eq=False)
class DraftRound:
    """The R requests that a step samples, which may be drafted for.

    Attributes:
        number: Rises from round to round.
        request_ids (int64, [R]): The requests.
        slots (int32, [R]): Their slots in the persistent batch.
        generations (uint32, [R]): The slots' generations.
        limits (int32, [R]): Most drafts that each may verify.
        num_other_tokens: Tokens that rows of prompts should add to the step that verifies.
        num_context_tokens: Tokens of all requests together.
    """

    number: int
    request_ids: npt.NDArray[np.int64]
    slots: Int32Array
    generations: npt.NDArray[np.uint32]
    limits: Int32Array
    num_other_tokens: int
    num_context_tokens: int


class DraftSignals(Protocol):
    """What the draft pass says about its drafts, on its way to the host."""

    def head_logits(self) -> Float32Array | None:
        """Wait for the logits of the confidence head ([R, K]); None if they are not computed."""

    def margins(self) -> Float32Array | None:
        """Wait for the differences of the two largest base logits ([R, K]), or None."""


@dataclass(frozen=True)
class Judgement:
    """What a schedule thought of a round.

    Attributes:
        decision: What it decided before the draft pass.
        predicted_us: Predicted time of the step as run; None without a cost table.
        predicted_gain: Predicted gain of the plan over no drafts; None without a cost table.
    """

    decision: Decision
    predicted_us: float | None = None
    predicted_gain: float | None = None


class VerifySchedule(Protocol):
    """Says per round whether to draft and how many drafts to verify."""

    @property
    def waits(self) -> bool:
        """Whether `lens` of the newest round will wait for the draft pass."""

    def decide(self, draft_round: DraftRound) -> Decision:
        """Decide whether to run the draft pass for a round, from history alone."""

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return how many drafts of each request of the newest round to verify ([R]).

        Args:
            is_alive ([R]): Requests that have not ended in the step before.
            signals: What the draft pass says; None if it did not run.
        """

    def start(self) -> None:
        """Note that the step that verifies the newest round was launched."""

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """End the round that was started, and learn.

        Args:
            num_verified ([R]): Drafts that were verified.
            num_accepted ([R]): Those accepted.
            measured_us: What the step took; None where that is not typical.
        """

    def reset(self) -> None:
        """Give up the rounds that are not observed."""


def _static_decision(*, drafts: bool) -> Decision:
    """Return the decision of a schedule that does not plan."""
    return Decision(drafts, None, None, DecisionReason.STATIC, None)


class StaticSchedule:
    """Decide without looking at signals, and learn nothing."""

    waits = False

    def __init__(self) -> None:
        """Begin with no drafts."""
        self._newest = self._running = _static_decision(drafts=False)
        self._limits = np.zeros(0, np.int32)

    def _decide(self, draft_round: DraftRound, verify_len: int, *, drafts: bool) -> Decision:
        """Note and return a decision: so many drafts of every request, up to their limits."""
        self._limits = np.minimum(draft_round.limits, verify_len).astype(np.int32)
        self._newest = _static_decision(drafts=drafts)
        return self._newest

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return the same number for all, up to their limits."""
        del signals
        return np.where(is_alive, self._limits, 0).astype(np.int32)

    def start(self) -> None:
        """Note the decision."""
        self._running = self._newest

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """Return the decision; nothing is learnt."""
        del num_verified, num_accepted, measured_us
        return Judgement(self._running)

    def reset(self) -> None:
        """Forget nothing: there is nothing."""


class FixedSchedule(StaticSchedule):
    """The same number of drafts of every request; with 0 the draft pass does not run."""

    def __init__(self, num_drafts: int, verify_len: int | None = None) -> None:
        """Make a schedule.

        Args:
            num_drafts: Drafts of a request.
            verify_len: How many of them to verify; None for all.

        Raises:
            InvalidArgumentError: If there are not so many.
        """
        super().__init__()
        self.num_drafts = num_drafts
        self._verify_len = num_drafts
        self.verify_len = num_drafts if verify_len is None else verify_len

    @property
    def verify_len(self) -> int:
        """Drafts to verify of every request; may be set between two steps."""
        return self._verify_len

    @verify_len.setter
    def verify_len(self, length: int) -> None:
        if not 0 <= length <= self.num_drafts:
            raise InvalidArgumentError(
                f"fixed_verify_len is {length}, each request has {self.num_drafts} drafts"
            )
        self._verify_len = length

    def decide(self, draft_round: DraftRound) -> Decision:
        """Draft unless nothing is to be verified."""
        return self._decide(draft_round, self._verify_len, drafts=self._verify_len > 0)
