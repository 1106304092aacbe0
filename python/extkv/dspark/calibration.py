"""Temperatures that make confidences mean what they say: offline fit, files, online variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from extkv import _extkv
from extkv.dspark.arrays import buffer_of
from extkv.errors import CalibrationError

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]
    Int32Array = npt.NDArray[np.int32]

__all__ = [
    "FitSettings",
    "OnlineSettings",
    "OnlineTemperatures",
    "Rounds",
    "TemperatureFit",
    "Temperatures",
    "check_pairing",
    "fit_temperatures",
]


class Temperatures:
    """One temperature per draft position.

    Example:
        >>> Temperatures([2.0, 1.0]).confidences([[0.0, 0.0]]).tolist()
        [[0.5, 0.5]]
    """

    __slots__ = ("native",)

    def __init__(self, values: npt.ArrayLike) -> None:
        """Take temperatures of positions 1 to K.

        Raises:
            CalibrationError: If there are none, or one is not finite and above 0.
        """
        self.native = _extkv.Temperatures(np.asarray(values, np.float64).ravel().tolist())

    @classmethod
    def from_json(cls, text: str) -> Temperatures:
        """Read a file of SGLang (`temperatures`), TensorRT-LLM (`sts_temperatures`) or extkv.

        Raises:
            CalibrationError: If the text holds neither list, or two that differ.
        """
        return cls._of(_extkv.Temperatures.from_json(text))

    @classmethod
    def load(cls, path: str | Path) -> Temperatures:
        """Read a temperature file.

        Raises:
            CalibrationError: If the file cannot be read or holds no temperatures.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"cannot read the temperatures {path}: {error}") from error

    @classmethod
    def _of(cls, native: _extkv.Temperatures) -> Temperatures:
        temperatures = cls.__new__(cls)
        temperatures.native = native
        return temperatures

    @property
    def values(self) -> Float32Array:
        """Temperatures of positions 1 to K (float32, [K])."""
        return np.frombuffer(self.native.values, np.float32)

    def of_first(self, num_drafts: int) -> Temperatures:
        """Return the first temperatures, for a drafter that draws fewer.

        Raises:
            CalibrationError: If there are fewer.
        """
        return self._of(self.native.of_first(num_drafts))

    def confidences(self, logits: npt.ArrayLike) -> Float32Array:
        """Return ``sigmoid(logit / T)`` of logits (float32, [R, K]); NaN gives 0.

        Raises:
            SpeculationError: If the shape is not [R, K].
        """
        cells = np.asarray(logits, np.float32)
        shape = (len(cells), self.values.size)
        found = self.native.confidences(buffer_of("logits", cells, np.float32, shape))
        return np.frombuffer(found, np.float32).reshape(shape)


