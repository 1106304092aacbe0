"""Confidences from a logistic model fitted online: a trained head, a logit margin, or both.

Every feature of draft ``j`` must be a function of the drafts before ``j``. The head's logit is, and
the difference of the two largest draft logits is; the logit of the *drawn* token is not, and would
make verification inexact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from extkv import _extkv
from extkv.dspark.arrays import buffer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]

__all__ = ["AcceptanceModel", "Feature", "Features", "Refit"]

Feature = Literal["head", "margin", "request_temperature", "position"]


@dataclass(frozen=True, eq=False)
class Features:
    """What is known about the drafts of R requests before they are verified.

    Attributes:
        num_requests: R.
        head_logits (float32, [R, K]): Logits of the confidence head.
        margins (float32, [R, K]): Largest minus second largest draft logit.
        request_temperatures (float32, [R]): Sampling temperatures.
    """

    num_requests: int
    head_logits: npt.ArrayLike | None = None
    margins: npt.ArrayLike | None = None
    request_temperatures: npt.ArrayLike | None = None


class Refit(NamedTuple):
    """What a fit did; losses are means in nats."""

    num_trials: int
    num_iterations: int
    loss_before: float
    loss_after: float


class AcceptanceModel:
    """A logistic model of acceptance that follows its drafter."""

    __slots__ = ("_native", "_num_drafts")

    def __init__(
        self,
        num_drafts: int,
        features: Sequence[Feature],
        *,
        capacity: int = 4096,
        min_num_trials: int = 200,
        refit_interval: int = 100,
        ridge: float = 1.0,
    ) -> None:
        """Make a model that says what the head says, or that drafts are likely accepted.

        Args:
            num_drafts: K.
            features: What it looks at, besides an intercept.
            capacity: Trials kept; older ones are forgotten.
            min_num_trials: Least trials before the first fit.
            refit_interval: Steps between two fits by `end_step`.
            ridge: Weight of the prior.

        Raises:
            SpeculationError: If a setting is out of range or a feature is not known.
        """
        self._num_drafts = num_drafts
        self._native = _extkv.AcceptanceModel(
            num_drafts=num_drafts,
            features=list(features),
            capacity=capacity,
            min_num_trials=min_num_trials,
            refit_interval=refit_interval,
            ridge=ridge,
        )

    def confidences(self, features: Features) -> Float32Array:
        """Return the confidence of each draft (float32, [R, K]).

        Raises:
            SpeculationError: If a feature is missing or has the wrong shape.
        """
        found = self._native.confidences(features.num_requests, self._buffers(features))
        return np.frombuffer(found, np.float32).reshape(features.num_requests, self._num_drafts)

    def observe(
        self, features: Features, num_verified: npt.ArrayLike, num_accepted: npt.ArrayLike
    ) -> None:
        """Remember what came of drafts (uint32, [R] each).

        Give as verified only what counts: up to an accepted end of sequence.

        Raises:
            SpeculationError: If shapes differ, or more is accepted than verified.
        """
        row = (features.num_requests,)
        self._native.observe(
            features.num_requests,
            self._buffers(features),
            buffer_of("num_verified", num_verified, np.uint32, row),
            buffer_of("num_accepted", num_accepted, np.uint32, row),
        )

    def end_step(self) -> Refit | None:
        """Count a step, and fit every `refit_interval` of them."""
        return self._refit(self._native.end_step())

    def refit(self) -> Refit | None:
        """Fit the trials kept; None with too few of them."""
        return self._refit(self._native.refit())

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Intercept, head, margin, request temperature, position."""
        return tuple(self._native.coefficients())

    @property
    def num_trials(self) -> int:
        """Trials kept."""
        return self._native.num_trials()

    @staticmethod
    def _refit(found: tuple[int, int, float, float] | None) -> Refit | None:
        return None if found is None else Refit(*found)

    def _buffers(self, features: Features) -> tuple[bytes | None, bytes | None, bytes | None]:
        cells = (features.num_requests, self._num_drafts)

        def buffer(name: str, values: npt.ArrayLike | None, shape: tuple[int, ...]) -> bytes | None:
            return None if values is None else buffer_of(name, values, np.float32, shape)

        return (
            buffer("head_logits", features.head_logits, cells),
            buffer("margins", features.margins, cells),
            buffer("request_temperatures", features.request_temperatures, cells[:1]),
        )
