"""Frames of real peers decode to the values recorded beside them, and encode to themselves."""

from __future__ import annotations

import ast
import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from extkv import _extkv, protocol
from golden_vectors import live_golden

if TYPE_CHECKING:
    from collections.abc import Callable

    from golden_vectors import LiveGolden

ALL_LIVE = [
    line
    for file in ("live_coordinator", "live_engine", "live_python_frontend", "live_rust_frontend")
    for line in live_golden(file)
]
MARKERS = (protocol.ENGINE_CORE_DEAD, b"READY", b"\x01")
LIVE = [line for line in ALL_LIVE if line.frames[-1] not in MARKERS]
REQUESTS = {
    protocol.RequestType.ADD: protocol.decode_request,
    protocol.RequestType.ABORT: protocol.decode_abort,
    protocol.RequestType.START_DP_WAVE: protocol.decode_start_dp_wave,
    protocol.RequestType.UTILITY: protocol.decode_utility_call,
}
DECODERS = {
    ("handshake", "front->engine"): protocol.decode_init,
    ("handshake", "engine->front"): protocol.decode_handshake,
    ("input", "engine->front"): protocol.decode_ready_response,
    ("output", "engine->front"): protocol.decode_outputs,
    ("engine->coord", "engine->coord"): protocol.decode_outputs,
    ("coord->front", "coord->front"): protocol.decode_coordinator_news,
    ("front->coord", "front->coord"): protocol.decode_coordinator_command,
}
# What is read and never written so: defaults and float32 in sampling parameters, and the short
# messages of the engines that recorded the front ends.
NOT_CANONICAL = {
    *("live2_028", "live2_042", "live2_049"),
    *(f"fake1_{number:03}" for number in (2, 8, 9, 10, 11)),
    *(f"fake_rust_{number:03}" for number in (2, 4, 5, 6, 7, 8, 9, 10)),
}


def decoder_of(line: LiveGolden) -> tuple[Callable[..., Any], list[bytes]]:
    """The decoder of a line, and the frames that it reads."""
    frames = line.payload
    if line.channel in ("input", "coord->engine") and line.direction.endswith("->engine"):
        return REQUESTS[protocol.request_type(frames[0])], frames[1:]
    return DECODERS[line.channel, line.direction], frames


@pytest.mark.parametrize("line", LIVE, ids=lambda line: line.name)
def test_live_frame_decodes_to_its_recorded_value(line: LiveGolden):
    decode, frames = decoder_of(line)
    skipped = []
    message = decode(frames, on_skipped=skipped.append)
    assert skipped == []
    recorded = line.texts[len(line.frames) - len(frames)]
    try:
        expected = ast.literal_eval(recorded)
    except SyntaxError:  # a long value was cut
        expected = msgspec.msgpack.decode(frames[0])
        assert repr(expected).startswith(recorded[:1000])
    assert differences(expected, message) == []


@pytest.mark.parametrize("line", LIVE, ids=lambda line: line.name)
def test_live_frame_encodes_to_its_bytes(line: LiveGolden):
    decode, frames = decoder_of(line)
    encode = getattr(protocol, decode.__name__.replace("decode", "encode"))
    message = decode(frames)
    again = encode(message)
    assert (again != frames) == (line.name in NOT_CANONICAL)
    assert decode(again) == message


def test_nearly_all_live_frames_are_messages():
    assert (len(ALL_LIVE), len(LIVE)) == (111, 104)


def test_a_difference_from_a_recorded_value_is_found():
    (line,) = [line for line in LIVE if line.name == "live2_015"]
    message = protocol.decode_outputs(line.payload)
    for old, new in (("'lp', [34]", "'lp', [35]"), ("[1, 6]", "[1, 7]"), ("22000000", "23000000")):
        changed = ast.literal_eval(line.texts[0].replace(old, new, 1))
        assert len(differences(changed, message)) == 1


def field_names(message: object) -> list[str] | None:
    """Fields of a message in the order of the wire; `None` for other values."""
    if isinstance(message, protocol.Tensor):
        return None
    if dataclasses.is_dataclass(message):
        return [field.name for field in dataclasses.fields(message)]
    if type(message).__module__ == "extkv.protocol":
        return _extkv.protocol_fields(type(message).__name__)
    return None


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where a message differs from a tree of the wire's values. What the tree lacks is default."""
    if isinstance(found, protocol.ScaleElasticEp):
        found = ["SCALE_ELASTIC_EP", found.num_engines]
    elif isinstance(found, protocol.UtilityResult):
        found = [None, found.result]
    names = field_names(found)
    if names is not None and isinstance(expected, dict):
        pairs = [(name, value, getattr(found, name)) for name, value in expected.items()]
    elif names is not None:
        pairs = [(name, v, getattr(found, name)) for name, v in zip(names, expected, strict=False)]
    elif isinstance(found, protocol.Tensor) or (
        isinstance(found, np.ndarray) and isinstance(expected[:1], list) and is_array(expected)
    ):
        pairs = array_parts(expected, found)
    elif isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(key, value, found.get(key)) for key, value in expected.items()]
    elif isinstance(expected, list) and isinstance(found, (list, np.ndarray)):
        pairs = [("length", len(expected), len(found))]
        pairs += zip(range(len(found)), expected, found, strict=False)
    else:
        value = found.value if isinstance(found, enum.Enum) else found
        same = set(expected) if isinstance(value, frozenset) else expected
        return [] if same == value else [f"{path}: {expected!r} != {found!r}"]
    return [text for name, e, f in pairs for text in differences(e, f, f"{path}.{name}")]


def is_array(expected: list[Any]) -> bool:
    """Whether a list is an array of the wire and not a list of numbers."""
    return bool(expected) and isinstance(expected[0], str)


def array_parts(expected: list[Any], found: Any) -> list[tuple[str, Any, Any]]:
    """Parts of an array: element type, shape, and its bytes or, of large ones, their number."""
    dtype, shape, data = expected
    is_numpy = isinstance(found, np.ndarray)
    data_found = found.tobytes() if is_numpy else bytes(found.data)
    parts = [
        ("dtype", dtype, found.dtype.str if is_numpy else found.dtype),
        ("shape", shape, list(found.shape)),
    ]
    match data:
        case (_, 3, text) if text.endswith(" bytes"):
            return [*parts, ("data", text, f"{len(data_found)} bytes")]
        case (_, 3, text):
            return [*parts, ("data", text, data_found.hex())]
    return parts
