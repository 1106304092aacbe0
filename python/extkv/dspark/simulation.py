"""A small world with known costs and acceptance, in which schedules can be compared.

Requests differ in how well they can be drafted, rounds differ too, and the head sees both through
noise and a wrong temperature. Time is what a cost table says, with jitter. Equal seeds give equal
results. This says what a schedule is worth if costs and acceptance are as assumed; it is no
measurement of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from extkv.dspark.cost import CostTable, StepCost
from extkv.dspark.estimation import AcceptanceModel, Features
from extkv.dspark.planning import SpeculationController

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.dspark.cost import Knots
    from extkv.dspark.planning import PlannerName
    from extkv.dspark.plans import SpeculationStats

    BoolArray = npt.NDArray[np.bool_]
    Float64Array = npt.NDArray[np.float64]
    Float32Array = npt.NDArray[np.float32]
    Int64Array = npt.NDArray[np.int64]

__all__ = ["Comparison", "Drift", "World", "compare", "steps_until_return"]

_MAX_ACCEPTANCE = 0.98


@dataclass(frozen=True)
class World:
    """What drafts are worth and what the head knows about it.

    Attributes:
        num_drafts: K.
        mean_logit: Acceptance of a typical draft, as a logit.
        request_spread: Standard deviation of it between requests.
        draft_spread: Standard deviation of it between drafts of a request.
        head_noise: Standard deviation of what the head does not know.
        head_temperature: The head's logits are this much too large.
        turnover: Chance of a request to end with a step; another one takes its slot.
        jitter: Relative standard deviation of step times.
    """

    num_drafts: int = 7
    mean_logit: float = 1.2
    request_spread: float = 1.0
    draft_spread: float = 1.2
    head_noise: float = 0.7
    head_temperature: float = 1.6
    turnover: float = 0.005
    jitter: float = 0.01


@dataclass(frozen=True)
class Drift:
    """Factors on what the table and the head say, from some step on."""

    fixed: float = 1.0
    verify: float = 1.0
    draft: float = 1.0
    acceptance: float = 1.0

    def of_table(self, table: CostTable) -> CostTable:
        """Return the table with drifted costs."""

        def scaled(knots: Knots, factor: float) -> Knots:
            return tuple((count, us * factor) for count, us in knots)

        return replace(
            table,
            bias_us=table.bias_us * self.fixed,
            request_us=scaled(table.request_us, self.fixed),
            context_us=scaled(table.context_us, self.fixed),
            token_us=scaled(table.token_us, self.verify),
            draft_us=scaled(table.draft_us, self.draft),
            draft_context_us=scaled(table.draft_context_us, self.draft),
            window_context_us=scaled(table.window_context_us, self.verify),
        )


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of one load.

    All see the same requests and drafts.

    Attributes:
        num_requests: Requests at any time.
        no_drafts: Without drafts.
        fixed: With 1 to K drafts of each request, always verified.
        scheduled: With the controller.
        stats: The controller's counters.
    """

    num_requests: int
    no_drafts: float
    fixed: tuple[float, ...]
    scheduled: float
    stats: SpeculationStats

    @property
    def best_other(self) -> float:
        """The better of no drafts and the best fixed number."""
        return max(self.no_drafts, *self.fixed)

    @property
    def ratio(self) -> float:
        """Scheduled over the better of the others."""
        return self.scheduled / self.best_other


class _Requests:
    """The requests of a load, in slots."""

    def __init__(self, world: World, num_requests: int, seed: int) -> None:
        self._world = world
        self._random = np.random.default_rng(seed)
        self._difficulty = self._random.normal(0.0, world.request_spread, num_requests)
        self.generations = np.ones(num_requests, np.uint32)

    def draw(self, acceptance: float) -> tuple[Float32Array, Int64Array]:
        """Return the head's logits [R, K] and how many of K drafts would be accepted [R]."""
        world, random = self._world, self._random
        shape = (len(self._difficulty), world.num_drafts)
        truth = world.mean_logit + self._difficulty[:, None]
        truth = truth + random.normal(0.0, world.draft_spread, shape)
        logits = world.head_temperature * (truth + random.normal(0.0, world.head_noise, shape))
        chance = np.minimum(acceptance / (1.0 + np.exp(-truth)), _MAX_ACCEPTANCE)
        is_rejected = random.random(shape) >= chance
        first = np.where(is_rejected.any(axis=1), is_rejected.argmax(axis=1), world.num_drafts)
        return logits.astype(np.float32), first.astype(np.int64)

    def end_step(self) -> None:
        """Let some requests end and others take their slots."""
        ends = self._random.random(len(self._difficulty)) < self._world.turnover
        count = int(ends.sum())
        self._difficulty[ends] = self._random.normal(0.0, self._world.request_spread, count)
        self.generations[ends] += 1

    def jittered(self, us: float) -> float:
        """Return a time as it would be measured."""
        return us * float(1.0 + self._world.jitter * self._random.normal())


