"""Drafting in the engine's step: verify what was drafted before, then draft what comes next.

A schedule says after each step whether the draft pass runs, and how many drafts of each request the
next step verifies.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.dspark.schedule import DraftRound, FixedSchedule
from extkv.dspark.speculator import DraftRequests
from extkv.dspark.step_reports import SpeculationReport
from extkv.dspark.step_timer import StepTimer
from extkv.dspark.verification import PendingWindows, Verifier, Window
from extkv.engine.sampled_tokens import HostCopy
from extkv.engine.sampling_slots import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from extkv.dspark.options import SpeculativeOptions
    from extkv.dspark.plans import Decision
    from extkv.dspark.schedule import VerifySchedule
    from extkv.dspark.speculator import Speculator
    from extkv.dspark.step_timer import Mark
    from extkv.dspark.verification import DraftCounts
    from extkv.engine.batch import StepInputs
    from extkv.engine.sampled_tokens import PendingTokens
    from extkv.engine.sampler import Sampler
    from extkv.sched import Scheduler, StepPlan

# Reports kept: some minutes of steps.
NUM_REPORTS = 8192


class _HostDrafts:
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
        self._copy = HostCopy(torch.cat([drafts.to(torch.int32), *bits], dim=1))

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
class _Round:
    """What is drafted after a step, up to the end of the step that verifies it."""

    draft_round: DraftRound
    ids: list[int]
    decision: Decision
    began: Mark
    drafts: _HostDrafts | None = None
    lens: npt.NDArray[np.int32] | None = None
    num_available: int = 0


@dataclass(frozen=True)
class _Launch:
    """The step that verifies a round, as it runs."""

    draft_round: _Round
    step_id: int
    num_requests: int
    num_other_tokens: int
    num_verified: npt.NDArray[np.int32]
    num_tokens: int
    num_executed_tokens: int
    idle_s: float
    ended: Mark


class Drafting:
    """Decide the tokens of a step that has drafts, and draft for the next one."""

    def __init__(
        self,
        speculator: Speculator,
        sampler: Sampler,
        options: SpeculativeOptions,
        schedule: VerifySchedule | None = None,
        token_sizes: Sequence[int] = (),
    ) -> None:
        """Join a speculator and the sampler.

        Args:
            speculator: Attached to the engine's cache.
            sampler: The engine's sampler.
            options: How to verify.
            schedule: How many drafts to verify; None for the fixed number of the options.
            token_sizes: Numbers of tokens that steps with drafts run at, rising; none if each runs
                as it is.
        """
        self._speculator, self._sampler = speculator, sampler
        self._verifier = Verifier(sampler, options, num_drafts=speculator.num_drafts)
        if schedule is None:
            schedule = FixedSchedule(speculator.num_drafts, options.fixed_verify_len)
        self.schedule = schedule
        self.on_report: Callable[[SpeculationReport], object] | None = None
        self.reports: deque[SpeculationReport] = deque(maxlen=NUM_REPORTS)
        self._token_sizes = list(token_sizes)
        self._timer = StepTimer(sampler.device)
        self._num_rounds = 0
        # Row of each request in the last draft round, where the law of its drafts is.
        self._row_of: dict[int, int] = {}
        self._round: _Round | None = None
        self._launch: _Launch | None = None

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return self._speculator.num_drafts

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots that a draft block takes after a request's tokens."""
        return self._speculator.model.config.block_size

    @property
    def counts(self) -> DraftCounts:
        """Drafts verified and accepted so far."""
        return self._verifier.counts

    @torch.inference_mode()
    def place(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Put the last round's drafts where a step has placeholders for them.

        Args:
            plan: The step.
            inputs: The step on the device; its tokens are mutated.
        """
        self._timer.begin()
        num_drafts = plan.num_draft_tokens
        rows = num_drafts.nonzero()[0]
        if len(rows) == 0:
            return
        ends, counts = plan.query_start_loc[1:][rows], num_drafts[rows]
        sources = [self._row_of[request_id] for request_id in plan.request_ids[rows].tolist()]
        slots = np.concatenate([np.arange(count) for count in counts])
        targets = np.repeat(ends - counts, counts) + slots
        index = np.stack([targets, np.repeat(sources, counts), slots]).astype(np.int64)
        on_device = upload(index, inputs.token_ids.device)
        drafts = self._speculator.tokens[on_device[1], on_device[2]]
        inputs.token_ids.index_copy_(0, on_device[0], drafts)

    @torch.inference_mode()
    def decide(
        self,
        plan: StepPlan,
        sampled: npt.NDArray[np.intp],
        logits: torch.Tensor,
        inputs: StepInputs,
    ) -> PendingTokens | PendingWindows:
        """Choose the tokens of a step, and draft after them.

        Args:
            plan: The step.
            sampled ([num_sampled]): Rows of the plan that are sampled.
            logits (model dtype, [num_rows, vocab_size], device): Their rows, drafts included.
            inputs: The step on the device.

        Returns:
            The tokens, on their way to the host. The drafts stay on the device for the next step.
        """
        windows = self._windows(plan, sampled)
        pending: PendingTokens | PendingWindows
        num_drafts = plan.num_draft_tokens[sampled]
        if num_drafts.any():
            ids = plan.request_ids[sampled].tolist()
            rows = np.array([self._row_of.get(request_id, 0) for request_id in ids], np.int64)
            law = self._speculator.law(upload(rows, logits.device))
            pending = self._verifier.verify(logits, windows, law)
            next_tokens = pending.verification.next_tokens
        else:
            pending = self._sampler.sample(
                logits,
                [window.slot for window in windows],
                [window.generation for window in windows],
                [window.position for window in windows],
            )
            next_tokens = pending.token_ids
        ended = self._timer.mark()
        self._start(plan, inputs, ended)
        made = self._round = self._decided(plan, sampled, ended)
        if made is not None and made.decision.drafts:
            num_rejected = upload(num_drafts.astype(np.int32), logits.device)
            if isinstance(pending, PendingWindows):
                num_rejected = num_rejected - pending.verification.num_accepted
            requests = self._requests(plan, sampled, next_tokens, num_rejected)
            drafts = self._speculator.propose(inputs, requests)
            made.drafts = _HostDrafts(self._speculator, drafts, sampled)
            self._row_of = dict(zip(made.ids, sampled.tolist(), strict=True))
        return pending

    @property
    def waits(self) -> bool:
        """Whether `end_step` will wait for the draft pass."""
        return self._round is not None and self.schedule.waits

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
        made = self._round
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
        self._round = self._launch = None
        self._row_of = {}
        self.schedule.reset()

    def _start(self, plan: StepPlan, inputs: StepInputs, ended: Mark) -> None:
        """Note that a step was launched that verifies the last round, or does without."""
        made = self._round
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
            inputs.positions.shape[0],
            self._timer.idle_s,
            ended,
        )

    def _decided(self, plan: StepPlan, sampled: npt.NDArray[np.intp], ended: Mark) -> _Round | None:
        """Ask the schedule about the requests that a step samples."""
        if len(sampled) == 0:
            return None
        self._num_rounds += 1
        seq_lens, counts = plan.seq_lens[sampled], plan.num_draft_tokens[sampled]
        # The last position is never an input, and the anchor takes one. How many of the step's
        # drafts stand is not known yet.
        room = self._speculator.max_position - 2 - (seq_lens - counts)
        scheduled = plan.num_scheduled_tokens
        draft_round = DraftRound(
            number=self._num_rounds,
            request_ids=plan.request_ids[sampled].astype(np.int64),
            slots=plan.request_slots[sampled],
            generations=plan.slot_generations[sampled],
            limits=np.clip(room, 0, self.num_drafts).astype(np.int32),
            num_other_tokens=int(scheduled.sum() - scheduled[sampled].sum()),
            num_context_tokens=int(seq_lens.sum()),
        )
        decision = self.schedule.decide(draft_round)
        return _Round(draft_round, draft_round.request_ids.tolist(), decision, ended)

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

    def _windows(self, plan: StepPlan, sampled: npt.NDArray[np.intp]) -> list[Window]:
        ids = plan.request_ids[sampled].tolist()
        counts = plan.num_draft_tokens[sampled].tolist()
        ends = plan.query_start_loc[1:][sampled] - plan.num_draft_tokens[sampled]
        last_tokens = plan.input_token_ids[ends - 1].tolist()
        drafts: list[list[int]] = []
        if any(counts) and self._round is not None and self._round.drafts is not None:
            # They were drafted before this step began, so this waits for nothing new.
            drafts = self._round.drafts.tokens()
        return [
            Window(
                slot,
                generation,
                length - count,
                last_token,
                drafts[self._row_of[request_id]][:count] if count else [],
            )
            for request_id, slot, generation, length, last_token, count in zip(
                ids,
                plan.request_slots[sampled].tolist(),
                plan.slot_generations[sampled].tolist(),
                plan.seq_lens[sampled].tolist(),
                last_tokens,
                counts,
                strict=True,
            )
        ]

    def _requests(
        self,
        plan: StepPlan,
        sampled: npt.NDArray[np.intp],
        next_tokens: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> DraftRequests:
        """Return what the draft round needs, one entry per row of the plan."""
        device = next_tokens.device
        if len(sampled) < plan.num_requests:
            index = upload(sampled.astype(np.int64), device)
            # A request that still computes its prompt keeps no row, and so drafts nothing.
            rejected = upload(plan.num_scheduled_tokens.astype(np.int32), device)
            num_rejected = rejected.index_copy(0, index, num_rejected)
            anchors = torch.zeros(plan.num_requests, dtype=torch.int64, device=device)
            next_tokens = anchors.index_copy(0, index, next_tokens)
        slots, positions = plan.request_slots.tolist(), plan.seq_lens.tolist()
        parameters = self._sampler.parameters(slots, positions)
        return DraftRequests(next_tokens, num_rejected, parameters.temperature, parameters.seed)
