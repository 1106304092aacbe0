"""Encode and decode EngineCore messages: bytes as vLLM's own encoders write them.

Frames are what one ZMQ message holds after identity and type frame: msgpack first, then the raw
data of large arrays. A profile names the wire of a vLLM release; see docs/protocol.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, cast

import numpy as np

from extkv import _extkv
from extkv.errors import InvalidArgumentError
from extkv.protocol.arrays import array_parts, token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extkv.protocol.control import (
        CoordinatorNews,
        EngineCoreReadyResponse,
        EngineHandshakeMetadata,
        FirstRequest,
        HandshakeMessage,
        ScaleElasticEp,
        StartDpWave,
        UtilityCall,
    )
    from extkv.protocol.enums import RequestType
    from extkv.protocol.output_parts import LogprobsLists

Profile = Literal["0.25", "0.26", "0.32", "0.33"]
Buffer = bytes | bytearray | memoryview
Frames = Union[Buffer, "Sequence[Buffer]"]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The whole message of an engine that has failed. A killed engine sends nothing."""


class Skipped(NamedTuple):
    """What a decoder passed over because the profile does not know it, at any level."""

    elements: int
    """Trailing elements of arrays."""
    keys: int
    """Keys of maps."""


OnSkipped = Union["Callable[[Skipped], object]", None]


def profile_of_version(vllm_version: str) -> Profile:
    """Return the wire profile of the engine that reports this `vllm_version`.

    Versions between two profiles take the older one, later ones the latest.

    Raises:
        InvalidArgumentError: the version is no MAJOR.MINOR number, or older than 0.24.
    """
    return cast("Profile", _extkv.protocol_profile_of_version(vllm_version))


def request_type(frame: bytes) -> RequestType:
    """Return the type that a type frame announces.

    Raises:
        ProtocolError: not one byte, or a type that no front end sends.
    """
    from extkv.protocol.enums import RequestType

    return RequestType(_extkv.protocol_request_type(frame))


