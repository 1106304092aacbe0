"""Drafting in the engine's step: verify what was drafted before, then draft what comes next.

A schedule says after each step whether the draft pass runs, and how many drafts of each request the
next step verifies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.drafting import DraftRequests
from extkv.dspark.rounds import HostDrafts, RoundBook
from extkv.dspark.schedule import FixedSchedule
from extkv.dspark.timing import SpanTimer
from extkv.dspark.verification import PendingWindows, PlacedRows, Verifier, Window
from extkv.engine.sampling_slots import KeptUpload, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from extkv.dspark.options import SpeculativeOptions
    from extkv.dspark.schedule import VerifySchedule
    from extkv.dspark.speculator import Speculator
    from extkv.dspark.verification import DraftCounts
    from extkv.engine.batch import StepInputs
    from extkv.engine.sampled_tokens import PendingTokens
    from extkv.engine.sampler import Sampler
    from extkv.sched import Scheduler, StepPlan


class Drafting:
    """Decide the tokens of a step that has drafts, and draft for the next one.

    Attributes:
        rounds: What is drafted and verified, with its schedule and reports.
    """

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
        self.rounds = RoundBook(
            schedule,
            sampler.device,
            num_drafts=speculator.num_drafts,
            max_position=speculator.max_position,
            token_sizes=token_sizes,
        )
        # Row of each request in the last draft round, where the law of its drafts is.
        self._row_of: dict[int, int] = {}
        self._law_rows, self._window_lens = KeptUpload(sampler.device), KeptUpload(sampler.device)
        self._draft_timer, self._verify_timer = SpanTimer(sampler.device), SpanTimer(sampler.device)

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return self._speculator.num_drafts

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots that a draft block takes after a request's tokens."""
        return self._speculator.model.config.block_size

    @property
    def schedule(self) -> VerifySchedule:
        """Says whether to draft and how many drafts to verify.

        Another one may take its place while no request runs.
        """
        return self.rounds.schedule

    @schedule.setter
    def schedule(self, schedule: VerifySchedule) -> None:
        self.reset()
        self.rounds.schedule = schedule

    @property
    def waits(self) -> bool:
        """Whether `end_step` waits for the draft pass."""
        return self.rounds.waits

    @property
    def counts(self) -> DraftCounts:
        """Drafts verified and accepted so far, and how long that took as far as it is known."""
        counts = self._verifier.counts
        counts.draft_s, counts.verify_s = self._draft_timer.total_s, self._verify_timer.total_s
        return counts

    @torch.inference_mode()
    def place(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Put the last round's drafts where a step has placeholders for them.

        Args:
            plan: The step.
            inputs: The step on the device; its tokens are mutated.
        """
        self.rounds.begin_step()
        counts = plan.num_draft_tokens
        rows = counts.nonzero()[0]
        if len(rows) == 0:
            return
        counts = counts[rows]
        ids = plan.request_ids[rows].tolist()
        sources = np.array([self._row_of[request_id] for request_id in ids], np.int64)
        firsts = plan.query_start_loc[1:][rows] - counts
        tokens = self._speculator.tokens
        slots = np.arange(counts.max())
        is_draft = slots < counts[:, None]
        index = np.empty((2, int(counts.sum())), np.int64)
        index[0] = (firsts[:, None] + slots)[is_draft]
        index[1] = (sources[:, None] * tokens.shape[1] + slots)[is_draft]
        on_device = upload(index, inputs.token_ids.device)
        drafts = tokens.view(-1).index_select(0, on_device[1])
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
            law = self._speculator.law(self._law_rows(rows))
            placed = None
            if plan.is_pure_decode and len(logits) == plan.num_tokens:
                placed = PlacedRows(
                    inputs.token_ids[: plan.num_tokens],
                    inputs.query_start_loc[: plan.num_requests + 1],
                    inputs.positions[: plan.num_tokens] + 1,
                )
            with self._verify_timer.span():
                pending = self._verifier.verify(logits, windows, law, placed)
            self._verifier.counts.num_verifications += 1
            next_tokens = pending.verification.next_tokens
        else:
            pending = self._sampler.sample(
                logits,
                [window.slot for window in windows],
                [window.generation for window in windows],
                [window.position for window in windows],
            )
            next_tokens = pending.token_ids
        made = self.rounds.next_round(plan, sampled, inputs.positions.shape[0])
        if made is not None and made.decision.drafts:
            num_rejected = self._window_lens(num_drafts)
            if isinstance(pending, PendingWindows):
                num_rejected = num_rejected - pending.verification.num_accepted
            requests = self._requests(plan, sampled, next_tokens, num_rejected)
            with self._draft_timer.span():
                drafts = self._speculator.propose(inputs, requests)
            self._verifier.counts.num_draft_rounds += 1
            made.drafts = HostDrafts(self._speculator, drafts, sampled)
            self._row_of = dict(zip(made.ids, sampled.tolist(), strict=True))
        return pending

    def end_step(
        self,
        request_ids: list[int],
        windows: list[list[int]],
        alive_ids: list[int],
        scheduler: Scheduler,
    ) -> None:
        """Learn from a step's tokens, and offer the next drafts; see `RoundBook.end_step`."""
        self.rounds.end_step(request_ids, windows, alive_ids, scheduler)

    def reset(self) -> None:
        """Give up what is drafted and not verified, when a step was given up."""
        self._row_of = {}
        self.rounds.reset()

    def _windows(self, plan: StepPlan, sampled: npt.NDArray[np.intp]) -> list[Window]:
        ids = plan.request_ids[sampled].tolist()
        counts = plan.num_draft_tokens[sampled].tolist()
        ends = plan.query_start_loc[1:][sampled] - plan.num_draft_tokens[sampled]
        last_tokens = plan.input_token_ids[ends - 1].tolist()
        drafts: list[list[int]] = []
        made = self.rounds.round
        if any(counts) and made is not None and made.drafts is not None:
            # They were drafted before this step began, so this waits for nothing new.
            drafts = made.drafts.tokens()
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
        temperature, seeds = self._sampler.draw_parameters(plan.request_slots.tolist())
        return DraftRequests(next_tokens, num_rejected, temperature, seeds)
