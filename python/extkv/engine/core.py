"""The engine's loop: requests in, one step at a time, tokens out.

A step is: the scheduler plans, the runner computes logits, the sampler chooses, the scheduler is
told, and the sequences get their tokens and texts. With asynchronous scheduling, which is usual on
CUDA, the last part of a step runs on the host while the device computes the next step. One request
of a user may have several sequences here (`n` outputs); this module knows sequences only.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.engine.sampling_slots import SlotRequest, upload
from extkv.errors import DeviceLostError, OutOfMemoryError, SchedulerError
from extkv.models.tokenizer import IncrementalDetokenizer
from extkv.output_text import OutputText
from extkv.outputs import CompletionOutput, RequestMetrics
from extkv.sched import FinishReason, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.dspark.drafting import Drafting
    from extkv.dspark.verification import PendingWindows
    from extkv.engine.config import EngineConfig
    from extkv.engine.runner import ModelRunner
    from extkv.engine.sampled_tokens import PendingLogprobs, PendingTokens
    from extkv.engine.sampler import Sampler
    from extkv.models.tokenizer import Tokenizer
    from extkv.outputs import LogprobEntry, RowLogprobs
    from extkv.resolved_sampling import ResolvedSampling
    from extkv.sched import RequestOutput as ScheduledOutput
    from extkv.sched import StepOutput, StepPlan


# Newer than the oldest torch that the package takes.
_DEVICE_ERRORS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)


@dataclass
class Sequence:
    """One output of a request, as it grows.

    Attributes:
        sequence_id: Its id in the scheduler.
        prompt_token_ids: Its prompt.
        sampling: Its parameters.
        seed: Its random key.
        text: Its text.
        output: What the user sees of it.
        metrics: When it passed its stations.
        prompt_logprobs: One entry per prompt token but the first, as far as computed.
        error: Why it failed.
        num_cached_tokens: Prompt tokens that the prefix cache saved.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    sampling: ResolvedSampling
    seed: int
    text: OutputText
    output: CompletionOutput
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobEntry | None] | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)


@dataclass
class _Flight:
    """A step that the device computes.

    Attributes:
        sampled_ids: The sequences it samples, in row order.
        tokens: Their tokens.
        prompt_logprobs: Sequences with log-probabilities of prompt tokens, and those.
    """

    sampled_ids: list[int]
    tokens: PendingTokens | PendingWindows
    prompt_logprobs: list[tuple[int, PendingLogprobs]]


