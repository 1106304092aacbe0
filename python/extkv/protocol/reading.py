"""Read a message whose kind is not known beforehand, for people who look at a wire."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from extkv import _extkv
from extkv.errors import InvalidArgumentError, ProtocolError
from extkv.protocol import codec
from extkv.protocol.arrays import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extkv.protocol.codec import Profile, Skipped

    Decoder = Callable[..., Any]

IDENTITY_LENGTH = 2
_REQUESTS = ("request", "abort", "start-dp-wave", "utility-call")
_DECODERS: dict[str, Decoder] = {
    "request": codec.decode_request,
    "abort": codec.decode_abort,
    "start-dp-wave": codec.decode_start_dp_wave,
    "utility-call": codec.decode_utility_call,
    "outputs": codec.decode_outputs,
    "init": codec.decode_init,
    "handshake": codec.decode_handshake,
    "ready-response": codec.decode_ready_response,
    "coordinator-news": codec.decode_coordinator_news,
    "coordinator-command": codec.decode_coordinator_command,
}
KINDS = tuple(_DECODERS)
# In this order no message of one kind is read as one of another.
_WITHOUT_TYPE = {
    "map": ("init", "handshake", "ready-response"),
    "array": ("outputs", "coordinator-news", "coordinator-command", "request"),
}


class ReadMessage(NamedTuple):
    """Hold a message and what it is.

    Attributes:
        kind: One of `KINDS`, or ``"engine-core-dead"``.
        message: The message; None for the marker of a dead engine.
        skipped: Elements and keys that the profile does not know.
    """

    kind: str
    message: Any
    skipped: Skipped


def read_message(
    frames: Sequence[bytes], profile: Profile = "0.32", *, kind: str | None = None
) -> ReadMessage:
    """Decode a message.

    Args:
        frames: Its frames. A ROUTER's identity of two bytes and a type frame may come first.
        profile: Wire of the sender.
        kind: One of `KINDS`; None to find it by the type frame, or by what can be read.

    Raises:
        ProtocolError: If it cannot be read; of several kinds that it may be, as the likeliest.
    """
    if list(frames) == [codec.ENGINE_CORE_DEAD]:
        return ReadMessage("engine-core-dead", None, codec.Skipped(0, 0))
    named, payload = _split(frames)
    if not payload:
        raise ProtocolError("a message without a payload")
    kinds = [kind or named] if kind or named else _WITHOUT_TYPE[_container(payload[0])]
    failure: ProtocolError | None = None
    for candidate in kinds:
        skipped: list[Skipped] = []
        try:
            message = _DECODERS[str(candidate)](payload, profile, on_skipped=skipped.append)
        except ProtocolError as error:
            failure = failure or error
        else:
            return ReadMessage(str(candidate), message, (*skipped, codec.Skipped(0, 0))[0])
    assert failure is not None
    raise failure


def _split(frames: Sequence[bytes]) -> tuple[str | None, list[bytes]]:
    """Return the kind that a type frame names, and the payload's frames."""
    rest = list(frames)
    if len(rest) > 2 and len(rest[0]) == IDENTITY_LENGTH and len(rest[1]) == 1:  # noqa: PLR2004
        rest = rest[1:]
    if len(rest) > 1 and len(rest[0]) == 1:
        return _REQUESTS[codec.request_type(rest[0])], rest[1:]
    return None, rest


def _container(frame: bytes) -> str:
    """Return whether a frame holds a map, by its first byte; all other kinds are arrays."""
    is_map = frame[:1] in (b"\xde", b"\xdf") or 0x80 <= (*frame[:1], 0)[0] < 0x90  # noqa: PLR2004
    return "map" if is_map else "array"


def plain_value(value: object) -> Any:  # noqa: ANN401, PLR0911, JSON has no narrower type, and each kind a line
    """Return a message, or a part of one, as what JSON can hold.

    Fields that are None are left out. Enumerations give their name, bytes and elements that numpy
    does not know their hexadecimal digits, arrays a map of ``dtype``, ``shape`` and ``values``, and
    floats that are no numbers, or infinite, their text.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "values": _values(value)}
    if isinstance(value, Tensor):
        return {"dtype": value.dtype, "shape": list(value.shape), "values": _values(value)}
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_value(item) for item in value]
    fields = {name: getattr(value, name) for name in _field_names(value)}
    return {name: plain_value(item) for name, item in fields.items() if item is not None}


def _values(array: np.ndarray | Tensor) -> Any:  # noqa: ANN401, a number or nested lists
    if isinstance(array, Tensor):
        try:
            array = array.numpy()
        except InvalidArgumentError:
            return bytes(array.data).hex()
    return plain_value(array.tolist())


def _field_names(message: object) -> list[str]:
    if dataclasses.is_dataclass(message):
        return [field.name for field in dataclasses.fields(message)]
    names: list[str] = _extkv.protocol_fields(type(message).__name__)
    return names
