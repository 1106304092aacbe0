"""What a step computes, what it brought, and how the scheduler stands, as numpy arrays and numbers.

Arrays are views of the native object's copies; nothing here changes with the scheduler.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv import _extkv

    Int8Array = npt.NDArray[np.int8]
    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    UInt32Array = npt.NDArray[np.uint32]
    UInt64Array = npt.NDArray[np.uint64]


class FinishReason(str, enum.Enum):
    """Why a request ended, with vLLM's strings and in the order of vLLM's numbers."""

    STOP = "stop"
    """End of sequence, a stop token, or a stop string found by the engine."""
    LENGTH = "length"
    """`max_tokens` or `max_model_len`."""
    ABORT = "abort"
    """Ended from outside."""
    ERROR = "error"
    """Its step failed, for example with NaN logits."""

    def __str__(self) -> str:
        return self.value


# As the native `finish_reasons` count, and vLLM's enum.
_FINISH_REASON_OF_CODE: dict[int, FinishReason | None] = {-1: None, **dict(enumerate(FinishReason))}


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Describe what one step computes: R rows (requests), T tokens, S sampled tokens.

    Rows that decode come first. Arrays belong to the plan and may be written to. Apply
    `preempted_request_ids` and `finished_request_ids` before the rows: an id may end there and come
    back as a row.

    Attributes:
        step_id: Number of the step, from 1.
        num_requests: R. A plan of none wants no update.
        num_tokens: T.
        num_decode_requests: How many rows, from the first, decode.
        is_pure_decode: Whether every row decodes (and there is one).
        preempted_request_ids: Requests preempted since the last plan.
        finished_request_ids: Requests that ended since the last plan, for whatever reason.
        request_ids (uint64, [R]): Request of each row.
        request_slots (int32, [R]): Its slot in the persistent batch.
        slot_generations (uint32, [R]): Generation of the slot; a new one means a new occupant.
        num_scheduled_tokens (int32, [R]): Tokens computed in this step, drafts included.
        num_computed_tokens (int32, [R]): Tokens already in the cache.
        seq_lens (int32, [R]): Sum of the two: the attention length of the row's last token.
        num_draft_tokens (int32, [R]): Drafts among the row's tokens; they come last.
        query_start_loc (int32, [R + 1]): First token of each row, and the end.
        input_token_ids (int32, [T]): Token ids; -1 for a draft that only the runner knows.
        positions (int64, [T]): Position of each token in its sequence.
        slot_mapping (int64, [T]): KV slot of each token: block id * block size + offset.
        sample_rows (int32, [S]): Index of each token after which to sample, in row order.
        sample_start_loc (int32, [R + 1]): First of each row's `sample_rows`, and the end.
        block_tables (int32, [R, width]): Blocks of each row, padded with block 0.
    """

    step_id: int
    num_requests: int
    num_tokens: int
    num_decode_requests: int
    is_pure_decode: bool
    preempted_request_ids: list[int]
    finished_request_ids: list[int]
    request_ids: UInt64Array
    request_slots: Int32Array
    slot_generations: UInt32Array
    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    seq_lens: Int32Array
    num_draft_tokens: Int32Array
    query_start_loc: Int32Array
    input_token_ids: Int32Array
    positions: Int64Array
    slot_mapping: Int64Array
    sample_rows: Int32Array
    sample_start_loc: Int32Array
    block_tables: Int32Array

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return self.num_requests == 0

    @property
    def block_table_width(self) -> int:
        """Columns of `block_tables`: the longest row's blocks."""
        return int(self.block_tables.shape[1])

    @classmethod
    def from_native(cls, plan: _extkv.Plan) -> StepPlan:
        """View the native plan's arrays without a copy."""
        block_tables = np.frombuffer(plan.block_tables, np.int32)
        return cls(
            step_id=plan.step_id,
            num_requests=plan.num_requests,
            num_tokens=plan.num_tokens,
            num_decode_requests=plan.num_decode_requests,
            is_pure_decode=plan.is_pure_decode,
            preempted_request_ids=plan.preempted_request_ids,
            finished_request_ids=plan.finished_request_ids,
            request_ids=np.frombuffer(plan.request_ids, np.uint64),
            request_slots=np.frombuffer(plan.request_slots, np.int32),
            slot_generations=np.frombuffer(plan.slot_generations, np.uint32),
            num_scheduled_tokens=np.frombuffer(plan.num_scheduled_tokens, np.int32),
            num_computed_tokens=np.frombuffer(plan.num_computed_tokens, np.int32),
            seq_lens=np.frombuffer(plan.seq_lens, np.int32),
            num_draft_tokens=np.frombuffer(plan.num_draft_tokens, np.int32),
            query_start_loc=np.frombuffer(plan.query_start_loc, np.int32),
            input_token_ids=np.frombuffer(plan.input_token_ids, np.int32),
            positions=np.frombuffer(plan.positions, np.int64),
            slot_mapping=np.frombuffer(plan.slot_mapping, np.int64),
            sample_rows=np.frombuffer(plan.sample_rows, np.int32),
            sample_start_loc=np.frombuffer(plan.sample_start_loc, np.int32),
            block_tables=block_tables.reshape(plan.num_requests, plan.block_table_width),
        )


