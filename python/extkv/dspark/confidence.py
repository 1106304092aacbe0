"""Where confidences come from: the drafter's head, a fitted model, or rates of acceptance.

Each is a function of history and of what the draft pass knew before it drew the draft in question,
never of that draft or a later one; see docs/dspark-scheduling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from extkv.dspark.estimation import AcceptanceModel, Features
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.dspark.calibration import Temperatures
    from extkv.dspark.estimation import Feature
    from extkv.dspark.schedule import DraftRound, DraftSignals

    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]
    Int32Array = npt.NDArray[np.int32]

__all__ = ["AcceptanceRates", "Confidences", "FittedConfidences", "HeadConfidences"]

# Of all requests together: weight of the past per round, and what is believed before any round.
_RATE_DECAY = 0.99
_PRIOR_TRIALS = 16.0
_PRIOR_RATE = 0.8
# Of one request: its drafts change faster than all requests' together.
_REQUEST_DECAY = 0.9
_REQUEST_PRIOR = 4.0


class Confidences(Protocol):
    """Says how likely each draft is accepted if those before it are."""

    @property
    def needs_signals(self) -> bool:
        """Whether the draft pass must be awaited."""

    def of_round(self, draft_round: DraftRound, signals: DraftSignals | None) -> Float32Array:
        """Return the confidences of a round's drafts ([R, K])."""

    def observe(
        self, draft_round: DraftRound, num_verified: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Learn from the outcome of the oldest round not observed ([R] each)."""

    def reset(self) -> None:
        """Give up the rounds that are not observed."""


class HeadConfidences:
    """The drafter's confidence head, with a temperature per position."""

    needs_signals = True

    def __init__(self, temperatures: Temperatures) -> None:
        """Take the temperatures."""
        self._temperatures = temperatures

    def of_round(self, draft_round: DraftRound, signals: DraftSignals | None) -> Float32Array:
        """Return the head's probabilities."""
        del draft_round
        return self._temperatures.confidences(_required(signals, "head"))

    def observe(
        self, draft_round: DraftRound, num_verified: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Learn nothing."""

    def reset(self) -> None:
        """Forget nothing: there is nothing."""


class FittedConfidences:
    """A logistic model of the head's logits, the margins, or both, and of the position."""

    needs_signals = True

    def __init__(self, num_drafts: int, source: Literal["margin", "both"]) -> None:
        """Make a model that knows nothing yet."""
        self._source = source
        features: list[Feature] = ["margin", "position"]
        if source == "both":
            features = ["head", *features]
        self._model = AcceptanceModel(num_drafts, features)
        self._features: list[Features] = []

    def of_round(self, draft_round: DraftRound, signals: DraftSignals | None) -> Float32Array:
        """Return what the model says."""
        head = _required(signals, "head") if self._source == "both" else None
        features = Features(
            len(draft_round.slots), head_logits=head, margins=_required(signals, "margin")
        )
        self._features.append(features)
        return self._model.confidences(features)

    def observe(
        self, draft_round: DraftRound, num_verified: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Remember the outcome, and fit now and then."""
        del draft_round
        self._model.observe(self._features.pop(0), num_verified, num_accepted)
        self._model.end_step()

    def reset(self) -> None:
        """Forget the features without an outcome."""
        self._features.clear()


class AcceptanceRates:
    """Rates of acceptance per position, and how each request lately did compared with them.

    They work for any drafter, and are history: the host never waits for the draft pass.
    """

    needs_signals = False

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        """Start with likely drafts."""
        self._num_drafts = num_drafts
        self._trials: Float64Array = np.full(num_drafts, _PRIOR_TRIALS)
        self._accepted: Float64Array = np.full(num_drafts, _PRIOR_TRIALS * _PRIOR_RATE)
        self._generations = np.full(num_slots, -1, np.int64)
        # Per slot: accepted drafts, and those that the rates promised.
        self._of_slot: Float64Array = np.zeros((2, num_slots))

    @property
    def rates(self) -> Float64Array:
        """Chance of each position once those before it are accepted (float64, [K])."""
        return self._accepted / self._trials

    def of_round(self, draft_round: DraftRound, signals: DraftSignals | None) -> Float32Array:
        """Return the rates, scaled for each request."""
        del signals
        slots = draft_round.slots
        accepted, promised = self._of_slot[:, slots]
        scale = (accepted + _REQUEST_PRIOR) / (promised + _REQUEST_PRIOR)
        scale[self._generations[slots] != draft_round.generations] = 1.0
        likely: Float64Array = np.multiply.outer(scale, self.rates)
        likely = np.minimum(likely, 1.0)
        return likely.astype(np.float32)

    def observe(
        self, draft_round: DraftRound, num_verified: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Count each draft that was verified and whose predecessors were accepted."""
        slots, generations = draft_round.slots, draft_round.generations
        num_tried = np.minimum(num_verified, num_accepted + 1)
        promised = np.concatenate([[0.0], np.cumsum(self.rates)])
        kept = np.where(num_verified > 0, _REQUEST_DECAY, 1.0)
        kept[self._generations[slots] != generations] = 0.0
        self._generations[slots] = generations
        self._of_slot[0, slots] = kept * self._of_slot[0, slots] + num_accepted
        self._of_slot[1, slots] = kept * self._of_slot[1, slots] + promised[num_tried]
        if num_tried.any():
            prior = (1.0 - _RATE_DECAY) * _PRIOR_TRIALS
            self._trials = _RATE_DECAY * self._trials + self._reaching(num_tried) + prior
            accepted = self._reaching(num_accepted) + prior * _PRIOR_RATE
            self._accepted = _RATE_DECAY * self._accepted + accepted

    def _reaching(self, lens: Int32Array) -> npt.NDArray[np.int64]:
        """Return how many of the lengths go past each position ([K])."""
        counts = np.bincount(lens, minlength=self._num_drafts + 1)
        return counts[::-1].cumsum()[-2::-1]

    def reset(self) -> None:
        """Forget nothing: rounds leave something when they are observed."""


def _required(signals: DraftSignals | None, name: Literal["head", "margin"]) -> Float32Array:
    found = None
    if signals is not None:
        found = signals.head_logits() if name == "head" else signals.margins()
    if found is None:
        raise InvalidArgumentError(f"the draft pass computes no {name} for confidences")
    return found
