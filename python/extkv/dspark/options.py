"""What a user says about drafting; names and meanings are vLLM's `speculative_config`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from extkv.dspark.calibration import Temperatures
from extkv.dspark.cost import StepCost
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

DraftSampleMethod = Literal["probabilistic", "greedy"]
RejectionSampleMethod = Literal["standard", "block", "synthetic"]
VerificationMode = Literal["fixed", "scheduled"]
SchedulingPlanner = Literal["lagged", "greedy"]
ConfidenceSource = Literal["head", "margin", "both", "acceptance"]


@dataclass(frozen=True)
class SpeculativeOptions:
    """Say how to draft and verify.

    Attributes:
        method: ``"dspark"``.
        model: Directory of the drafter; None where `LLM(draft=…)` names it.
        num_speculative_tokens: Drafts per step, at most what the drafter was trained for; None for
            that many. The drafter always computes its whole block; fewer drafts are a prefix.
        draft_sample_method: ``"probabilistic"`` draws drafts at the request's temperature,
            ``"greedy"`` takes the likeliest token. Both leave the target's law as it is.
        rejection_sample_method: ``"standard"``, ``"block"`` (arXiv 2403.10444), or ``"synthetic"``,
            which accepts by `synthetic_acceptance_rates`: for benchmarks only, its output does not
            follow the target.
        synthetic_acceptance_rates: Chance that each draft is accepted once those before it are.
        verification: ``"fixed"`` verifies the same number of drafts of every request in every step;
            ``"scheduled"`` decides per step by what drafts are worth and what tokens cost, down to
            not drafting at all; see docs/dspark-scheduling.md.
        fixed_verify_len: Drafts to verify of every request; None for all. With 0 nothing is
            drafted, and the drafter's context is kept. Only for ``"fixed"``.
        step_cost: What a step costs: a `StepCost`, or the path of its file; None to measure it when
            the engine starts. Only for ``"scheduled"``, as is all that follows.
        planner: ``"lagged"`` fixes the number of drafts of a step by earlier steps and shares them
            out by confidence; ``"greedy"`` is Algorithm 1 of the paper.
        confidence: Where confidences come from: ``"head"`` is the drafter's own head, ``"margin"``
            the difference of the two largest base logits, ``"both"`` a model of the two that is
            fitted while the engine runs, ``"acceptance"`` rates per position and request, which
            need no head and never make the host wait. None for ``"head"`` where there is one, else
            ``"acceptance"``.
        confidence_temperatures: Temperatures of the head's logits: `Temperatures`, or the path of
            their file; None for 1.
        min_predicted_gain: Least gain to take drafting up again.
        probe_interval: Steps without drafts before one drafts to see whether it would pay.
        max_probe_interval: The longest such interval, after probes that found no gain; longer where
            a probe costs more than `max_probe_share`.
        max_probe_share: What probes may cost, of the time without drafts.
        explore_interval: Drafting steps between two of another shape; 0 for never.

    Raises:
        InvalidArgumentError: If a value is unknown, out of range, or contradicts another.
    """

    method: str = "dspark"
    model: str | os.PathLike[str] | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: DraftSampleMethod = "probabilistic"
    rejection_sample_method: RejectionSampleMethod = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    verification: VerificationMode = "fixed"
    fixed_verify_len: int | None = None
    step_cost: str | os.PathLike[str] | StepCost | None = None
    planner: SchedulingPlanner = "lagged"
    confidence: ConfidenceSource | None = None
    confidence_temperatures: str | os.PathLike[str] | Temperatures | None = None
    min_predicted_gain: float = 0.01
    probe_interval: int = 64
    max_probe_interval: int = 512
    max_probe_share: float = 0.01
    explore_interval: int = 128

    def __post_init__(self) -> None:
        """Check every field."""
        _check_choice("method", self.method, ("dspark",))
        _check_choice("draft_sample_method", self.draft_sample_method, get_args(DraftSampleMethod))
        methods = get_args(RejectionSampleMethod)
        _check_choice("rejection_sample_method", self.rejection_sample_method, methods)
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise InvalidArgumentError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, expected at least 1"
            )
        rates = self.synthetic_acceptance_rates
        if (rates is not None) != (self.rejection_sample_method == "synthetic"):
            raise InvalidArgumentError(
                "synthetic_acceptance_rates and rejection_sample_method='synthetic' belong "
                f"together, got {rates} and {self.rejection_sample_method!r}"
            )
        if rates is not None and not (rates and all(0 <= rate <= 1 for rate in rates)):
            raise InvalidArgumentError(
                f"synthetic_acceptance_rates are {rates}, expected numbers in [0, 1]"
            )
        self._check_verification()

    def _check_verification(self) -> None:
        _check_choice("verification", self.verification, get_args(VerificationMode))
        _check_choice("planner", self.planner, get_args(SchedulingPlanner))
        if self.confidence is not None:
            _check_choice("confidence", self.confidence, get_args(ConfidenceSource))
        length = self.fixed_verify_len
        if length is not None and length < 0:
            raise InvalidArgumentError(f"fixed_verify_len is {length}, expected at least 0")
        if length is not None and self.verification != "fixed":
            raise InvalidArgumentError(
                f"fixed_verify_len = {length} needs verification 'fixed', got {self.verification!r}"
            )
        if self.verification == "fixed":
            for name in ("step_cost", "confidence", "confidence_temperatures"):
                if getattr(self, name) is not None:
                    raise InvalidArgumentError(
                        f"{name} needs verification 'scheduled', got 'fixed'"
                    )
        if self.confidence_temperatures is not None and self.confidence not in (None, "head"):
            raise InvalidArgumentError(
                f"confidence_temperatures are of the head's logits, confidence is "
                f"{self.confidence!r}"
            )

    def confidence_source(self, *, has_head: bool) -> ConfidenceSource:
        """Return where confidences come from; ``"acceptance"`` where nothing is scheduled.

        Args:
            has_head: Whether the drafter has a confidence head.

        Raises:
            InvalidArgumentError: If it has none and one is needed.
        """
        if self.verification == "fixed":
            return "acceptance"
        source = self.confidence or ("head" if has_head else "acceptance")
        if source in {"head", "both"} and not has_head:
            raise InvalidArgumentError(
                f"confidence is {source!r}, the drafter has no confidence head: use 'margin' or "
                "'acceptance'"
            )
        return source

    def load_step_cost(self) -> StepCost | None:
        """Return the cost table; None to measure it.

        Raises:
            CostTableError: If the file cannot be read or is no table.
        """
        given = self.step_cost
        return StepCost.load(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else given

    def load_temperatures(self, num_drafts: int) -> Temperatures:
        """Return the temperatures of that many drafts, 1 where none are given.

        Raises:
            CalibrationError: If the file cannot be read, or holds fewer.
        """
        given = self.confidence_temperatures
        if given is None:
            return Temperatures([1.0] * num_drafts)
        if isinstance(given, (str, os.PathLike)):
            given = Temperatures.load(os.fspath(given))
        return given.of_first(num_drafts)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeOptions:
        """Read the keys of a `speculative_config`.

        Raises:
            InvalidArgumentError: If a key is unknown or a value is not possible.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise InvalidArgumentError(
                f"speculative_config has {', '.join(unknown)}, known: {', '.join(known)}"
            )
        given = dict(values)
        if given.get("synthetic_acceptance_rates") is not None:
            given["synthetic_acceptance_rates"] = tuple(given["synthetic_acceptance_rates"])
        return cls(**given)

    def num_drafts(self, most: int) -> int:
        """Return the drafts per step of a drafter that makes at most so many.

        Raises:
            InvalidArgumentError: If more are asked for, or a rate is missing.
        """
        wanted = most if self.num_speculative_tokens is None else self.num_speculative_tokens
        if wanted > most:
            raise InvalidArgumentError(
                f"num_speculative_tokens is {wanted}, the drafter makes at most {most}"
            )
        rates = self.synthetic_acceptance_rates
        if rates is not None and len(rates) < wanted:
            raise InvalidArgumentError(
                f"synthetic_acceptance_rates has {len(rates)} numbers for {wanted} drafts"
            )
        length = self.fixed_verify_len
        if length is not None and length > wanted:
            raise InvalidArgumentError(
                f"fixed_verify_len is {length}, each request has {wanted} drafts"
            )
        return wanted


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgumentError(f"{name} is {value!r}, known: {', '.join(known)}")
