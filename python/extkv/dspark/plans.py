"""What planners return: lengths, reports, decisions. Plain records, nothing native."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv import _extkv

    Int32Array = npt.NDArray[np.int32]

__all__ = [
    "Decision",
    "DecisionReason",
    "DraftBudget",
    "Prediction",
    "SpeculationStats",
    "StepReport",
    "VerifyPlan",
]


class Prediction(NamedTuple):
    """What a cost table says: time, expected tokens, and gain over a step without drafts."""

    step_us: float
    num_tokens: float
    gain: float


def _prediction(found: tuple[float, float, float] | None) -> Prediction | None:
    return None if found is None else Prediction(*found)


@dataclass(frozen=True, eq=False)
class VerifyPlan:
    """How many drafts each of R requests verifies, and what that should bring.

    A trim is requested in drafts and lands in tokens that do not run: graphs come in tiers.

    Attributes:
        verify_lens (int32, [R]): Drafts verified, besides the one token that always is.
        num_available: Drafts that could have been verified.
        num_admitted: Drafts verified.
        num_executed_tokens: Tokens that run, padding included.
        num_padding_tokens: Tokens that run and compute nothing: lost to tier rounding.
        requested_trim: Drafts left out.
        landed_trim: Tokens that do not run because of it.
        prediction: What the cost table says; None without one.
    """

    verify_lens: Int32Array
    num_available: int
    num_admitted: int
    num_executed_tokens: int
    num_padding_tokens: int
    requested_trim: int
    landed_trim: int
    prediction: Prediction | None

    @classmethod
    def of_native(cls, native: _extkv.VerifyPlan) -> VerifyPlan:
        """Wrap a native plan; the array views its copy."""
        return cls(
            verify_lens=np.frombuffer(native.verify_lens, np.int32),
            num_available=native.num_available,
            num_admitted=native.num_admitted,
            num_executed_tokens=native.num_executed_tokens,
            num_padding_tokens=native.num_padding_tokens,
            requested_trim=native.requested_trim,
            landed_trim=native.landed_trim,
            prediction=_prediction(native.prediction),
        )


class DraftBudget(NamedTuple):
    """How many drafts a step verifies in all, and whether the predicted gain suffices."""

    num_drafts: int
    prediction: Prediction
    is_worthwhile: bool


class DecisionReason(str, enum.Enum):
    """Why a step drafts or does not."""

    STATIC = "static"
    """The planner needs no decision."""
    NO_COST_TABLE = "no_cost_table"
    """Everything is verified."""
    GAIN = "gain"
    """Drafting should pay."""
    NO_GAIN = "no_gain"
    """Fallback: drafting should not pay."""
    PROBE = "probe"
    """Tried again although it should not pay."""
    EXPLORE = "explore"
    """A step of another shape, to keep the parts of the cost apart."""
    NOTHING_TO_DRAFT = "nothing_to_draft"
    """No requests, or no room for drafts."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Decision:
    """What to do in a step, from history alone.

    Attributes:
        drafts: Whether to run the draft pass.
        budget: Most drafts to verify in all, where that is fixed before they are drawn.
        num_executed_tokens: Tokens that run at most: the graph to prepare.
        reason: Why.
        expected: What drafting should bring at best.
    """

    drafts: bool
    budget: int | None
    num_executed_tokens: int | None
    reason: DecisionReason
    expected: Prediction | None

    @classmethod
    def of_native(cls, native: _extkv.Decision) -> Decision:
        """Wrap a native decision."""
        return cls(
            drafts=native.drafts,
            budget=native.budget,
            num_executed_tokens=native.num_executed_tokens,
            reason=DecisionReason(native.reason),
            expected=_prediction(native.expected),
        )


@dataclass(frozen=True)
class StepReport:
    """What a step was planned to be and what it was.

    Attributes:
        step_id: The step.
        reason: Why it drafted or did not.
        num_admitted: Drafts verified.
        num_padding_tokens: Tokens lost to tier rounding.
        requested_trim: Drafts left out.
        landed_trim: Tokens that did not run because of it.
        prediction: What the plan should have brought.
        predicted_us: Predicted time of the step as run.
        measured_us: Measured time, if given.
        num_accepted: Drafts accepted.
        num_tokens: Tokens that the step yielded.
    """

    step_id: int
    reason: DecisionReason
    num_admitted: int
    num_padding_tokens: int
    requested_trim: int
    landed_trim: int
    prediction: Prediction | None
    predicted_us: float | None
    measured_us: float | None
    num_accepted: int
    num_tokens: int

    @classmethod
    def of_native(cls, native: _extkv.StepReport) -> StepReport:
        """Wrap a native report."""
        return cls(
            step_id=native.step_id,
            reason=DecisionReason(native.reason),
            num_admitted=native.num_admitted,
            num_padding_tokens=native.num_padding_tokens,
            requested_trim=native.requested_trim,
            landed_trim=native.landed_trim,
            prediction=_prediction(native.prediction),
            predicted_us=native.predicted_us,
            measured_us=native.measured_us,
            num_accepted=native.num_accepted,
            num_tokens=native.num_tokens,
        )


@dataclass(frozen=True)
class SpeculationStats:
    """Counters since the start.

    Attributes:
        num_steps: Steps observed.
        num_drafting_steps: Steps that drafted.
        num_fallbacks: Times that drafting was given up.
        num_returns: Times that it was taken up again.
        num_probes: Probes while given up.
        num_verified: Drafts verified.
        num_accepted: Drafts accepted.
        requested_trim: Drafts left out.
        landed_trim: Tokens that did not run because of it.
        num_padding_tokens: Tokens that ran and computed nothing.
    """

    num_steps: int
    num_drafting_steps: int
    num_fallbacks: int
    num_returns: int
    num_probes: int
    num_verified: int
    num_accepted: int
    requested_trim: int
    landed_trim: int
    num_padding_tokens: int
