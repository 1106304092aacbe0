"""Rounds of drafts: from a schedule's decision to the report of the step that verified them."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.dspark.schedule import DraftRound
from extkv.dspark.step_reports import SpeculationReport
from extkv.dspark.step_timer import StepTimer
from extkv.engine.sampled_tokens import HostCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from extkv.dspark.plans import Decision
    from extkv.dspark.schedule import VerifySchedule
    from extkv.dspark.speculator import Speculator
    from extkv.dspark.step_timer import Mark
    from extkv.sched import Scheduler, StepPlan

# Reports kept: some minutes of steps.
NUM_REPORTS = 8192


class HostDrafts:
    """A round's drafts and what schedules look at, in one copy to the host."""

    def __init__(
        self, speculator: Speculator, drafts: torch.Tensor, rows: npt.NDArray[np.intp]
    ) -> None:
        num_reqs, self._num_drafts = drafts.shape
        # Rows of the draft pass that belong to the round: all but those that compute prompts.
        self._rows = rows
        signals = (speculator.confidence_logits, speculator.margins)
        self._has_logits, self._has_margins = (signal is not None for signal in signals)
        bits = [signal[:num_reqs].view(torch.int32) for signal in signals if signal is not None]
        numbers = drafts.to(torch.int32)
        self._copy = HostCopy(torch.cat([numbers, *bits], dim=1) if bits else numbers)

    def tokens(self) -> list[list[int]]:
        """Wait for the drafts of each request."""
        return self._copy.wait()[:, : self._num_drafts].tolist()

    def head_logits(self) -> npt.NDArray[np.float32] | None:
        """Wait for the logits of the confidence head; None if they are not computed."""
        return self._signal(1) if self._has_logits else None

    def margins(self) -> npt.NDArray[np.float32] | None:
        """Wait for the differences of the two largest base logits; None if not computed."""
        return self._signal(1 + self._has_logits) if self._has_margins else None

    def _signal(self, place: int) -> npt.NDArray[np.float32]:
        columns = self._copy.wait().numpy()[:, place * self._num_drafts :][:, : self._num_drafts]
        return columns[self._rows].view(np.float32)


@dataclass(eq=False)
class Round:
    """What is drafted after a step, up to the end of the step that verifies it.

    Attributes:
        draft_round: What the schedule was asked about.
        ids: Its requests.
        decision: What the schedule said.
        began: End of the verification before.
        drafts: The drafts, if the draft pass runs.
        lens ([R]): How many of them to verify, once that is known.
        num_available: How many could be.
    """

    draft_round: DraftRound
    ids: list[int]
    decision: Decision
    began: Mark
    drafts: HostDrafts | None = None
    lens: npt.NDArray[np.int32] | None = None
    num_available: int = 0


@dataclass(frozen=True)
class _Launch:
    """The step that verifies a round, as it runs."""

    draft_round: Round
    step_id: int
    num_requests: int
    num_other_tokens: int
    num_verified: npt.NDArray[np.int32]
    num_tokens: int
    num_executed_tokens: int
    idle_s: float
    ended: Mark


