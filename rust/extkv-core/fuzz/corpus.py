"""Corpus of the fuzz targets: text files with one input a line, as hexadecimal digits.

python corpus.py seed DIR    makes DIR/TARGET/ of the golden messages; needs msgspec
python corpus.py unpack DIR  makes DIR/TARGET/ of corpus/TARGET.hex
python corpus.py pack DIR    makes corpus/TARGET.hex of DIR/TARGET/

What is packed should be little, such as the fewest inputs of up to 256 bytes that reach all edges:
cargo +nightly fuzz run TARGET -- -set_cover_merge=1 -use_counters=0 -max_len=256 DIR/TARGET FOUND
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
GOLDEN = FOLDER.parents[2] / "tests/protocol/golden"
TARGETS = sorted(path.stem for path in (FOLDER / "fuzz_targets").glob("*.rs"))
MAX_AUX_FRAMES = 8
MAX_SHORT_FRAME_BYTES = 255
SOCKET_KINDS = (b"ROUTER", b"DEALER", b"PUSH", b"PULL", b"XPUB")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)


def golden(*files: str) -> Iterator[list[bytes]]:
    """Frames of every line of golden files, in all versions."""
    for file in files:
        for path in sorted(GOLDEN.rglob(f"{file}.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                yield [bytes.fromhex(frame) for frame in line["frames_hex"]]


def live_outputs() -> Iterator[list[bytes]]:
    """Frames that a real engine sent to its front end."""
    for line in map(json.loads, (GOLDEN / "live_engine.jsonl").read_text().splitlines()):
        if line["channel"].startswith("output"):
            yield [bytes.fromhex(frame) for frame in line["frames_hex"]]


def input_of(frames: list[bytes]) -> bytes:
    """The input that stands for frames: number and lengths of auxiliary frames, then the first."""
    first, *aux_frames = frames
    aux_frames = aux_frames[:MAX_AUX_FRAMES]
    lengths = b"".join(min(len(frame), 0xFFFF).to_bytes(2, "big") for frame in aux_frames)
    return bytes([len(aux_frames)]) + lengths + first


def outputs() -> list[list[bytes]]:
    """Batches of outputs."""
    return [*golden("outputs", "utility_output"), *live_outputs()]


def arrays() -> Iterator[bytes]:
    """Outputs from the third field of the first one on, and requests from the tenth on."""
    for frames in outputs():
        match tree(frames[0]):
            case [_, [output, *_], *rest]:
                yield input_of([packed(output[2:] + rest), *frames[1:]])
    for frames in golden("request"):
        match tree(frames[0]):
            case [_, _, _, _, _, _, _, _, _, *rest]:
                yield input_of([packed(rest), *frames[1:]])


def stats() -> Iterator[bytes]:
    """Outputs from the statistics on."""
    for frames in outputs():
        match tree(frames[0]):
            case [_, _, *rest]:
                yield input_of([packed(rest), *frames[1:]])


def tree(frame: bytes) -> object:
    """The value of a frame; the marker of a dead engine is none."""
    import msgspec  # only seeds need it

    ext = msgspec.msgpack.Ext
    decoder = msgspec.msgpack.Decoder(ext_hook=lambda code, data: ext(code, bytes(data)))
    return None if frame.startswith(b"ENGINE") else decoder.decode(frame)


def packed(values: Iterable[object]) -> bytes:
    """Values one after the other."""
    import msgspec  # only seeds need it

    return b"".join(map(msgspec.msgpack.encode, values))


def zmtp_handshakes() -> Iterator[bytes]:
    """A greeting and a READY command, for each pair of sockets."""
    for own in range(5):
        for kind in SOCKET_KINDS:
            properties = [(b"Socket-Type", kind), (b"Identity", b"\x07\x00")]
            data = b"".join(
                bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
                for name, value in properties
            )
            yield bytes([own]) + GREETING + command(b"READY", data)
    yield b"\0" + GREETING + command(b"ERROR", b"\x04nope")


def zmtp_messages() -> Iterator[bytes]:
    """Messages of one and more frames, and commands."""
    ping = command(b"PING", b"\0\0abc")
    yield b"\0" + frame(b"one") + ping + frame(b"two", more=True) + frame(b"") + frame(b"x" * 300)
    yield b"\x10" + command(b"SUBSCRIBE", b"") + frame(b"") + command(b"ERROR", b"\x04nope")
    for frames in golden("control", "handshake"):
        whole = [frame(part, more=True) for part in frames]
        yield b"\x02" + b"".join(whole) + frame(b"") + ping


def command(name: bytes, data: bytes) -> bytes:
    """A ZMTP command."""
    return bytes([4, 1 + len(name) + len(data), len(name)]) + name + data


def frame(body: bytes, *, more: bool = False) -> bytes:
    """A ZMTP frame of a message."""
    if len(body) > MAX_SHORT_FRAME_BYTES:
        return bytes([2 | more]) + len(body).to_bytes(8, "big") + body
    return bytes([more, len(body)]) + body


def seeds(target: str) -> Iterable[bytes]:
    """First inputs of a target."""
    makers = {"arrays": arrays, "stats": stats}
    makers |= {"zmtp_handshake": zmtp_handshakes, "zmtp_messages": zmtp_messages}
    files = {
        "request": ("request", "control"),
        "utility": ("utility_request", "utility_output"),
        "handshake": ("handshake", "raw"),
        "coordinator": ("coordinator", "control", "raw"),
    }
    if target == "outputs":
        return map(input_of, outputs())
    return makers[target]() if target in makers else map(input_of, golden(*files[target]))


def write_inputs(folder: Path, inputs: Iterable[bytes]) -> None:
    """Writes inputs as libFuzzer names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def main(action: str, folder: Path) -> None:
    """Runs one of the three actions for every target."""
    for target in TARGETS:
        file = CORPUS / f"{target}.hex"
        if action == "seed":
            write_inputs(folder / target, seeds(target))
        elif action == "unpack":
            lines = file.read_text().splitlines() if file.exists() else []
            write_inputs(folder / target, map(bytes.fromhex, lines))
        elif action == "pack":
            found = sorted(path.read_bytes() for path in (folder / target).iterdir())
            CORPUS.mkdir(exist_ok=True)
            file.write_text("".join(f"{data.hex()}\n" for data in found))
        else:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