class RequestOutput(NamedTuple):
    """Describe what one step brought one request.

    Attributes:
        request_id: The request.
        token_ids: Its new tokens, a stop token included.
        finish_reason: Why it ended; None if it goes on.
        stop_token_id: Which of its `stop_token_ids` ended it; None for end of sequence.
        num_draft_tokens: Drafts that the step verified.
        num_accepted_tokens: Drafts that were accepted, those past a stop included.
        num_computed_tokens: Tokens whose keys and values count from here on.
        num_cached_tokens: Prompt tokens that the prefix cache saved at the first admission.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_draft_tokens: int
    num_accepted_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, eq=False)
class StepOutput:
    """Describe what one step brought, for each of N requests with a new token or an end.

    Attributes:
        step_id: Number of the step.
        request_ids (uint64, [N]): The requests, in row order.
        token_offsets (int32, [N + 1]): First of each request's `token_ids`, and the end.
        token_ids (int32, [num_new_tokens]): New tokens of all requests.
        finish_reasons (int8, [N]): 0 stop, 1 length, 2 abort, 3 error; -1 while it goes on.
        stop_token_ids (int32, [N]): The stop token that ended the request, or -1.
        num_draft_tokens (int32, [N]): Drafts verified.
        num_accepted_tokens (int32, [N]): Drafts accepted.
        num_computed_tokens (int32, [N]): Tokens whose keys and values count from here on.
        num_cached_tokens (int32, [N]): Prompt tokens that the prefix cache saved.
    """

    step_id: int
    request_ids: UInt64Array
    token_offsets: Int32Array
    token_ids: Int32Array
    finish_reasons: Int8Array
    stop_token_ids: Int32Array
    num_draft_tokens: Int32Array
    num_accepted_tokens: Int32Array
    num_computed_tokens: Int32Array
    num_cached_tokens: Int32Array

    @classmethod
    def from_native(cls, output: _extkv.StepOutput) -> StepOutput:
        """View the native output's arrays without a copy."""
        return cls(
            step_id=output.step_id,
            request_ids=np.frombuffer(output.request_ids, np.uint64),
            token_offsets=np.frombuffer(output.token_offsets, np.int32),
            token_ids=np.frombuffer(output.token_ids, np.int32),
            finish_reasons=np.frombuffer(output.finish_reasons, np.int8),
            stop_token_ids=np.frombuffer(output.stop_token_ids, np.int32),
            num_draft_tokens=np.frombuffer(output.num_draft_tokens, np.int32),
            num_accepted_tokens=np.frombuffer(output.num_accepted_tokens, np.int32),
            num_computed_tokens=np.frombuffer(output.num_computed_tokens, np.int32),
            num_cached_tokens=np.frombuffer(output.num_cached_tokens, np.int32),
        )

    def requests(self) -> list[RequestOutput]:
        """One object per request, for code that handles them one by one."""
        spans, token_ids = itertools.pairwise(self.token_offsets.tolist()), self.token_ids.tolist()
        columns = zip(
            self.request_ids.tolist(),
            [token_ids[start:end] for start, end in spans],
            [_FINISH_REASON_OF_CODE[code] for code in self.finish_reasons.tolist()],
            [None if token_id < 0 else token_id for token_id in self.stop_token_ids.tolist()],
            self.num_draft_tokens.tolist(),
            self.num_accepted_tokens.tolist(),
            self.num_computed_tokens.tolist(),
            self.num_cached_tokens.tolist(),
            strict=True,
        )
        return [RequestOutput._make(row) for row in columns]


@dataclass(frozen=True)
class PrefixCacheStats:
    """Count how much the prefix cache saved, at admission.

    Attributes:
        num_requests: Admissions.
        num_query_tokens: Tokens of the admitted requests.
        num_hit_tokens: Tokens among them found in the cache.
        hit_ratio: Tokens found per token asked; 0 before the first admission.
    """

    num_requests: int
    num_query_tokens: int
    num_hit_tokens: int
    hit_ratio: float


@dataclass(frozen=True)
class SchedulerStats:
    """Tell where a scheduler stands, and count since it was made.

    Attributes:
        num_running: Requests that hold a slot.
        num_waiting: Requests in the queue, preempted ones included.
        num_blocks: Blocks of the pool.
        num_free_blocks: Blocks that no request holds.
        num_cached_blocks: Blocks, held or free, whose content can be found.
        num_preemptions: Preemptions so far.
        num_draft_tokens: Drafts verified so far.
        num_accepted_tokens: Drafts accepted so far.
        prefix_cache: Prefix reuse of new requests.
        prefix_cache_resumed: Prefix reuse of preempted requests that came back.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    prefix_cache: PrefixCacheStats
    prefix_cache_resumed: PrefixCacheStats

    @classmethod
    def from_native(cls, stats: dict[str, Any]) -> SchedulerStats:
        """Type the native dictionary."""
        prefix_cache = PrefixCacheStats(**stats.pop("prefix_cache"))
        resumed = PrefixCacheStats(**stats.pop("prefix_cache_resumed"))
        return cls(prefix_cache=prefix_cache, prefix_cache_resumed=resumed, **stats)
