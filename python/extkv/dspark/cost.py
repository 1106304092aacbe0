"""What a decode step costs: a measured table, its file, and its fit.

``T = bias + request(requests) + context(context tokens) + token(E(tokens))``, and with a draft
pass also ``draft(requests) + draft_context(context tokens)``, and if a draft is verified
``window_context(context tokens)``. ``E`` rounds up to the captured graph tier. Curves are linear
between knots, constant before the first, and go on with the last slope past the last.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from extkv import _extkv
from extkv.dspark.arrays import buffer_of
from extkv.errors import CostTableError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CostTable", "QualityLimits", "StepCost", "StepFit", "StepSample", "fit_step_cost"]

_FORMAT = "extkv.step_cost.v1"

_CURVES = (
    "token_us",
    "request_us",
    "draft_us",
    "context_us",
    "draft_context_us",
    "window_context_us",
)

Knots = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CostTable:
    """A table as measured or written by hand; a knot is (count, microseconds).

    Attributes:
        token_us: Over executed tokens; at least one knot.
        bias_us: Time of a step that nothing else explains.
        request_us: Over requests.
        draft_us: The draft pass, over requests.
        context_us: Over the context tokens of all requests together.
        draft_context_us: The draft pass's part of the same.
        window_context_us: What verification adds over the same: attention of several rows per
            request reads slower than that of one.
        tiers: Numbers of tokens with a captured graph, rising; none if every size runs as it is.
        source: Where it was measured, for people.
    """

    token_us: Knots
    bias_us: float = 0.0
    request_us: Knots = ()
    draft_us: Knots = ()
    context_us: Knots = ()
    draft_context_us: Knots = ()
    window_context_us: Knots = ()
    tiers: tuple[int, ...] = ()
    source: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the table as text."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read a table, its source included.

        Raises:
            CostTableError: If the text is no table, or not one that can be.
        """
        StepCost.from_json(text)
        values = json.loads(text)
        curves = {name: values.get(name, []) for name in _CURVES}
        return cls(
            **{name: tuple((at, float(us)) for at, us in knots) for name, knots in curves.items()},
            bias_us=float(values.get("bias_us", 0.0)),
            tiers=tuple(values.get("tiers", ())),
            source=values.get("source", {}),
        )

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table's file.

        Raises:
            CostTableError: If the file cannot be read or is no table.
        """
        return cls.from_json(_read(path))

    def save(self, path: str | Path) -> None:
        """Write the table's file, a field per line."""
        fields = {"format": _FORMAT, **asdict(self)}
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@dataclass(frozen=True)
class QualityLimits:
    """What is refused as flat or noisy; ratios of a step's time.

    Attributes:
        min_rise_ratio: Least rise of the token curve over its range.
        max_repair_ratio: Largest move of a knot by monotone repair; of a fit, of a step.
        max_spread_ratio: Largest spread (p90 - p10) of one step's repeats over their median.
        max_residual_ratio: Largest distance of a measured step from the fit.
    """

    min_rise_ratio: float = 0.02
    max_repair_ratio: float = 0.10
    max_spread_ratio: float = 0.20
    max_residual_ratio: float = 0.15