@dataclass(frozen=True, eq=False)
class Rounds:
    """Verified rounds: N rounds of K drafts.

    Attributes:
        request_ids (uint64, [N]): Request of each round.
        logits_steps (uint64, [N]): Step that drew the drafts, as noted beside the logits.
        outcome_steps (uint64, [N]): Step that the outcome is of, as noted beside the outcome.
        logits (float32, [N, K]): Logits of the confidence head before any temperature.
        num_verified (uint32, [N]): Drafts verified; K for the offline fit.
        num_accepted (uint32, [N]): Drafts accepted: the first ones.
        ends (int32, [N]): Index of an accepted end of sequence, or -1; None for none at all.
    """

    request_ids: npt.ArrayLike
    logits_steps: npt.ArrayLike
    outcome_steps: npt.ArrayLike
    logits: npt.ArrayLike
    num_verified: npt.ArrayLike
    num_accepted: npt.ArrayLike
    ends: npt.ArrayLike | None = None

    @property
    def num_drafts(self) -> int:
        """K."""
        shape = np.shape(self.logits)
        return int(shape[1]) if len(shape) == 2 else 0  # noqa: PLR2004

    def _buffers(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        count = len(np.asarray(self.request_ids))
        row = (count,)
        ends = np.full(count, -1, np.int32) if self.ends is None else self.ends
        return (
            buffer_of("request_ids", self.request_ids, np.uint64, row),
            buffer_of("logits_steps", self.logits_steps, np.uint64, row),
            buffer_of("outcome_steps", self.outcome_steps, np.uint64, row),
            buffer_of("logits", self.logits, np.float32, (count, self.num_drafts)),
            buffer_of("num_verified", self.num_verified, np.uint32, row),
            buffer_of("num_accepted", self.num_accepted, np.uint32, row),
            buffer_of("ends", ends, np.int32, row),
        )


@dataclass(frozen=True)
class FitSettings:
    """Grid, bins and least data of the offline fit.

    Attributes:
        min_temperature: Lowest temperature tried.
        max_temperature: Highest temperature tried.
        num_temperatures: Temperatures tried, equally far apart on a logarithmic scale.
        num_bins: Equal-width bins of the calibration error.
        min_num_rounds: Least number of rounds at every position.
    """

    min_temperature: float = 0.1
    max_temperature: float = 10.0
    num_temperatures: int = 41
    num_bins: int = 15
    min_num_rounds: int = 1000


@dataclass(frozen=True, eq=False)
class TemperatureFit:
    """Fitted temperatures and how much they helped, by position.

    Attributes:
        temperatures: The temperatures.
        json: The file, which SGLang and TensorRT-LLM read too.
        num_rounds: Rounds given.
        ece_before (float64, [K]): Calibration error of the survival with temperatures of 1.
        ece_after (float64, [K]): The same with the fitted ones.
        accepted_ratio (float64, [K]): Share of rounds with all drafts up to here accepted.
        mean_before (float64, [K]): Mean survival before.
        mean_after (float64, [K]): Mean survival after.
        num_rounds_by_position (int32, [K]): Rounds not ended before.
    """

    temperatures: Temperatures
    json: str
    num_rounds: int
    ece_before: Float64Array
    ece_after: Float64Array
    accepted_ratio: Float64Array
    mean_before: Float64Array
    mean_after: Float64Array
    num_rounds_by_position: Int32Array


def fit_temperatures(rounds: Rounds, settings: FitSettings | None = None) -> TemperatureFit:
    """Fit one temperature per position to rounds with whole blocks verified.

    Raises:
        CalibrationError: If rounds are trimmed, wrongly paired, or too few.
        SpeculationError: If the arrays do not fit each other.
    """
    settings = settings or FitSettings()
    grid = (settings.min_temperature, settings.max_temperature, settings.num_temperatures)
    fit = _extkv.fit_temperatures(
        rounds.num_drafts,
        rounds._buffers(),  # noqa: SLF001
        grid,
        settings.num_bins,
        settings.min_num_rounds,
    )
    return TemperatureFit(
        temperatures=Temperatures.from_json(fit.json),
        json=fit.json,
        num_rounds=fit.num_rounds,
        ece_before=np.frombuffer(fit.ece_before, np.float64),
        ece_after=np.frombuffer(fit.ece_after, np.float64),
        accepted_ratio=np.frombuffer(fit.accepted_ratio, np.float64),
        mean_before=np.frombuffer(fit.mean_before, np.float64),
        mean_after=np.frombuffer(fit.mean_after, np.float64),
        num_rounds_by_position=np.frombuffer(fit.num_rounds_by_position, np.int32),
    )


def check_pairing(rounds: Rounds) -> tuple[float | None, float | None, float | None]:
    """Check that first-draft logits fit their own round's outcome best.

    Returns:
        AUC against the round before, the same round and the round after of the same request; None
        where there are too few.

    Raises:
        CalibrationError: If a neighbouring round fits better: pairs are off by one.
    """
    before, own, after = _extkv.check_pairing(rounds.num_drafts, rounds._buffers())  # noqa: SLF001
    return before, own, after


@dataclass(frozen=True)
class OnlineSettings:
    """How fast to forget, and what to believe without data.

    Attributes:
        decay: Weight of a count one step later.
        prior_weight: Trials per position that the starting temperatures are worth.
        min_temperature: Lowest temperature tried.
        max_temperature: Highest temperature tried.
        num_temperatures: Temperatures tried.
    """

    decay: float = 0.999
    prior_weight: float = 64.0
    min_temperature: float = 0.125
    max_temperature: float = 8.0
    num_temperatures: int = 49


class OnlineTemperatures:
    """Temperatures that follow drift, from windows that may be trimmed.

    A position is a trial only if its prefix was accepted and it lies within the verified window.
    """

    __slots__ = ("_native",)

    def __init__(self, start: Temperatures, settings: OnlineSettings | None = None) -> None:
        """Start from temperatures.

        Raises:
            CalibrationError: If a setting is out of range.
        """
        chosen = settings or OnlineSettings()
        grid = (chosen.min_temperature, chosen.max_temperature, chosen.num_temperatures)
        self._native = _extkv.OnlineTemperatures(
            start.native, chosen.decay, chosen.prior_weight, grid
        )

    def observe_step(self, rounds: Rounds) -> None:
        """Forget a little, then count the rounds of one step.

        Raises:
            CalibrationError: If a round is wrongly paired or accepts past its window.
        """
        self._native.observe_step(rounds._buffers())  # noqa: SLF001

    def refit(self) -> Temperatures:
        """Choose the temperatures anew and return them."""
        return Temperatures._of(self._native.refit())  # noqa: SLF001

    @property
    def temperatures(self) -> Temperatures:
        """The temperatures of the last refit."""
        return Temperatures._of(self._native.temperatures())  # noqa: SLF001

    @property
    def num_trials(self) -> list[float]:
        """Trials by position, after forgetting."""
        return self._native.num_trials()
