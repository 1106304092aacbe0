"""What confidences promised and what came of it, in bins: the numbers of a reliability diagram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from extkv.dspark.calibration import Temperatures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.dspark.calibration import Rounds

NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """Rounds whose promised survival is about the same.

    Attributes:
        promised: Mean of their survivals.
        observed: Share of them in which all drafts up to the position were accepted.
        num_rounds: How many there are.
    """

    promised: float
    observed: float
    num_rounds: int


def measure_temperatures(rounds: Rounds, temperatures: Temperatures) -> dict[str, list[Any]]:
    """Return how true confidences are with some temperatures, and without any.

    Returns:
        One element per position under the names of `TemperatureFit`: `temperature`, `num_rounds`,
        `accepted_ratio`, `mean_before`, `mean_after`, `ece_before`, `ece_after`.

    Raises:
        SpeculationError: If there are more drafts than temperatures.
    """
    used = temperatures.of_first(rounds.num_drafts)
    neutral = Temperatures(np.ones(rounds.num_drafts))
    found: dict[str, list[Any]] = {"temperature": used.values.tolist()}
    for suffix, chosen in (("before", neutral), ("after", used)):
        positions = reliability(rounds, chosen)
        found["num_rounds"] = [sum(one.num_rounds for one in bins) for bins in positions]
        found["accepted_ratio"] = [_mean(bins, "observed") for bins in positions]
        found[f"mean_{suffix}"] = [_mean(bins, "promised") for bins in positions]
        found[f"ece_{suffix}"] = [calibration_error(bins) for bins in positions]
    return found


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Return the expected calibration error of bins: mean distance of promised and observed."""
    total = sum(one.num_rounds for one in bins)
    gaps = (one.num_rounds * abs(one.promised - one.observed) for one in bins)
    return sum(gaps) / total if total else 0.0


def _mean(bins: Sequence[ReliabilityBin], name: str) -> float:
    total = sum(one.num_rounds for one in bins)
    return sum(one.num_rounds * getattr(one, name) for one in bins) / total if total else 0.0


def reliability(
    rounds: Rounds, temperatures: Temperatures, num_bins: int = NUM_BINS
) -> list[list[ReliabilityBin]]:
    """Return the bins of each position that hold rounds, by rising promise.

    A round counts at a position unless an accepted end of sequence stands before it. Bins are of
    equal width, as those of the calibration error.

    Raises:
        SpeculationError: If there are more drafts than temperatures.
    """
    confidences = temperatures.of_first(rounds.num_drafts).confidences(rounds.logits)
    survival = np.cumprod(confidences.astype(np.float64), axis=1)
    accepted = np.asarray(rounds.num_accepted, np.int64)
    ends = np.full(len(accepted), -1) if rounds.ends is None else np.asarray(rounds.ends)
    counted = np.where(ends < 0, rounds.num_drafts, ends + 1)
    found = []
    for position in range(rounds.num_drafts):
        rows = counted > position
        promised, outcome = survival[rows, position], accepted[rows] > position
        places = np.minimum((promised * num_bins).astype(np.int64), num_bins - 1)
        found.append(
            [
                ReliabilityBin(
                    float(promised[places == place].mean()),
                    float(outcome[places == place].mean()),
                    int((places == place).sum()),
                )
                for place in np.unique(places)
            ]
        )
    return found
