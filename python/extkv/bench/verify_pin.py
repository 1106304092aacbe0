"""A hand on an engine's drafts: none, a fixed number of each request, or what the schedule says."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from extkv.dspark.schedule import StaticSchedule
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from extkv.bench.steady_load import SteadyLoad
    from extkv.dspark.plans import Decision
    from extkv.dspark.schedule import DraftRound, DraftSignals, Judgement, VerifySchedule
    from extkv.dspark.step_reports import SpeculationReport
    from extkv.engine import LLM

    Int32Array = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]


class PinnedSchedule(StaticSchedule):
    """The same decision for every round: no drafts, or drafts of which so many are verified.

    Unlike `FixedSchedule` it can draft and verify none, which tells the cost of drafting apart.

    Attributes:
        verify_len: Drafts to verify of each request; None not to draft.
    """

    def __init__(self) -> None:
        """Begin without drafts."""
        super().__init__()
        self.verify_len: int | None = None

    def decide(self, draft_round: DraftRound) -> Decision:
        """Return the decision."""
        drafts = self.verify_len is not None
        return self._decide(draft_round, self.verify_len or 0, drafts=drafts)


class SwitchableSchedule:
    """Two schedules, of which one decides; a round stays with the one that decided it.

    Attributes:
        pinned: The one in hand.
        own: The engine's.
        is_pinned: Whether the one in hand decides the next round.
    """

    def __init__(self, own: VerifySchedule) -> None:
        """Leave the engine's schedule in charge."""
        self.own = own
        self.pinned = PinnedSchedule()
        self.is_pinned = False
        self._newest: VerifySchedule = own
        self._running: VerifySchedule = own

    @property
    def waits(self) -> bool:
        """Whether the newest round's schedule waits."""
        return self._newest.waits

    def decide(self, draft_round: DraftRound) -> Decision:
        """Let one of the two decide."""
        self._newest = self.pinned if self.is_pinned else self.own
        return self._newest.decide(draft_round)

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return the lengths of the one that decided."""
        return self._newest.lens(is_alive, signals)

    def start(self) -> None:
        """Start the round of the one that decided."""
        self._running = self._newest
        self._running.start()

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """Tell the one that decided what came of it."""
        return self._running.observe(num_verified, num_accepted, measured_us)

    def reset(self) -> None:
        """Give up the rounds of both."""
        self.pinned.reset()
        self.own.reset()


class VerifyPin:
    """Set how many drafts an engine verifies, between two of its steps.

    Attributes:
        llm: The engine.
        num_drafts: Most drafts of a request; 0 without a drafter.
    """

    def __init__(self, llm: LLM) -> None:
        """Take an engine as it is; its own schedule stays in charge until `set`."""
        self.llm = llm
        self.num_drafts = 0
        self._schedule: SwitchableSchedule | None = None
        drafting = llm.engine.drafting
        if drafting is not None:
            self.num_drafts = drafting.num_drafts
            self._schedule = SwitchableSchedule(drafting.schedule)
            drafting.schedule = self._schedule

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots of a request past its tokens."""
        drafting = self.llm.engine.drafting
        return 1 if drafting is None else 1 + drafting.num_lookahead_tokens

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of tokens with a captured graph, ascending; none on the host.

        With a drafter those of steps with drafts, whose graphs hold any windows.
        """
        runner = self.llm.engine.runner
        if not runner.graph_token_sizes:
            return tuple(runner.graph_sizes)
        return tuple(sorted({runner.graph_sizes[0], *runner.graph_token_sizes}))

    def set(self, verify_len: int | None) -> None:
        """Verify so many drafts of each request from now on; None drafts nothing.

        Raises:
            InvalidArgumentError: If the drafter makes fewer.
        """
        if verify_len is not None and not 0 <= verify_len <= self.num_drafts:
            raise InvalidArgumentError(
                f"{verify_len} drafts to verify of each request, the drafter makes "
                f"{self.num_drafts}"
            )
        if self._schedule is not None:
            self._schedule.is_pinned = True
            self._schedule.pinned.verify_len = verify_len

    def release(self) -> None:
        """Let the engine's own schedule decide from now on."""
        if self._schedule is not None:
            self._schedule.is_pinned = False

    def timed_steps(self, load: SteadyLoad, num_steps: int) -> list[float]:
        """Run steps of the pinned shape and return their times in microseconds.

        With a drafter they are the engine's own, from the end of a verification to the end of the
        next, by the device's clock where it has one; without, those of the host's clock. Steps that
        are of another shape, because a round was decided before, do not count.

        Raises:
            InvalidArgumentError: If steps never have the shape: a request is near its longest.
        """
        drafting = self.llm.engine.drafting
        if drafting is None or self._schedule is None:
            return [load.step_us() for _ in range(num_steps)]
        verify_len = self._schedule.pinned.verify_len
        wanted = (verify_len is not None, load.num_requests * (verify_len or 0))
        times: list[float] = []

        def keep(report: SpeculationReport) -> None:
            shape = (report.has_drafted, report.num_verified)
            if shape == wanted and report.num_requests == load.num_requests:
                times.append(report.measured_us)

        rounds = drafting.rounds
        before, rounds.on_report = rounds.on_report, keep
        try:
            for _ in range(2 * num_steps + 2):
                load.step_us()
                if len(times) >= num_steps:
                    return times
        finally:
            rounds.on_report = before
        raise InvalidArgumentError(
            f"{len(times)} of {2 * num_steps + 2} steps verified {wanted[1]} drafts of "
            f"{load.num_requests} requests, expected at least {num_steps}"
        )

    def num_executed_tokens(self, num_requests: int, num_drafts: int) -> int:
        """Return the tokens that run for so many: those of the next captured graph.

        Args:
            num_requests: Requests, one token each.
            num_drafts: Drafts verified in all. Without any, graphs of plain steps run.
        """
        runner = self.llm.engine.runner
        sizes = runner.graph_token_sizes if num_drafts else runner.graph_sizes
        num_tokens = num_requests + num_drafts
        index = bisect.bisect_left(sizes, num_tokens)
        return sizes[index] if index < len(sizes) else num_tokens

    def fits(self, num_requests: int, num_tokens: int) -> bool:
        """Tell whether the cache holds so many requests of so many tokens each."""
        num_blocks = -(-num_tokens // self.llm.config.block_size)
        return num_requests * num_blocks <= self.llm.engine.scheduler.num_blocks
