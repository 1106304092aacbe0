"""The peer: msgspec structs and array hooks as vLLM 0.32 declares them for its wire.

Field order, types and hooks follow vLLM's `EngineCoreOutputs`, `EngineCoreRequest` and
`MsgpackEncoder`/`MsgpackDecoder`; fields whose type needs vLLM itself are untyped here, and are nil
in every message of the benches. Torch tensors are left out, the benches have none.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE_BELOW_BYTES = 256
RAW_VIEW = 3


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class LogprobsLists(NamedTuple):
    """Log-probabilities at sampled positions."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: Optional[list[int]] = None  # noqa: UP045


class EngineCoreOutput(
    msgspec.Struct,
    array_like=True,  # type: ignore[call-arg]
    omit_defaults=True,  # type: ignore[call-arg]
    gc=False,  # type: ignore[call-arg]
):
    """What is new about one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Optional[LogprobsLists] = None  # noqa: UP045
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: Optional[FinishReason] = None  # noqa: UP045
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: Optional[dict[str, Any]] = None  # noqa: UP045
    ec_transfer_params: Optional[dict[str, Any]] = None  # noqa: UP045
    trace_headers: Optional[dict[str, str]] = None  # noqa: UP045
    prefill_stats: Any = None
    routed_experts: Optional[np.ndarray] = None  # noqa: UP045
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Optional[list[str]] = None  # noqa: UP045
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class EngineCoreOutputs(
    msgspec.Struct,
    array_like=True,  # type: ignore[call-arg]
    omit_defaults=True,  # type: ignore[call-arg]
    gc=False,  # type: ignore[call-arg]
):
    """One message of an engine."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: Optional[set[str]] = None  # noqa: UP045
    wave_complete: Optional[int] = None  # noqa: UP045
    start_wave: Optional[int] = None  # noqa: UP045
    weight_version: Optional[str] = None  # noqa: UP045


class SamplingParams(msgspec.Struct, omit_defaults=True):  # type: ignore[call-arg]
    """How a request wants its tokens chosen, and when it ends."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Optional[bool] = None  # noqa: UP045
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Optional[int] = None  # noqa: UP045
    stop: str | list[str] | None = None
    stop_token_ids: Optional[list[int]] = None  # noqa: UP045
    ignore_eos: bool = False
    max_tokens: Optional[int] = 16  # noqa: UP045
    min_tokens: int = 0
    logprobs: Optional[int] = None  # noqa: UP045
    prompt_logprobs: Optional[int] = None  # noqa: UP045
    prompt_logprob_token_ids: Optional[np.ndarray] = None  # noqa: UP045
    prompt_logprob_start: Optional[int] = None  # noqa: UP045
    logprob_token_ids: Optional[list[int]] = None  # noqa: UP045
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 0
    stream_interval: Optional[int] = None  # noqa: UP045
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    _eos_token_id: Optional[int] = None  # noqa: UP045
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _watermarking_skipped: bool = False
    structured_outputs: Any = None
    logit_bias: Optional[dict[int, float]] = None  # noqa: UP045
    allowed_token_ids: Optional[list[int]] = None  # noqa: UP045
    extra_args: Optional[dict[str, Any]] = None  # noqa: UP045
    bad_words: Optional[list[str]] = None  # noqa: UP045
    _bad_words_token_ids: Optional[list[list[int]]] = None  # noqa: UP045
    skip_reading_prefix_cache: Optional[bool] = None  # noqa: UP045
    thinking_token_budget: Optional[int] = None  # noqa: UP045
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Optional[list[int]] = None  # noqa: UP045


class EngineCoreRequest(
    msgspec.Struct,
    array_like=True,  # type: ignore[call-arg]
    omit_defaults=True,  # type: ignore[call-arg]
    gc=False,  # type: ignore[call-arg]
):
    """A request to an engine."""

    request_id: str
    prompt_token_ids: Optional[list[int]]  # noqa: UP045
    mm_features: Any
    sampling_params: Optional[SamplingParams]  # noqa: UP045
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: Optional[str]  # noqa: UP045
    data_parallel_rank: Optional[int]  # noqa: UP045
    prompt_embeds: Any = None
    prompt_is_token_ids: Optional[list[bool]] = None  # noqa: UP045
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Optional[dict[str, str]] = None  # noqa: UP045
    resumable: bool = False
    external_req_id: Optional[str] = None  # noqa: UP045
    reasoning_ended: Optional[bool] = None  # noqa: UP045
    reasoning_parser_kwargs: Optional[dict[str, Any]] = None  # noqa: UP045
    abort_immediately: bool = False
    session_id: Optional[str] = None  # noqa: UP045
    kv_hints: Any = None


class Encoder:
    """vLLM's MsgpackEncoder for numpy arrays."""

    def __init__(self) -> None:
        """Make the msgspec encoder once."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)
        self._aux_buffers: list[Any] = []

    def encode_into(self, message: object, buffer: bytearray) -> Sequence[Any]:
        """Encode into a reused buffer, as vLLM's output thread does."""
        self._aux_buffers = [buffer]
        try:
            self._encoder.encode_into(message, buffer)
            return self._aux_buffers
        finally:
            self._aux_buffers = []

    def encode(self, message: object) -> Sequence[Any]:
        """Encode into new frames, as vLLM's clients do."""
        self._aux_buffers = [b""]
        try:
            self._aux_buffers[0] = self._encoder.encode(message)
            return self._aux_buffers
        finally:
            self._aux_buffers = []

    def _enc_hook(self, value: object) -> object:
        if isinstance(value, np.ndarray) and value.dtype.kind not in ("O", "V"):
            return self._encode_ndarray(value)
        raise TypeError(f"Object of type {type(value)} is not serializable")

    def _encode_ndarray(self, array: np.ndarray) -> tuple[str, tuple[int, ...], object]:
        data: Any = array.data if array.flags.c_contiguous else array.tobytes()
        if not array.shape or array.nbytes < INLINE_BELOW_BYTES:
            data = msgspec.msgpack.Ext(RAW_VIEW, data)
        else:
            self._aux_buffers.append(data)
            data = len(self._aux_buffers) - 1
        return array.dtype.str, array.shape, data


class Decoder:
    """vLLM's MsgpackDecoder for numpy arrays."""

    def __init__(self, message_type: type) -> None:
        """Make the msgspec decoder once."""
        self._decoder = msgspec.msgpack.Decoder(
            message_type, ext_hook=self._ext_hook, dec_hook=self._dec_hook
        )
        self._aux_buffers: Sequence[Any] = ()

    def decode(self, frames: Sequence[Any]) -> Any:  # noqa: ANN401
        """Decode the frames of one message."""
        self._aux_buffers = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._aux_buffers = ()

    def _dec_hook(self, kind: type, value: Any) -> object:  # noqa: ANN401
        if issubclass(kind, np.ndarray):
            dtype, shape, data = value
            buffer = self._aux_buffers[data] if isinstance(data, int) else data
            return np.frombuffer(buffer, dtype=dtype).reshape(shape)
        return value

    def _ext_hook(self, code: int, data: memoryview) -> object:
        if code == RAW_VIEW:
            return data
        raise NotImplementedError(f"Extension type code {code} is not supported")