class EngineCore:
    """Scheduler, runner and sampler around one model.

    Args:
        runner: A started runner.
        sampler: A sampler with as many slots as sequences may run.
        config: Limits.
        tokenizer: For texts and stop strings.
        eos_token_id: The model's main end-of-sequence token.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        drafting: Drafting | None = None,
    ) -> None:
        self.runner = runner
        self.drafting = drafting
        self.sampler = sampler
        self._tokenizer = tokenizer
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            vocab_size=runner.model.config.vocab_size,
            block_size=config.block_size,
            num_blocks=runner.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            num_speculative_tokens=0 if drafting is None else drafting.num_drafts,
            num_lookahead_tokens=0 if drafting is None else drafting.num_lookahead_tokens,
        )
        self._sequences: dict[int, Sequence] = {}
        self._occupants: dict[int, tuple[int, int]] = {}
        self._slot_of: dict[int, int] = {}
        self._next_id = 0
        self._overlaps = config.async_scheduling
        if self._overlaps is None:
            self._overlaps = runner.model.device.type == "cuda"
        self._flight: _Flight | None = None
        # Steps whose tokens the scheduler knows, but the sequences and the sampler do not; then
        # those whose texts are not made.
        self._collected: list[tuple[StepOutput, dict[int, list[RowLogprobs]]]] = []
        self._absorbed: list[tuple[list[ScheduledOutput], dict[int, list[RowLogprobs]]]] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sequences)

    def add(
        self,
        prompt_token_ids: list[int],
        sampling: ResolvedSampling,
        *,
        seed: int,
        index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Queue a sequence.

        Raises:
            InvalidRequestError: If it can never run.
        """
        params = sampling.params
        sequence_id = self._next_id
        self.scheduler.add_request(
            sequence_id,
            prompt_token_ids,
            max_tokens=sampling.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            eos_token_id=sampling.eos_token_id,
            ignore_eos=params.ignore_eos,
            priority=priority,
            cache_salt=cache_salt,
            # Logits of a prompt's tokens exist only where they are computed.
            skip_reading_prefix_cache=params.prompt_logprobs is not None,
        )
        self._next_id += 1
        sequence = Sequence(
            sequence_id=sequence_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=seed,
            text=OutputText(self._detokenizer(sampling), sampling),
            output=CompletionOutput(index, logprobs=None if params.logprobs is None else []),
            metrics=RequestMetrics(time.monotonic()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        if params.logprobs is not None:
            sequence.output.cumulative_logprob = 0.0
        self._sequences[sequence_id] = sequence
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a sequence from outside; does nothing if it has ended."""
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self.scheduler.abort(sequence.sequence_id)
            self._close(sequence, FinishReason.ABORT, None)

    def resize_cache(self, num_blocks: int) -> None:
        """Grow or shrink the cache between two steps, while requests run.

        Shrinking preempts the requests that hold blocks at the end; they come back by recompute.

        Raises:
            OutOfMemoryError: If the device is too full; nothing changed.
            SchedulerError: If a live request may need more blocks than are left.
        """
        self._collect()
        cache = self.runner.cache
        if num_blocks >= self.scheduler.num_blocks:
            cache.commit(num_blocks)
            self.scheduler.grow(num_blocks)
        else:
            self.scheduler.vacate(num_blocks)
            self.scheduler.shrink(num_blocks)
            cache.shrink(min(num_blocks, cache.num_blocks))

    def step(self) -> list[Sequence]:
        """Run one step and return the sequences that got a token or ended.

        With asynchronous scheduling what is returned is of the step before, and the device computes
        the next one on return. A failure or an interrupt in the middle gives the step up: the next
        call computes it again.

        Raises:
            DeviceLostError: If the device reports an error, such as an illegal access.
        """
        try:
            return self._step()
        except _DEVICE_ERRORS as error:
            raise DeviceLostError(
                f"the device failed in a step, which was given up: {error}. If the next one fails "
                "too, only a new process helps"
            ) from error

    def _step(self) -> list[Sequence]:
        self._collect()
        try:
            self._launch()
            if not self._overlaps:
                self._collect()
        except Exception:
            self._give_up()
            raise
        self._absorb()
        changed: list[Sequence] = []
        while self._absorbed:
            outputs, logprobs = self._absorbed.pop(0)
            changed += [
                self._advance(scheduled, logprobs.get(scheduled.request_id, []))
                for scheduled in outputs
                if scheduled.request_id in self._sequences
            ]
        return changed

    def _launch(self) -> None:
        """Plan a step and start it."""
        if self.scheduler.step_in_flight is not None:
            # An interrupt came between plan and start.
            self._give_up()
        plan = self._schedule()
        now = time.monotonic()
        for sequence_id in plan.preempted_request_ids:
            if sequence_id in self._sequences:
                self._sequences[sequence_id].metrics.note_preempted(now)
        if plan.is_empty:
            return
        rows = [self._sequences[sequence_id] for sequence_id in plan.request_ids.tolist()]
        wants_prompt: list[range] = []
        if not plan.is_pure_decode:
            wants_prompt = [self._prompt_rows(plan, row, s) for row, s in enumerate(rows)]
        is_prompt = any(wants_prompt)
        place_drafts = None if self.drafting is None else self.drafting.place
        logits = self.runner.run(plan, prompt_logits=is_prompt, place_drafts=place_drafts)
        # The device computes: from here to `_collect` the host has time.
        self._absorb()
        self._enter_slots(plan, rows, now)
        prompt_logprobs = []
        if is_prompt:
            prompt_logprobs = self._prompt_logprobs(plan, rows, logits, wants_prompt)
            kept = upload(plan.sample_rows.astype(np.int64), logits.device)
            logits = logits.index_select(0, kept)
        starts = plan.sample_start_loc
        sampled = (starts[1:] != starts[:-1]).nonzero()[0]
        sampled_ids = plan.request_ids[sampled].tolist()
        tokens: PendingTokens | PendingWindows
        if self.drafting is not None:
            tokens = self.drafting.decide(plan, sampled, logits, self.runner.inputs)
            self._flight = _Flight(sampled_ids, tokens, prompt_logprobs)
            return
        tokens = self.sampler.sample(
            logits,
            plan.request_slots[sampled].tolist(),
            plan.slot_generations[sampled].tolist(),
            plan.seq_lens[sampled].tolist(),
        )
        self._flight = _Flight(sampled_ids, tokens, prompt_logprobs)

    def _schedule(self) -> StepPlan:
        """Plan a step whose blocks are backed; where memory ends, so does the pool from then on.

        Raises:
            OutOfMemoryError: If the blocks that memory is there for may not hold a live request.
        """
        cache = self.runner.cache
        while True:
            plan = self.scheduler.schedule()
            try:
                self.runner.back(plan)
            except OutOfMemoryError as error:
                self.scheduler.cancel_step()
                num_blocks = cache.num_blocks + (error.available or 0) // cache.bytes_per_block
                try:
                    self.resize_cache(min(num_blocks, self.scheduler.num_blocks - 1))
                except SchedulerError:
                    raise error from None
            else:
                return plan

    def _collect(self) -> None:
        """Wait for the step in flight and tell the scheduler; nothing if there is none."""
        flight = self._flight
        if flight is None:
            return
        try:
            result = flight.tokens.wait()
            for sequence_id, pending in flight.prompt_logprobs:
                sequence = self._sequences.get(sequence_id)
                if sequence is not None and sequence.prompt_logprobs is not None:
                    entries = [found.to_entry(self._decode_one) for found in pending.wait()]
                    sequence.prompt_logprobs.extend(entries)
        except Exception:
            self._give_up()
            raise
        self._flight = None
        ids = flight.sampled_ids
        for index, reason in result.failures.items():
            if ids[index] in self._sequences:
                self._sequences[ids[index]].error = reason
        failed = [ids[index] for index in result.failures]
        offsets = [0, *itertools.accumulate(map(len, result.windows))]
        tokens = list(itertools.chain.from_iterable(result.windows))
        step = self.scheduler.update(ids, offsets, tokens, failed)
        logprobs = {ids[index]: value for index, value in result.window_logprobs.items()}
        self._collected.append((step, logprobs))
        if self.drafting is not None:
            if self.drafting.waits:
                self._absorb()
            alive = step.request_ids[step.finish_reasons < 0].tolist()
            alive = [sequence_id for sequence_id in alive if sequence_id in self._sequences]
            self.drafting.end_step(ids, result.windows, alive, self.scheduler)

    def _absorb(self) -> None:
        """Tell sequences and sampler the tokens of collected steps."""
        while self._collected:
            step, logprobs = self._collected.pop(0)
            outputs = step.requests()
            for scheduled in outputs:
                sequence = self._sequences.get(scheduled.request_id)
                if sequence is not None:
                    sequence.token_ids += scheduled.token_ids
                    self.sampler.append(self._slot_of[scheduled.request_id], scheduled.token_ids)
            self._absorbed.append((outputs, logprobs))

    def _give_up(self) -> None:
        self._flight = None
        if self.drafting is not None:
            self.drafting.reset()
        if self.scheduler.step_in_flight is not None:
            self.scheduler.cancel_step()

    def _enter_slots(self, plan: StepPlan, rows: list[Sequence], now: float) -> None:
        slots, generations = plan.request_slots.tolist(), plan.slot_generations.tolist()
        for row, sequence in enumerate(rows):
            occupant = (generations[row], sequence.sequence_id)
            if self._occupants.get(slots[row]) != occupant:
                self._occupants[slots[row]] = occupant
                sequence.metrics.note_scheduled(now)
                request = SlotRequest(
                    sequence.sampling,
                    sequence.prompt_token_ids,
                    sequence.seed,
                    tuple(sequence.token_ids),
                )
                self.sampler.enter(slots[row], generations[row], request)
            self._slot_of[sequence.sequence_id] = slots[row]

    def _advance(self, scheduled: ScheduledOutput, logprobs: list[RowLogprobs]) -> Sequence:
        """Give a sequence what its new tokens bring: text, log-probabilities, ends."""
        sequence = self._sequences[scheduled.request_id]
        sequence.num_cached_tokens = scheduled.num_cached_tokens
        reason = scheduled.finish_reason
        last = len(scheduled.token_ids) - 1
        now = time.monotonic()
        for place, token_id in enumerate(scheduled.token_ids):
            sequence.metrics.add_token(now)
            if logprobs and sequence.output.logprobs is not None:
                sequence.output.logprobs.append(logprobs[place].to_entry(self._decode_one))
                total = sequence.output.cumulative_logprob or 0.0
                sequence.output.cumulative_logprob = total + logprobs[place].logprob
            is_stop = reason is FinishReason.STOP and place == last
            stop = sequence.text.push(token_id, is_stop_token=is_stop)
            if stop is not None:
                if reason is None:
                    self.scheduler.finish(sequence.sequence_id, FinishReason.STOP)
                # As in vLLM, a stop string counts more than a length limit at the same token.
                reason = FinishReason.STOP
                sequence.output.stop_reason = stop
                del sequence.token_ids[len(sequence.token_ids) - last + place :]
                break
        sequence.output.token_ids = sequence.token_ids
        sequence.output.text = sequence.text.text
        if reason is not None:
            if scheduled.stop_token_id is not None:
                sequence.output.stop_reason = scheduled.stop_token_id
            del self._sequences[sequence.sequence_id]
            self._close(sequence, reason, sequence.output.stop_reason)
        return sequence

    def _close(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self._slot_of.pop(sequence.sequence_id, None)
        sequence.output.text = sequence.text.finish()
        sequence.output.finish_reason = reason.value
        sequence.output.stop_reason = stop_reason
        sequence.output.error = sequence.error

    def _prompt_rows(self, plan: StepPlan, row: int, sequence: Sequence) -> range:
        """Tokens of the step whose logits predict prompt tokens that a sequence wants to see."""
        if sequence.prompt_logprobs is None:
            return range(0)
        computed = int(plan.num_computed_tokens[row])
        last = min(
            computed + int(plan.num_scheduled_tokens[row]), len(sequence.prompt_token_ids) - 1
        )
        start = max(computed, len(sequence.prompt_logprobs) - 1)
        offset = int(plan.query_start_loc[row]) - computed
        return range(start + offset, max(start, last) + offset)

    def _prompt_logprobs(
        self, plan: StepPlan, rows: list[Sequence], logits: torch.Tensor, wanted: list[range]
    ) -> list[tuple[int, PendingLogprobs]]:
        """Start to compute log-probabilities of prompt tokens for the sequences that want them."""
        found = []
        for row, (sequence, token_rows) in enumerate(zip(rows, wanted, strict=True)):
            num_logprobs = sequence.sampling.params.prompt_logprobs
            if not token_rows or num_logprobs is None:
                continue
            shift = int(plan.num_computed_tokens[row]) - int(plan.query_start_loc[row]) + 1
            targets = sequence.prompt_token_ids[token_rows.start + shift : token_rows.stop + shift]
            part = logits[token_rows.start : token_rows.stop]
            pending = self.sampler.prompt_logprobs(part, targets, num_logprobs)
            found.append((sequence.sequence_id, pending))
        return found

    def _detokenizer(self, sampling: ResolvedSampling) -> IncrementalDetokenizer | None:
        if self._tokenizer is None or not sampling.params.detokenize:
            return None
        return IncrementalDetokenizer(self._tokenizer)

    @property
    def _decode_one(self) -> Callable[[int], str] | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda token_id: tokenizer.decode([token_id])
