"""Parts of outputs: log-probabilities, events, failures, results of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.protocol.record import Message

if TYPE_CHECKING:
    import numpy as np

    from extkv.protocol.arrays import Tensor
    from extkv.protocol.enums import EngineCoreEventType


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobsLists(Message):
    """Log-probabilities at sampled positions. Column 0 is the sampled token.

    Arrays of a decoded message lie in its frames, perhaps unaligned, and are read-only.

    Attributes:
        logprob_token_ids: (int32 or int64, [positions, k + 1]) token ids.
        logprobs: (float32, [positions, k + 1]) their log-probabilities; -inf and NaN occur.
        sampled_token_ranks: (int32 or int64, [positions]) rank of each sampled token.
        cu_num_generated_tokens: running count of tokens per request of a batch.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobsTensors(Message):
    """Log-probabilities at prompt positions; shapes as in `LogprobsLists`."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingMaskLists(Message):
    """Which tokens could be sampled; position i has `token_ids[offsets[i]:offsets[i + 1]]`."""

    token_ids: np.ndarray
    offsets: np.ndarray | None = None
    cu_num_generated_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineCoreEvent(Message):
    """Something that happened to a request, on the engine's monotonic clock."""

    type: EngineCoreEventType
    timestamp: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestError(Message):
    """Why one request failed, while the engine is well (0.33 and later)."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UtilityResult(Message):
    """What a call returned."""

    result: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UtilityOutput(Message):
    """How a call ended: with a result, or with a failure message.

    The call id is -1 for notices of elastic expert parallelism and -2 for a fault-tolerance status;
    nobody asked for either.
    """

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None