def decode_request(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> _extkv.EngineCoreRequest:
    """Decode the payload of an ADD request.

    Args:
        frames: payload frames. `bytes` are used in place, other buffers are copied.
        profile: wire of the sender.
        on_skipped: called with counts if there was anything that the profile does not know.

    Raises:
        ProtocolError: the frames are no request; `path` names the field.
    """
    request = _extkv.EngineCoreRequest.decode(frames, profile)
    if on_skipped is not None:
        _report(request.skipped, on_skipped)
    return request


def encode_request(request: _extkv.EngineCoreRequest, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of an ADD request's payload.

    Fields that the profile does not have are left out.
    """
    return request.encode(profile)


def decode_outputs(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> _extkv.EngineCoreOutputs:
    """Decode one message of an engine. Everything is checked now; objects are made when asked for.

    Args:
        frames: the frames. `bytes` are used in place, other buffers are copied.
        profile: wire of the sender.
        on_skipped: called with counts if there was anything that the profile does not know.

    Returns:
        The message. `token_ids`, `token_offsets`, `finish_reasons` and `request_ids` describe the
        whole batch; `outputs` has an object per request.

    Raises:
        ProtocolError: the frames are no such message; `path` names the field.
    """
    outputs = _extkv.EngineCoreOutputs.decode(frames, profile)
    if on_skipped is not None:
        _report(outputs.skipped, on_skipped)
    return outputs


def encode_outputs(outputs: _extkv.EngineCoreOutputs, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of one message of an engine.

    Fields that the profile does not have are left out.
    """
    return outputs.encode(profile)


def encode_output_columns(
    request_ids: Sequence[str],
    token_ids: Sequence[int] | np.ndarray,
    *,
    token_offsets: Sequence[int] | np.ndarray | None = None,
    finish_reasons: Sequence[int] | np.ndarray | None = None,
    logprobs: LogprobsLists | None = None,
    profile: Profile = "0.32",
    **envelope: object,
) -> list[bytes]:
    """Encode a batch of outputs from arrays, without an object per request.

    Args:
        request_ids: one per output.
        token_ids: (integers, [tokens]) new tokens, output after output.
        token_offsets: (integers, [outputs + 1]) where each output's tokens begin, and the end;
            None for one token per output.
        finish_reasons: (int8, [outputs]) numbers of `FinishReason`, -1 for none; None if no request
            ended.
        logprobs: arrays with one row per token, which outputs take in order.
        profile: wire of the receiver.
        envelope: other fields of `EngineCoreOutputs`, such as `timestamp`.

    Raises:
        InvalidArgumentError: the columns do not fit together.
        InvalidMessageError: a field of the envelope has a value that it cannot have.
    """
    num_outputs = len(request_ids)
    if token_offsets is None:
        ends = np.arange(1, num_outputs + 1, dtype=np.int64)
    else:
        offsets = np.asarray(token_offsets, dtype=np.int64)
        if offsets.shape != (num_outputs + 1,) or offsets[0] != 0:
            raise InvalidArgumentError(
                f"token_offsets must begin with 0 and have {num_outputs + 1} entries, one more "
                f"than request_ids, got shape {offsets.shape}"
            )
        ends = offsets[1:]
    if finish_reasons is None:
        reasons = np.full(num_outputs, -1, dtype=np.int8)
    else:
        reasons = np.asarray(finish_reasons, dtype=np.int8)
    columns = (token_bytes(token_ids), ends.tobytes(), reasons.tobytes())
    arrays = None
    if logprobs is not None:
        three = (logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks)
        arrays = [array_parts(array, is_torch=False) for array in three]
    return _extkv.encode_output_columns(request_ids, columns, arrays, envelope, profile)


def decode_abort(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> list[str]:
    """Decode the payload of an ABORT request: ids of requests to stop."""
    return cast("list[str]", _decode("abort", frames, profile, on_skipped))


def encode_abort(request_ids: Sequence[str], profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of an ABORT request's payload."""
    return _extkv.protocol_encode("abort", list(request_ids), profile)


def decode_utility_call(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> UtilityCall:
    """Decode the payload of a UTILITY request."""
    return cast("UtilityCall", _decode("utility_call", frames, profile, on_skipped))


def encode_utility_call(call: UtilityCall, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of a UTILITY request's payload."""
    return _extkv.protocol_encode("utility_call", call, profile)


def decode_start_dp_wave(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> StartDpWave:
    """Decode the payload of START_DP_WAVE."""
    return cast("StartDpWave", _decode("start_dp_wave", frames, profile, on_skipped))


def encode_start_dp_wave(wave: StartDpWave, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of START_DP_WAVE's payload."""
    return _extkv.protocol_encode("start_dp_wave", wave, profile)


def decode_handshake(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> HandshakeMessage:
    """Decode HELLO or READY."""
    return cast("HandshakeMessage", _decode("handshake", frames, profile, on_skipped))


def encode_handshake(message: HandshakeMessage, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of HELLO or READY."""
    return _extkv.protocol_encode("handshake", message, profile)


def decode_init(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> EngineHandshakeMetadata:
    """Decode INIT."""
    return cast("EngineHandshakeMetadata", _decode("init", frames, profile, on_skipped))


def encode_init(message: EngineHandshakeMetadata, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of INIT."""
    return _extkv.protocol_encode("init", message, profile)


def decode_ready_response(
    frames: Frames, profile: Profile = "0.33", *, on_skipped: OnSkipped = None
) -> EngineCoreReadyResponse:
    """Decode a ready response. It is a map, so one profile reads those of every release."""
    return cast("EngineCoreReadyResponse", _decode("ready_response", frames, profile, on_skipped))


def encode_ready_response(
    message: EngineCoreReadyResponse, profile: Profile = "0.32"
) -> list[bytes]:
    """Return the frames of a ready response.

    Raises:
        InvalidArgumentError: a field that the profile requires is None.
    """
    return _extkv.protocol_encode("ready_response", message, profile)


def decode_coordinator_news(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> CoordinatorNews:
    """Decode what a coordinator publishes to front ends. `READY` is no such message."""
    return cast("CoordinatorNews", _decode("coordinator_news", frames, profile, on_skipped))


def encode_coordinator_news(news: CoordinatorNews, profile: Profile = "0.32") -> list[bytes]:
    """Return the frames of what a coordinator publishes to front ends."""
    return _extkv.protocol_encode("coordinator_news", news, profile)


def decode_coordinator_command(
    frames: Frames, profile: Profile = "0.32", *, on_skipped: OnSkipped = None
) -> FirstRequest | ScaleElasticEp:
    """Decode what a front end tells the coordinator."""
    command = _decode("coordinator_command", frames, profile, on_skipped)
    return cast("FirstRequest | ScaleElasticEp", command)


def encode_coordinator_command(
    command: FirstRequest | ScaleElasticEp, profile: Profile = "0.32"
) -> list[bytes]:
    """Return the frames of what a front end tells the coordinator."""
    return _extkv.protocol_encode("coordinator_command", command, profile)


def _decode(kind: str, frames: Frames, profile: Profile, on_skipped: OnSkipped) -> Any:  # noqa: ANN401
    message, skipped = _extkv.protocol_decode(kind, frames, profile)
    _report(skipped, on_skipped)
    return message


def _report(skipped: tuple[int, int], on_skipped: OnSkipped) -> None:
    if on_skipped is not None and skipped != (0, 0):
        on_skipped(Skipped(*skipped))