class RoundBook:
    """Lead an engine's rounds through a schedule, and report each.

    Attributes:
        schedule: Says whether to draft and how many drafts to verify. Another one may take its
            place while no request runs.
        round: The newest round; None before the first.
        reports: What became of the last rounds.
        on_report: Called with each report, if set.
    """

    def __init__(
        self,
        schedule: VerifySchedule,
        device: torch.device,
        *,
        num_drafts: int,
        max_position: int,
        token_sizes: Sequence[int] = (),
    ) -> None:
        """Make an empty book.

        Args:
            schedule: The schedule.
            device: Where steps run.
            num_drafts: Drafts of a request.
            max_position: First position that cannot be drafted at.
            token_sizes: Numbers of tokens that steps with drafts run at, rising; none if each runs
                as it is.
        """
        self.schedule = schedule
        self.round: Round | None = None
        self.reports: deque[SpeculationReport] = deque(maxlen=NUM_REPORTS)
        self.on_report: Callable[[SpeculationReport], object] | None = None
        self._num_drafts, self._max_position = num_drafts, max_position
        self._token_sizes = list(token_sizes)
        self._timer = StepTimer(device)
        self._launch: _Launch | None = None
        self._num_rounds = 0

    def begin_step(self) -> None:
        """Note that the host starts a step."""
        self._timer.begin()

    def next_round(
        self, plan: StepPlan, sampled: npt.NDArray[np.intp], num_executed_tokens: int
    ) -> Round | None:
        """Note that a step's tokens are being decided, and open the round after it.

        Args:
            plan: The step; it verifies the round before, or does without.
            sampled ([num_sampled]): Rows of the plan that are sampled.
            num_executed_tokens: Tokens that it runs, padding included.

        Returns:
            The round, for the requests that are sampled; None if there are none.
        """
        ended = self._timer.mark()
        self._start(plan, num_executed_tokens, ended)
        self.round = self._decided(plan, sampled, ended)
        return self.round

    @property
    def waits(self) -> bool:
        """Whether `end_step` waits for the draft pass."""
        return self.round is not None and self.schedule.waits

    def end_step(
        self,
        request_ids: list[int],
        windows: list[list[int]],
        alive_ids: list[int],
        scheduler: Scheduler,
    ) -> None:
        """Learn from a step's tokens, and give the scheduler placeholders for the next drafts.

        The device may still draft: which tokens they are shows when they are verified.

        Args:
            request_ids: Requests that the step sampled.
            windows: The tokens of each.
            alive_ids: Those that go on.
            scheduler: The engine's scheduler, between two steps.
        """
        launch, self._launch = self._launch, None
        self._timer.end()
        if launch is not None:
            self._observe(launch, request_ids, windows)
        made = self.round
        if made is None:
            return
        is_alive = np.ones(len(made.ids), np.bool_)
        if alive_ids != made.ids:
            alive = set(alive_ids)
            is_alive = np.array([request_id in alive for request_id in made.ids], np.bool_)
        lens = made.lens = self.schedule.lens(is_alive, made.drafts)
        if made.drafts is None:
            return
        made.num_available = int(made.draft_round.limits[is_alive].sum())
        for request_id, count in zip(made.ids, lens.tolist(), strict=True):
            if count:
                scheduler.set_drafts(request_id, [None] * count)

    def reset(self) -> None:
        """Give up what is drafted and not verified, when a step was given up."""
        self.round = self._launch = None
        self.schedule.reset()

    def _start(self, plan: StepPlan, num_executed_tokens: int, ended: Mark) -> None:
        """Note that a step was launched that verifies the last round, or does without."""
        made = self.round
        if made is None:
            return
        self.schedule.start()
        ids = plan.request_ids.tolist()
        verified = plan.num_draft_tokens
        if ids != made.ids:
            count_of = dict(zip(ids, verified.tolist(), strict=True))
            verified = np.array([count_of.get(request_id, 0) for request_id in made.ids], np.int32)
        num_decodes = plan.num_decode_requests
        num_tokens = len(plan.input_token_ids)
        self._launch = _Launch(
            made,
            plan.step_id,
            num_decodes,
            num_tokens - int(plan.query_start_loc[num_decodes]),
            verified,
            num_tokens,
            num_executed_tokens,
            self._timer.idle_s,
            ended,
        )

    def _decided(self, plan: StepPlan, sampled: npt.NDArray[np.intp], ended: Mark) -> Round | None:
        """Ask the schedule about the requests that a step samples."""
        if len(sampled) == 0:
            return None
        self._num_rounds += 1
        seq_lens, counts = plan.seq_lens[sampled], plan.num_draft_tokens[sampled]
        # The last position is never an input, and the anchor takes one. How many of the step's
        # drafts stand is not known yet.
        room = self._max_position - 2 - (seq_lens - counts)
        scheduled = plan.num_scheduled_tokens
        draft_round = DraftRound(
            number=self._num_rounds,
            request_ids=plan.request_ids[sampled].astype(np.int64),
            slots=plan.request_slots[sampled],
            generations=plan.slot_generations[sampled],
            limits=np.minimum(np.maximum(room, 0), self._num_drafts, dtype=np.int32),
            num_other_tokens=int(scheduled.sum() - scheduled[sampled].sum()),
            num_context_tokens=int(seq_lens.sum()),
        )
        decision = self.schedule.decide(draft_round)
        return Round(draft_round, draft_round.request_ids.tolist(), decision, ended)

    def _observe(self, launch: _Launch, request_ids: list[int], windows: list[list[int]]) -> None:
        """Report a round whose step has ended, and let the schedule learn."""
        made = launch.draft_round
        accepted = np.array([len(window) - 1 for window in windows], np.int32)
        if request_ids != made.ids:
            found = dict(zip(request_ids, accepted.tolist(), strict=True))
            accepted = np.array([found.get(request_id, 0) for request_id in made.ids], np.int32)
        num_verified = int(launch.num_verified.sum())
        planned = 0 if made.lens is None else int(made.lens.sum())
        shape = (launch.num_executed_tokens, made.decision.drafts, num_verified == 0)
        measured_us, is_typical = self._timer.typical_us(
            made.began, launch.ended, launch.idle_s, shape
        )
        is_typical = (
            is_typical
            and num_verified == planned
            and launch.num_requests == len(made.ids)
            and launch.num_other_tokens == made.draft_round.num_other_tokens == 0
        )
        judgement = self.schedule.observe(
            launch.num_verified, accepted, measured_us if is_typical else None
        )
        whole = self._executed(launch.num_tokens - num_verified + made.num_available)
        report = SpeculationReport(
            step_id=launch.step_id,
            reason=made.decision.reason,
            has_drafted=made.decision.drafts,
            num_requests=launch.num_requests,
            num_other_tokens=launch.num_other_tokens,
            budget=made.decision.budget,
            num_available=made.num_available,
            num_verified=num_verified,
            num_accepted=int(accepted.sum()),
            num_executed_tokens=launch.num_executed_tokens,
            num_padding_tokens=launch.num_executed_tokens - launch.num_tokens,
            requested_trim=made.num_available - num_verified,
            landed_trim=max(0, whole - launch.num_executed_tokens) if made.num_available else 0,
            predicted_us=judgement.predicted_us,
            predicted_gain=judgement.predicted_gain,
            measured_us=measured_us,
            is_typical=is_typical,
        )
        self.reports.append(report)
        if self.on_report is not None:
            self.on_report(report)

    def _executed(self, num_tokens: int) -> int:
        """Return the tokens that run for a step with drafts of so many."""
        place = bisect.bisect_left(self._token_sizes, num_tokens)
        return self._token_sizes[place] if place < len(self._token_sizes) else num_tokens
