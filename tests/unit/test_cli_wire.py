"""`extkv wire decode` on messages that pyzmq peers send, and on golden ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from extkv import protocol
from extkv.cli.app import app
from extkv.cli.wire import Kind
from extkv.protocol.reading import KINDS
from support.zmq_peers import (
    ABORT,
    ADD,
    LENGTH,
    READY_RESPONSE,
    START_DP_WAVE,
    UTILITY,
    batch_fields,
    identity_of,
    output_fields,
    pack,
    request_fields,
)
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

ADDRESSES = {
    "inputs": ["tcp://h:1"],
    "outputs": ["tcp://h:2"],
    "coordinator_input": None,
    "coordinator_output": None,
    "frontend_stats_publish_address": None,
}


def decode(directory: Path, frames: list[bytes], *options: str):
    """Run the command on frames in files."""
    names = []
    for place, frame in enumerate(frames):
        path = directory / f"frame-{place}"
        path.write_bytes(frame)
        names.append(str(path))
    return CliRunner().invoke(app, ["wire", "decode", *names, *options])


@pytest.mark.parametrize(
    ("kind", "frames", "part"),
    [
        ("request", [ADD, pack(request_fields("r1", [1, 2], top_p=0.5))], ["request_id", "r1"]),
        (
            "request",
            [identity_of(3), ADD, pack(request_fields("r1", [1], top_p=0.5))],
            ["sampling_params", "top_p", 0.5],
        ),
        ("abort", [ABORT, pack(["a", "b"])], [1, "b"]),
        ("start-dp-wave", [START_DP_WAVE, pack([4, b"\x01\x00"])], ["wave", 4]),
        ("utility-call", [UTILITY, pack([0, 2**64 - 1, "sleep", []])], ["call_id", 2**64 - 1]),
        (
            "outputs",
            [pack(batch_fields([output_fields("r1", [5], LENGTH)]))],
            ["outputs", 0, "finish_reason", "LENGTH"],
        ),
        ("init", [pack({"addresses": ADDRESSES, "parallel_config": {}})], ["addresses"]),
        ("handshake", [pack({"status": "HELLO", "local": True, "headless": False})], ["local"]),
        ("ready-response", [pack(READY_RESPONSE)], ["block_size", 16]),
        ("coordinator-news", [pack([[[1, 2, 0.5]], 7, True])], ["wave", 7]),
        ("coordinator-command", [pack([1, 7])], []),
        ("engine-core-dead", [b"ENGINE_CORE_DEAD"], []),
    ],
)
def test_the_kind_is_found_and_the_message_printed(tmp_path, kind, frames, part):
    result = decode(tmp_path, frames)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == kind
    value = found["message"]
    *path, expected = part or [value]
    for step in path:
        value = value[step]
    if isinstance(value, dict) and isinstance(expected, str):
        assert expected in value
    else:
        assert value == expected


def test_arrays_in_frames_of_their_own_are_printed_with_type_and_shape(tmp_path):
    logprobs = protocol.LogprobsLists(
        logprob_token_ids=np.arange(128, dtype=np.int32).reshape(1, 128),
        logprobs=np.full((1, 128), -np.inf, np.float32),
        sampled_token_ranks=np.array([1], np.int32),
    )
    output = protocol.EngineCoreOutput(request_id="r1", new_token_ids=[0], new_logprobs=logprobs)
    frames = protocol.encode_outputs(protocol.EngineCoreOutputs(outputs=[output]))
    assert len(frames) == 3
    result = decode(tmp_path, frames)
    found = json.loads(result.stdout)["message"]["outputs"][0]["new_logprobs"]
    assert found["logprob_token_ids"]["dtype"] == "<i4"
    assert found["logprob_token_ids"]["shape"] == [1, 128]
    assert found["logprobs"]["values"][0][:2] == ["-inf", "-inf"]


def test_what_the_profile_does_not_know_is_counted(tmp_path):
    batch = [*batch_fields([[*output_fields("r1", [5]), "new"]]), "newer"]
    result = decode(tmp_path, [pack(batch)])
    assert result.exit_code == 0
    assert "passed over: 2 elements of arrays, 0 keys of maps" in result.stderr


def test_another_profile_and_a_named_kind_are_taken(tmp_path):
    fields = output_fields("r1", [5])
    del fields[9]
    batch = batch_fields([fields[:13]])[:8]
    result = decode(tmp_path, [pack(batch)], "--profile", "0.25", "--kind", "outputs")
    assert json.loads(result.stdout)["message"]["outputs"][0]["new_token_ids"] == [5]


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"\xc1"], "error: "),
        ([b""], "error: "),
        ([ADD], "error: "),
        ([ADD, pack(["r1", None])], "error: "),
        ([b"\x09", pack([])], "error: "),
        ([pack(batch_fields([output_fields("r1", [5], 9)]))], "outputs[0].finish_reason"),
        ([pack({"nothing": 1})], "addresses"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_field(tmp_path, frames, text):
    result = decode(tmp_path, frames)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


def test_the_command_knows_every_kind():
    assert tuple(kind.value for kind in Kind) == KINDS
