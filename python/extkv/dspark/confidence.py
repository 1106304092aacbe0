"""Where confidences come from: the drafter's head, a fitted model, or rates of acceptance.

Each is a function of history and of what the draft pass knew before it drew the draft in question,
never of that draft or a later one; see docs/dspark-scheduling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from extkv import _extkv
from extkv.dspark.arrays import buffer_of
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
        self._native = _extkv.AcceptanceRates(num_slots, num_drafts)
        self._num_drafts = num_drafts

    @property
    def rates(self) -> Float64Array:
        """Chance of each position once those before it are accepted (float64, [K])."""
        return np.array(self._native.rates())

    def of_round(self, draft_round: DraftRound, signals: DraftSignals | None) -> Float32Array:
        """Return the rates, scaled for each request."""
        del signals
        found = self._native.confidences(*_occupants(draft_round))
        return np.frombuffer(found, np.float32).reshape(-1, self._num_drafts)

    def observe(
        self, draft_round: DraftRound, num_verified: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Count each draft that was verified and whose predecessors were accepted."""
        row = draft_round.slots.shape
        self._native.observe(
            *_occupants(draft_round),
            buffer_of("num_verified", num_verified, np.uint32, row),
            buffer_of("num_accepted", num_accepted, np.uint32, row),
        )

    def reset(self) -> None:
        """Forget nothing: rounds leave something when they are observed."""


def _occupants(draft_round: DraftRound) -> tuple[bytes, bytes]:
    row = draft_round.slots.shape
    return (
        buffer_of("slots", draft_round.slots, np.uint32, row),
        buffer_of("generations", draft_round.generations, np.uint32, row),
    )


def _required(signals: DraftSignals | None, name: Literal["head", "margin"]) -> Float32Array:
    found = None
    if signals is not None:
        found = signals.head_logits() if name == "head" else signals.margins()
    if found is None:
        raise InvalidArgumentError(f"the draft pass computes no {name} for confidences")
    return found
