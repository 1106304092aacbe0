"""How many drafts to verify, whether to draft at all, and what came of it.

`SpeculationController` is the loop of an engine; `VerifyPlanner` holds the planners by themselves.
Verification stays exact because no draft's admission depends on itself or on later drafts; see
docs/dspark-scheduling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from extkv import _extkv
from extkv.dspark.arrays import buffer_of
from extkv.dspark.plans import (
    Decision,
    DecisionReason,
    DraftBudget,
    Prediction,
    SpeculationStats,
    StepReport,
    VerifyPlan,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.dspark.cost import StepCost

    Float32Array = npt.NDArray[np.float32]
    Batch = tuple[bytes, bytes | None, int, int, int]

__all__ = [
    "Decision",
    "DecisionReason",
    "DraftBudget",
    "PlannerName",
    "Prediction",
    "SpeculationController",
    "SpeculationStats",
    "StepReport",
    "VerifyPlan",
    "VerifyPlanner",
    "survival",
]

PlannerName = Literal["lagged", "greedy", "verify_all", "fixed", "none"]


def survival(confidences: npt.ArrayLike) -> Float32Array:
    """Return products of confidences along the last axis; NaN and infinities count as 0.

    Example:
        >>> survival([[0.5, np.nan, 0.9]]).tolist()
        [[0.5, 0.0, 0.0]]
    """
    cells = np.asarray(confidences, np.float32)
    clean = np.where(np.isfinite(cells), np.clip(cells, 0.0, 1.0), 0.0)
    return np.cumprod(clean, axis=-1, dtype=np.float32)


class VerifyPlanner:
    """The planners, over one workspace that nothing outgrows.

    Args of all: `survival` (float32, [R, K]) of each draft, rows falling; `limits` (uint32, [R])
    most drafts of each row; `num_other_tokens` and `num_context_tokens` of the same step.

    Example:
        >>> planner = VerifyPlanner(max_num_requests=2, num_drafts=3)
        >>> rows = survival([[0.9, 0.8, 0.5], [0.6, 0.9, 0.9]])
        >>> planner.top(rows, num_drafts=5).verify_lens.tolist()
        [2, 3]
    """

    __slots__ = ("_native", "_num_drafts")

    def __init__(self, max_num_requests: int, num_drafts: int) -> None:
        """Make planners for up to `max_num_requests` requests of K = `num_drafts` drafts.

        Raises:
            SpeculationError: If a size is 0 or too large.
        """
        self._native = _extkv.VerifyPlanner(max_num_requests, num_drafts)
        self._num_drafts = num_drafts

    def greedy(
        self,
        survival: npt.ArrayLike,
        cost: StepCost,
        *,
        limits: npt.ArrayLike | None = None,
        max_num_drafts: int | None = None,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> VerifyPlan:
        """Plan by Algorithm 1: admit by falling survival while tokens per time rise, then stop.

        `max_num_drafts` must be history, and so must all else that decides whether the plan is
        used.

        Raises:
            SpeculationError: If a shape does not fit.
        """
        batch = self._batch(survival, limits, num_other_tokens, num_context_tokens)
        return VerifyPlan.of_native(self._native.greedy(*batch, cost.native, max_num_drafts))

    def budget(
        self,
        past_survival: npt.ArrayLike,
        cost: StepCost,
        *,
        limits: npt.ArrayLike | None = None,
        max_num_drafts: int | None = None,
        min_predicted_gain: float = 0.0,
        fill_tier: bool = False,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> DraftBudget:
        """Return the best number of drafts by the survivals of an earlier step.

        Those must have been computed before the current block was drawn.

        Raises:
            SpeculationError: If a shape does not fit.
        """
        batch = self._batch(past_survival, limits, num_other_tokens, num_context_tokens)
        num_drafts, prediction, is_worthwhile = self._native.budget(
            *batch, cost.native, max_num_drafts, min_predicted_gain, fill_tier
        )
        return DraftBudget(num_drafts, Prediction(*prediction), is_worthwhile)

    def top(
        self,
        survival: npt.ArrayLike,
        num_drafts: int,
        *,
        cost: StepCost | None = None,
        limits: npt.ArrayLike | None = None,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> VerifyPlan:
        """Plan the drafts of largest survival, of a number fixed before they were drawn.

        Raises:
            SpeculationError: If a shape does not fit.
        """
        batch = self._batch(survival, limits, num_other_tokens, num_context_tokens)
        native = None if cost is None else cost.native
        return VerifyPlan.of_native(self._native.top(*batch, native, num_drafts))

    def fixed(
        self,
        survival: npt.ArrayLike,
        num_drafts: int,
        *,
        cost: StepCost | None = None,
        limits: npt.ArrayLike | None = None,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> VerifyPlan:
        """Plan the same number of drafts for every request: K for all of them, 0 for none.

        Raises:
            SpeculationError: If a shape does not fit.
        """
        batch = self._batch(survival, limits, num_other_tokens, num_context_tokens)
        native = None if cost is None else cost.native
        return VerifyPlan.of_native(self._native.fixed(*batch, native, num_drafts))

    def _batch(
        self,
        survival: npt.ArrayLike,
        limits: npt.ArrayLike | None,
        num_other_tokens: int,
        num_context_tokens: int,
    ) -> Batch:
        cells = np.asarray(survival, np.float32)
        num_requests = len(cells)
        bounds = None
        if limits is not None:
            bounds = buffer_of("limits", limits, np.uint32, (num_requests,))
        shape = (num_requests, self._num_drafts)
        buffer = buffer_of("survival", cells, np.float32, shape)
        return buffer, bounds, num_requests, num_other_tokens, num_context_tokens


class SpeculationController:
    """Decide, plan and learn, one step after the other.

    Per step: `decide` before the draft pass; `plan` with the drafts' confidences if it drafts;
    `observe` with what was accepted and how long the step took. Up to `lag` steps may be decided
    before the first of them is observed. Calls take microseconds, are safe
    from several threads, and equal calls give equal results; still, one rank should decide and tell
    the others.

    Example:
        >>> controller = SpeculationController(max_num_requests=4, num_drafts=2)
        >>> controller.decide(1, slots=[0], generations=[1]).reason.value
        'no_cost_table'
        >>> controller.plan([[0.9, 0.5]]).verify_lens.tolist()
        [2]
        >>> controller.observe([1]).num_tokens
        2
    """

    __slots__ = ("_native", "_num_drafts")

    def __init__(
        self,
        max_num_requests: int,
        num_drafts: int,
        cost: StepCost | None = None,
        *,
        planner: PlannerName = "lagged",
        fixed_len: int = 0,
        lag: int = 2,
        fill_tier: bool = True,
        min_snapshot_requests: int = 16,
        min_predicted_gain: float = 0.01,
        probe_interval: int = 64,
        max_probe_interval: int = 512,
        max_probe_share: float = 0.01,
        explore_interval: int = 128,
    ) -> None:
        """Make a controller; without a cost table everything that is drafted is verified.

        Args:
            max_num_requests: Slots of the persistent batch, and most requests of a step.
            num_drafts: K.
            cost: What a step costs.
            planner: ``"lagged"``: a budget from earlier steps, shared out by current survival;
                ``"greedy"``: Algorithm 1; ``"verify_all"``; ``"fixed"``; ``"none"``.
            fixed_len: Drafts per request of ``"fixed"``.
            lag: Steps between confidences and the budget made of them, at least 1.
            fill_tier: Whether a budget is raised to what its graph tier computes anyway.
            min_snapshot_requests: With fewer requests a budget comes from what all drafts were
                worth lately.
            min_predicted_gain: Least gain to take drafting up again.
            probe_interval: Steps without drafts before the first probe.
            max_probe_interval: Longest interval, after probes that found no gain; longer where a
                probe costs more.
            max_probe_share: What probes may cost, of the time without drafts.
            explore_interval: Drafting steps between two steps of another shape; 0 for never.

        Raises:
            SpeculationError: If a setting is out of range.
        """
        self._num_drafts = num_drafts
        self._native = _extkv.SpeculationController(
            max_num_requests=max_num_requests,
            num_drafts=num_drafts,
            cost=None if cost is None else cost.native,
            planner=planner,
            fixed_len=fixed_len,
            lag=lag,
            fill_tier=fill_tier,
            min_snapshot_requests=min_snapshot_requests,
            min_predicted_gain=min_predicted_gain,
            probe_interval=probe_interval,
            max_probe_interval=max_probe_interval,
            max_probe_share=max_probe_share,
            explore_interval=explore_interval,
        )

    def decide(
        self,
        step_id: int,
        slots: npt.ArrayLike,
        generations: npt.ArrayLike,
        *,
        num_other_tokens: int = 0,
        num_context_tokens: int = 0,
        limits: npt.ArrayLike | None = None,
        max_num_drafts: int | None = None,
    ) -> Decision:
        """Decide whether a step drafts, and how many drafts it verifies, from history alone.

        Args:
            step_id: Rises from call to call.
            slots: Slot of each row that decodes (uint32, [R]); `StepPlan.request_slots`.
            generations: Its generation (uint32, [R]); `StepPlan.slot_generations`.
            num_other_tokens: Tokens of the step's other rows.
            num_context_tokens: Context of all rows together.
            limits: Most drafts of each row (uint32, [R]).
            max_num_drafts: Most drafts of the step.

        Raises:
            SpeculationError: If a shape, a slot or the order of steps does not fit.
        """
        slots = np.asarray(slots)
        row = (slots.size,)
        bounds = None if limits is None else buffer_of("limits", limits, np.uint32, row)
        native = self._native.decide(
            step_id,
            buffer_of("slots", slots, np.uint32, row),
            buffer_of("generations", generations, np.uint32, row),
            num_other_tokens,
            num_context_tokens,
            bounds,
            max_num_drafts,
        )
        return Decision.of_native(native)

    def plan(self, confidences: npt.ArrayLike) -> VerifyPlan:
        """Choose verify lengths from drafts' confidences (float32, [R, K]).

        They are those of the oldest step in flight that drafts and has no plan.
        Each must be a function of the drafts before it; see `extkv.dspark.estimation`.

        Raises:
            SpeculationError: Without a decision to draft, or if the shape does not fit.
        """
        cells = np.asarray(confidences, np.float32)
        buffer = buffer_of("confidences", cells, np.float32, (len(cells), self._num_drafts))
        return VerifyPlan.of_native(self._native.plan(buffer))

    def observe(
        self, num_accepted: npt.ArrayLike = (), measured_us: float | None = None
    ) -> StepReport:
        """End the oldest step in flight with each row's accepted drafts (uint32, [R]), and learn.

        Give no accepted drafts if the step did not draft, and no `measured_us` if the time is not
        typical.

        Raises:
            SpeculationError: If a row accepts more than it verified, or a call is missing.
        """
        accepted = np.asarray(num_accepted)
        buffer = buffer_of("num_accepted", accepted, np.uint32, (accepted.size,))
        return StepReport.of_native(self._native.observe(buffer, measured_us))

    def cancel_newest_step(self) -> int | None:
        """Give the newest step in flight up; its number, if there was one."""
        return self._native.cancel_newest_step()

    def set_cost(self, cost: StepCost | None) -> None:
        """Replace the cost table; drift starts over."""
        self._native.set_cost(None if cost is None else cost.native)

    @property
    def is_drafting(self) -> bool:
        """Whether drafting pays at present."""
        return self._native.is_drafting()

    @property
    def acceptance_ratio(self) -> float:
        """Accepted drafts over predicted ones, lately."""
        return self._native.acceptance_ratio()

    @property
    def cost_scale(self) -> tuple[float, float, float]:
        """Drift of the cost's fixed, verify and draft parts."""
        return self._native.cost_scale()

    @property
    def stats(self) -> SpeculationStats:
        """Counters since the start."""
        return SpeculationStats(**self._native.stats())
