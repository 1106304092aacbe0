"""What a user says about drafting; names and meanings are vLLM's `speculative_config`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

DraftSampleMethod = Literal["probabilistic", "greedy"]
RejectionSampleMethod = Literal["standard", "block", "synthetic"]


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

    Raises:
        InvalidArgumentError: If a value is unknown, out of range, or contradicts another.
    """

    method: str = "dspark"
    model: str | os.PathLike[str] | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: DraftSampleMethod = "probabilistic"
    rejection_sample_method: RejectionSampleMethod = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None

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
        return wanted


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgumentError(f"{name} is {value!r}, known: {', '.join(known)}")
