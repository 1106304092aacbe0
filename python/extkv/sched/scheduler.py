"""Which requests run in the next step, on which blocks, and what came of it.

A typed view of the native scheduler with vLLM's names. Calls from several threads are safe and run
one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from extkv import _extkv
from extkv.sched.steps import SchedulerStats, StepOutput, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from extkv.sched.steps import FinishReason

    Integers = Sequence[int] | npt.NDArray[np.integer]

SchedulingPolicy = Literal["fcfs", "priority"]


class Scheduler:
    """Continuous batching over a paged KV cache; one step is in flight at most.

    `schedule` makes a plan, `update` reports its result or `cancel_step` gives it up. Requests may
    come and go at any time, also in between. Equal calls give equal plans.

    Example:
        >>> scheduler = Scheduler(
        ...     max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, vocab_size=100,
        ...     block_size=16, num_blocks=32,
        ... )
        >>> scheduler.add_request(1, [5, 6, 7], max_tokens=1)
        >>> scheduler.schedule().input_token_ids.tolist()
        [5, 6, 7]
        >>> output = scheduler.update([1], [0, 1], [8])
        >>> output.requests()[0].finish_reason.value
        'length'
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            max_num_seqs: Most running requests, and number of slots.
            max_num_batched_tokens: Most tokens of a step.
            max_model_len: Longest sequence, prompt and output.
            vocab_size: Token ids are below this.
            block_size: Tokens per KV block.
            num_blocks: KV blocks at the start.
            num_speculative_tokens: Most drafts of a request in a step.
            num_lookahead_tokens: KV slots kept ready after a request's scheduled tokens.
            policy: ``"fcfs"``, or ``"priority"``: lower value first, then first come.
            enable_chunked_prefill: Whether prompts are cut at the token budget.
            long_prefill_token_threshold: Most tokens of one request in one step; 0 for no limit.
                Only chunked prefill has one.
            enable_prefix_caching: Whether full blocks are found again.

        Raises:
            SchedulerError: If a limit is out of range or contradicts another.
        """
        self._native = _extkv.Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            block_size=block_size,
            num_blocks=num_blocks,
            num_speculative_tokens=num_speculative_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            policy=policy,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_prefix_caching=enable_prefix_caching,
        )

    @property
    def max_num_draft_requests(self) -> int:
        """Most requests of a draft batch in which each has all its drafts."""
        return self._native.max_num_draft_requests

    @property
    def max_num_sample_rows(self) -> int:
        """Most rows that a step samples: one per request and one per draft, within the budget."""
        return self._native.max_num_sample_rows

    @property
    def max_num_blocks_per_request(self) -> int:
        """Most blocks of one request: the width of a block table that never has to grow."""
        return self._native.max_num_blocks_per_request

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool now."""
        return self._native.num_blocks()

    @property
    def step_in_flight(self) -> int | None:
        """Number of the step in flight, None if there is none."""
        return self._native.step_in_flight()

    def num_blocks_needed(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Most blocks that a request may need, drafts and lookahead included.

        Raises:
            SchedulerError: If a number is negative or above 32 bits.
        """
        return self._native.num_blocks_needed(num_prompt_tokens, max_tokens)

    def add_request(
        self,
        request_id: int,
        prompt_token_ids: Integers,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        eos_token_id: int | None = None,
        ignore_eos: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        extra_keys: Iterable[int] = (),
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request_id: Its id, unsigned 64 bits, unique among live requests.
            prompt_token_ids: Its prompt, at least one token; an int32 array is copied as a whole.
            max_tokens: Most output tokens, at least 1.
            min_tokens: Output tokens before which neither end-of-sequence nor a stop token ends it.
            stop_token_ids: Tokens that end it; the one that does is part of the output.
            eos_token_id: The model's end-of-sequence token.
            ignore_eos: Whether `eos_token_id` is an ordinary token.
            priority: Rank under the priority policy, lower first.
            cache_salt: Blocks are shared only with requests of the same salt.
            extra_keys: Adapter, image hashes and the like, which also decide the blocks' content.
            skip_reading_prefix_cache: Compute the whole prompt though a prefix is cached.

        Raises:
            InvalidRequestError: If it can never run, for example because the prompt is empty, too
                long, outside the vocabulary, or larger than the pool, or its id is in use.
        """
        self._native.add_request(
            request_id,
            _packed(prompt_token_ids, np.int32),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            eos_token_id=eos_token_id,
            ignore_eos=ignore_eos,
            priority=priority,
            cache_salt=cache_salt,
            extra_keys=extra_keys,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )

    def schedule(self) -> StepPlan:
        """Plan the next step. It is in flight until `update` or `cancel_step`, unless it is empty.

        Raises:
            SchedulerError: If a step is in flight.
        """
        return StepPlan.from_native(self._native.schedule())

    def update(
        self,
        request_ids: Integers,
        token_offsets: Integers,
        token_ids: Integers,
        failed_request_ids: Iterable[int] = (),
    ) -> StepOutput:
        """End the step in flight with its results.

        Every request whose row samples needs a result: its accepted drafts in order, then the one
        token sampled after them. Rows may come in any order; the plan's is fastest.

        Args:
            request_ids ([N]): Requests of the step.
            token_offsets ([N + 1]): First of each request's `token_ids`, and the end.
            token_ids ([num_tokens]): Tokens of all requests.
            failed_request_ids: Requests whose rows cannot be used, for example for NaN logits. They
                need not be among `request_ids`; their tokens are ignored, and they end.

        Raises:
            SchedulerError: If no step is in flight, or a result is missing, twice, of another
                request, of the wrong length, outside the vocabulary, or not the draft that was
                verified. The step is then still in flight.
        """
        output = self._native.update(
            _packed(request_ids, np.uint64),
            _packed(token_offsets, np.int32),
            _packed(token_ids, np.int32),
            failed_request_ids,
        )
        return StepOutput.from_native(output)

    def cancel_step(self) -> None:
        """Give the step in flight up: the next plan computes the same tokens, without drafts.

        Raises:
            SchedulerError: If no step is in flight.
        """
        self._native.cancel_step()

    def set_drafts(self, request_id: int, drafts: Iterable[int | None]) -> bool:
        """Replace the drafts that the request's next step verifies; None for a placeholder.

        Returns:
            Whether they are held; False if the request is waiting or still computes its prompt.

        Raises:
            UnknownRequestError: If no live request has the id.
            SchedulerError: If a step is in flight, a token is outside the vocabulary, or there are
                more than `num_speculative_tokens`.
        """
        return self._native.set_drafts(request_id, drafts)

    def abort(self, request_id: int) -> None:
        """End a request from outside, at any time. A result of the step in flight is ignored.

        Raises:
            UnknownRequestError: If no live request has the id; perhaps it has ended.
        """
        self._native.abort(request_id)

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """End a request for a reason that the engine found, such as a stop string.

        Raises:
            UnknownRequestError: If no live request has the id.
        """
        self._native.finish(request_id, reason)

    def grow(self, num_blocks: int) -> None:
        """Add blocks to the pool, after the cache has grown to as many.

        Raises:
            SchedulerError: If there are more already.
        """
        self._native.grow(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Remove the pool's last blocks, before the cache shrinks. `vacate` frees them.

        Raises:
            SchedulerError: If one of them is in use, a live request may need more blocks than are
                left, or there are fewer already.
        """
        self._native.shrink(num_blocks)

    def vacate(self, num_blocks: int) -> int:
        """Preempt every request that holds a block at or past `num_blocks`; return how many.

        Raises:
            SchedulerError: If a step is in flight.
        """
        return self._native.vacate(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for example after the weights changed.

        Raises:
            SchedulerError: If requests run.
        """
        self._native.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether any request is live."""
        return self._native.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        """Counters and gauges."""
        return SchedulerStats.from_native(self._native.stats())

    def check_integrity(self) -> None:
        """Check everything that must hold between two calls, for tests.

        Raises:
            SchedulerError: If something does not hold, which is a bug of extkv.
        """
        self._native.check_integrity()


def _packed(values: Integers, dtype: type[np.generic]) -> bytes | Sequence[int]:
    """Hand an array over as a whole where its dtype allows, else number by number."""
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype == dtype and values.ndim == 1:
        return values.tobytes()
    numbers: list[int] = values.tolist()
    return numbers