class StepCost:
    """A checked table that answers what a step costs.

    Example:
        >>> cost = StepCost(CostTable(token_us=((1, 10.0), (8, 12.0)), tiers=(1, 8)))
        >>> cost.step_us(num_requests=2, num_drafts=3, drafts=True)
        12.0
    """

    __slots__ = ("native",)

    def __init__(self, table: CostTable) -> None:
        """Check a table that is final.

        Raises:
            CostTableError: If a curve is not ordered, falls, or a time is not a number.
        """
        self.native = _extkv.StepCost.from_json(table.to_json())

    @classmethod
    def measured(cls, table: CostTable, limits: QualityLimits | None = None) -> StepCost:
        """Repair a measured table so that no curve falls, and check its quality.

        Raises:
            CostTableError: If it is flat, or the repair would have to move a knot too far.
        """
        limits = limits or QualityLimits()
        return cls._of(
            _extkv.StepCost.measured(
                table.to_json(), limits.min_rise_ratio, limits.max_repair_ratio
            )
        )

    @classmethod
    def from_json(cls, text: str) -> StepCost:
        """Read a table.

        Raises:
            CostTableError: If the text is no table, or not one that can be.
        """
        return cls._of(_extkv.StepCost.from_json(text))

    @classmethod
    def load(cls, path: str | Path) -> StepCost:
        """Read a table's file.

        Raises:
            CostTableError: If the file cannot be read or is no table.
        """
        return cls.from_json(_read(path))

    @classmethod
    def _of(cls, native: _extkv.StepCost) -> StepCost:
        cost = cls.__new__(cls)
        cost.native = native
        return cost

    def to_json(self) -> str:
        """Return the table as text that `from_json` reads."""
        return self.native.to_json()

    def save(self, path: str | Path) -> None:
        """Write the table's file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def check_rise(self, min_rise_ratio: float = QualityLimits.min_rise_ratio) -> None:
        """Refuse a table in which tokens cost next to nothing: it can only say "verify all".

        Raises:
            CostTableError: If the token curve rises by less than this part of the smallest step.
        """
        self.native.check_rise(min_rise_ratio)

    def step_us(
        self,
        *,
        num_requests: int,
        num_drafts: int = 0,
        drafts: bool = False,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> float:
        """Return the microseconds of a step.

        Args:
            num_requests: Requests that decode.
            num_drafts: Drafts to verify in all.
            drafts: Whether the draft pass runs.
            num_other_tokens: Tokens of other rows, for example prefill.
            num_context_tokens: Context of all requests together.
        """
        return self.native.step_us(
            num_requests, num_drafts, drafts, num_other_tokens, num_context_tokens
        )

    def num_executed_tokens(self, num_tokens: int) -> int:
        """Return the captured size that runs for a number of tokens."""
        return self.native.num_executed_tokens(num_tokens)


@dataclass(frozen=True)
class StepSample:
    """One shape of step and how long it took.

    Attributes:
        num_requests: Requests that decode.
        num_tokens: All tokens of the step, padding included. A drafting step with more of them than
            requests verifies.
        drafts: Whether the draft pass ran.
        step_us: Median of the repeats.
        spread_us: p90 - p10 of the repeats.
        num_context_tokens: Context of all requests together.
    """

    num_requests: int
    num_tokens: int
    drafts: bool
    step_us: float
    spread_us: float = 0.0
    num_context_tokens: int = 0

    @property
    def num_verified(self) -> int:
        """Drafts that are verified, padding included; more tokens of a plain step are padding."""
        return self.num_tokens - self.num_requests if self.drafts else 0


@dataclass(frozen=True)
class StepFit:
    """A fitted table and how well it describes the steps.

    Attributes:
        cost: The table.
        worst_residual_ratio: Largest distance of a step from it, over the step's time.
        mean_residual_ratio: Mean of the same.
    """

    cost: StepCost
    worst_residual_ratio: float
    mean_residual_ratio: float


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostTableError(f"cannot read the cost table {path}: {error}") from error


def fit_step_cost(
    samples: Sequence[StepSample],
    tiers: Sequence[int] = (),
    limits: QualityLimits | None = None,
) -> StepFit:
    """Fit a table to measured steps: a cross product of requests and verify lengths, warm, medians.

    Least squares among tables that never fall, relative to a step's time, less where its repeats
    spread. Both steps that draft and steps that do not are needed.

    Raises:
        CostTableError: If the samples are noisy, cannot tell drafting apart, or do not add up.
    """
    limits = limits or QualityLimits()
    shape = (len(samples),)

    def column(name: str, dtype: type[np.generic]) -> bytes:
        return buffer_of(name, [getattr(sample, name) for sample in samples], dtype, shape)

    native, worst, mean = _extkv.fit_step_cost(
        column("num_requests", np.uint32),
        column("num_tokens", np.uint32),
        column("num_context_tokens", np.uint64),
        column("drafts", np.uint32),
        column("step_us", np.float64),
        column("spread_us", np.float64),
        list(tiers),
        (
            limits.min_rise_ratio,
            limits.max_repair_ratio,
            limits.max_spread_ratio,
            limits.max_residual_ratio,
        ),
    )
    return StepFit(StepCost._of(native), worst, mean)  # noqa: SLF001