def compare(
    table: CostTable,
    world: World,
    num_requests: int,
    *,
    drift: Drift | None = None,
    planner: PlannerName = "lagged",
    num_steps: int = 1000,
    num_warmup_steps: int = 400,
    num_drift_steps: int = 600,
    seed: int = 0,
) -> Comparison:
    """Compare a schedule with no drafts and fixed numbers of them, at one load.

    The controller knows the table. It runs `num_warmup_steps`, then, with a drift, another
    `num_drift_steps` under it, and counts over the `num_steps` that follow.

    Raises:
        CostTableError: If the table cannot be.
        SpeculationError: If the world has no drafts.
    """
    after = drift or Drift()
    truth = StepCost(after.of_table(table))
    run = _Run(table, world, num_requests, planner, seed)
    run.steps(num_warmup_steps, StepCost(table), Drift())
    if drift is not None:
        run.steps(num_drift_steps, truth, after)
    outcome = run.steps(num_steps, truth, after)

    def rate(num_tokens: float, num_drafts: int, *, drafts: bool) -> float:
        step_us = truth.step_us(num_requests=num_requests, num_drafts=num_drafts, drafts=drafts)
        return num_tokens / step_us * 1e6

    fixed = tuple(
        rate(num_requests + accepted / num_steps, num_requests * k, drafts=True)
        for k, accepted in enumerate(outcome.accepted_of_fixed.tolist(), start=1)
    )
    return Comparison(
        num_requests=num_requests,
        no_drafts=rate(num_requests, 0, drafts=False),
        fixed=fixed,
        scheduled=outcome.num_tokens / outcome.us * 1e6,
        stats=run.controller.stats,
    )


def steps_until_return(
    table: CostTable,
    world: World,
    num_requests: int,
    *,
    acceptance: float,
    num_low_steps: int = 1000,
    planner: PlannerName = "lagged",
    seed: int = 0,
    limit: int = 4096,
) -> int | None:
    """Return the steps from a rise of acceptance until drafting is taken up again.

    Acceptance is scaled for `num_low_steps`, then it is what it was at first.

    Args:
        table: What steps cost.
        world: What drafts are worth.
        num_requests: Requests at any time.
        acceptance: Factor on acceptance while it is low.
        num_low_steps: Steps for which it is.
        planner: The controller's planner.
        seed: Of requests, drafts and times.
        limit: Steps after which to stop waiting; they are returned then.

    Returns:
        The steps; None if drafting goes on while acceptance is low.

    Raises:
        CostTableError: If the table cannot be.
        SpeculationError: If the world has no drafts.
    """
    truth = StepCost(table)
    run = _Run(table, world, num_requests, planner, seed)
    run.steps(300, truth, Drift())
    run.steps(num_low_steps, truth, Drift(acceptance=acceptance))
    if run.controller.is_drafting:
        return None
    for number in range(limit):
        if run.controller.is_drafting:
            return number
        run.steps(1, truth, Drift())
    return limit


@dataclass
class _Outcome:
    """What some steps brought, and what fixed numbers of drafts would have in their place."""

    num_tokens: int
    us: float
    accepted_of_fixed: Int64Array


class _Run:
    """A controller and an online estimator over requests."""

    def __init__(
        self, table: CostTable, world: World, num_requests: int, planner: PlannerName, seed: int
    ) -> None:
        self._requests = _Requests(world, num_requests, seed)
        self._num_requests = num_requests
        self._slots = np.arange(num_requests, dtype=np.uint32)
        self._model = AcceptanceModel(
            world.num_drafts, ("head", "position"), min_num_trials=100, refit_interval=50
        )
        self._num_drafts = world.num_drafts
        self._step_id = 0
        self.controller = SpeculationController(
            num_requests, world.num_drafts, StepCost(table), planner=planner
        )

    def steps(self, num_steps: int, truth: StepCost, drift: Drift) -> _Outcome:
        """Run some steps."""
        outcome = _Outcome(0, 0.0, np.zeros(self._num_drafts, np.int64))
        for _ in range(num_steps):
            self._one_step(truth, drift.acceptance, outcome)
        return outcome

    def _one_step(self, truth: StepCost, acceptance: float, outcome: _Outcome) -> None:
        self._step_id += 1
        generations = self._requests.generations
        decision = self.controller.decide(self._step_id, self._slots, generations)
        logits, would_accept = self._requests.draw(acceptance)
        num_drafts, accepted = 0, np.zeros(0, np.int64)
        if decision.drafts:
            features = Features(self._num_requests, head_logits=logits)
            plan = self.controller.plan(self._model.confidences(features))
            num_drafts = plan.num_admitted
            accepted = np.minimum(would_accept, plan.verify_lens)
            self._model.observe(features, plan.verify_lens, accepted)
            self._model.end_step()
        us = truth.step_us(
            num_requests=self._num_requests, num_drafts=num_drafts, drafts=decision.drafts
        )
        us = self._requests.jittered(us)
        outcome.num_tokens += self.controller.observe(accepted, us).num_tokens
        outcome.us += us
        by_length = np.bincount(would_accept, minlength=self._num_drafts + 1)
        at_least = by_length[::-1].cumsum()[::-1][1:]
        outcome.accepted_of_fixed += at_least.cumsum()
        self._requests.end_step()
