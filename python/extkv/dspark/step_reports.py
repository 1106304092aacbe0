"""What became of each round of drafts: decision, trims, padding, times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extkv.dspark.plans import DecisionReason

__all__ = ["SpeculationReport"]


@dataclass(frozen=True)
class SpeculationReport:
    """One step, seen from the drafts it verified or did without.

    A trim is requested in drafts and lands in tokens that do not run, since graphs come in tiers.

    Attributes:
        step_id: The scheduler's step.
        reason: Why it was drafted for or not.
        has_drafted: Whether the draft pass ran for it.
        num_requests: Requests that decoded.
        num_other_tokens: Tokens of prompts beside them.
        budget: Most drafts to verify in all, where that was fixed before they were drawn.
        num_available: Drafts that could have been verified.
        num_verified: Drafts verified.
        num_accepted: Drafts accepted.
        num_executed_tokens: Tokens that ran, padding included.
        num_padding_tokens: Tokens that ran and computed nothing: lost to tier rounding.
        requested_trim: Drafts left out.
        landed_trim: Tokens that did not run because of it.
        predicted_us: Predicted time; None without a cost table.
        predicted_gain: Predicted gain of the plan over no drafts; None without a cost table.
        measured_us: Measured time from the end of the verification before: draft pass, gaps of the
            host, the target's pass, verification.
        is_typical: Whether the time was used to correct the costs: the step was the one decided on,
            its shape had run before, and the host did not pause.
    """

    step_id: int
    reason: DecisionReason
    has_drafted: bool
    num_requests: int
    num_other_tokens: int
    budget: int | None
    num_available: int
    num_verified: int
    num_accepted: int
    num_executed_tokens: int
    num_padding_tokens: int
    requested_trim: int
    landed_trim: int
    predicted_us: float | None
    predicted_gain: float | None
    measured_us: float
    is_typical: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that the step yielded: accepted drafts, and one per request."""
        return self.num_requests + self.num_accepted

    @property
    def accepted_length(self) -> float:
        """Tokens per request."""
        return self.num_tokens / self.num_requests if self.num_requests else 0.0
