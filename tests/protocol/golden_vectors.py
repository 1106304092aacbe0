"""Golden messages of vLLM's own encoders, and the values of decoded messages in their notation."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden"
# Classes that vLLM calls structs, dataclasses and named tuples, as the vectors do.
KINDS = {
    "struct": {
        "EngineCoreRequest",
        "EngineCoreOutputs",
        "EngineCoreOutput",
        "EngineCoreEvent",
        "UtilityOutput",
        "SamplingParams",
        "PoolingParams",
        "LateInteractionParams",
        "LoRARequest",
        "KvHintsEnvelope",
        "KvHintAction",
    },
    "namedtuple": {"LogprobsLists", "LogprobsTensors", "SamplingMaskLists"},
}


@dataclasses.dataclass(frozen=True)
class Golden:
    """One line of a golden file."""

    file: str
    profile: str
    name: str
    frames: list[bytes]
    python_value: Any

    @property
    def test_id(self) -> str:
        """Name for pytest."""
        return f"{self.profile}-{self.name}"


def golden(file: str) -> list[Golden]:
    """Lines of a file: of 0.32, then of 0.25."""
    folders = ((FOLDER, "0.32"), (FOLDER / "v0.25.1", "0.25"))
    lines = []
    for folder, profile in folders:
        path = folder / f"{file}.jsonl"
        if path.exists():
            lines += [
                parsed(file, profile, json.loads(line)) for line in path.read_text().splitlines()
            ]
    return lines


def parsed(file: str, profile: str, line: dict[str, Any]) -> Golden:
    """One line."""
    frames = [bytes.fromhex(frame) for frame in line["frames_hex"]]
    return Golden(file, profile, line["name"], frames, line["python_value"])


@dataclasses.dataclass(frozen=True)
class LiveGolden:
    """One message that a real peer sent, as its receiver saw it."""

    name: str
    channel: str
    direction: str
    frames: list[bytes]
    texts: list[str]

    @property
    def payload(self) -> list[bytes]:
        """Frames without the identity, which only the recording end of a router saw."""
        has_identity = self.name.startswith("live2") and self.channel != "output"
        return self.frames[int(has_identity) :]


def live_golden(file: str) -> list[LiveGolden]:
    """Lines of a file of live frames."""
    lines = map(json.loads, (FOLDER / f"{file}.jsonl").read_text().splitlines())
    return [
        LiveGolden(
            name=line["name"],
            channel=re.sub(r"\d+", "", line["channel"]),
            direction=line["dir"],
            frames=[bytes.fromhex(frame) for frame in line["frames_hex"]],
            texts=line["python_value"],
        )
        for line in lines
    ]


def differences(expected: Any, found: Any, path: str = "") -> list[str]:  # noqa: PLR0911
    """Where a decoded value differs from a value of the vectors. Fields that only later profiles
    have are not in the vectors, and are passed over.
    """
    if isinstance(expected, dict):
        for tag in ("struct", "dataclass", "namedtuple"):
            if tag in expected:
                return fields_differ(expected[tag], expected["fields"], found, path)
        if "map" in expected:
            return maps_differ(expected["map"], found, path)
        return leaves_differ(expected, found, path)
    if isinstance(expected, list):
        if isinstance(found, np.ndarray):
            found = found.tolist()
        if not isinstance(found, list) or len(found) != len(expected):
            return [f"{path}: {expected!r} != {found!r}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for i, (e, f) in pairs for text in differences(e, f, f"{path}[{i}]")]
    if type(expected) is not type(found) or expected != found:
        return [f"{path}: {expected!r} != {found!r}"]
    return []


def fields_differ(name: str, fields: dict[str, Any], found: Any, path: str) -> list[str]:
    """Differences of a message's fields."""
    if isinstance(found, list):  # a struct inside an untyped value is its array
        return differences(list(fields.values()), found, path)
    if isinstance(found, dict):
        return differences({"map": list(fields.items())}, found, path)
    if type(found).__name__ != name:
        return [f"{path}: {name} != {type(found).__name__}"]
    return [
        text
        for field, value in fields.items()
        for text in differences(value, getattr(found, field), f"{path}.{field}")
    ]


def maps_differ(entries: list[Any], found: Any, path: str) -> list[str]:
    """Differences of a map, whose order counts."""
    if dataclasses.is_dataclass(found):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        known = {key for key, _ in entries}
        found = {key: value for key, value in found.items() if key in known or value is not None}
    if not isinstance(found, dict) or [key for key, _ in entries] != list(found):
        return [f"{path}: {entries!r} != {found!r}"]
    return [
        text
        for key, value in entries
        for text in differences(value, found[key], f"{path}[{key!r}]")
    ]


def leaves_differ(expected: dict[str, Any], found: Any, path: str) -> list[str]:
    """Differences of enumerations, sets, bytes, slices, arrays and results."""
    (tag, *_) = expected
    if tag == "enum":
        is_same = isinstance(found, enum.IntEnum) and (
            type(found).__name__,
            found.name,
            found.value,
        ) == (expected["enum"], expected["name"], expected["value"])
    elif tag == "set":
        is_same = isinstance(found, frozenset) and found == set(expected["set"])
    elif tag == "bytes_hex":
        is_same = found == bytes.fromhex(expected["bytes_hex"])
    elif tag == "slice":
        is_same = found == slice(*expected["slice"])
    elif tag == "ndarray":
        is_same = (found.dtype.str, list(found.shape), found.tobytes().hex()) == (
            expected["ndarray"],
            expected["shape"],
            expected["data_hex"],
        )
    elif tag == "tensor":
        is_same = (found.dtype, list(found.shape), found.data.hex()) == (
            expected["tensor"],
            expected["shape"],
            expected["data_hex"],
        )
    elif tag == "UtilityResult":
        return differences(expected["UtilityResult"], found.result, f"{path}.result")
    else:
        is_same = False
    return [] if is_same else [f"{path}: {expected!r} != {found!r}"]
