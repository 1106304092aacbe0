"""Every golden message decodes to the value it was made of, and encodes to the same bytes."""

from __future__ import annotations

import pytest
from extkv import protocol
from golden_vectors import Golden, differences, golden

CODECS = {
    "request": (protocol.decode_request, protocol.encode_request),
    "outputs": (protocol.decode_outputs, protocol.encode_outputs),
    "utility_output": (protocol.decode_outputs, protocol.encode_outputs),
    "utility_request": (protocol.decode_utility_call, protocol.encode_utility_call),
    "abort": (protocol.decode_abort, protocol.encode_abort),
    "start_dp_wave": (protocol.decode_start_dp_wave, protocol.encode_start_dp_wave),
    "hello": (protocol.decode_handshake, protocol.encode_handshake),
    "ready": (protocol.decode_handshake, protocol.encode_handshake),
    "init": (protocol.decode_init, protocol.encode_init),
    "ready_response": (protocol.decode_ready_response, protocol.encode_ready_response),
    "coord_stats": (protocol.decode_coordinator_news, protocol.encode_coordinator_news),
    "coord_wave": (protocol.decode_coordinator_news, protocol.encode_coordinator_news),
    "coord": (protocol.decode_coordinator_command, protocol.encode_coordinator_command),
}
# Messages that the vectors describe as the bare list of their fields.
FIELDS_OF_BARE_LISTS = {
    "utility_request": ("client_index", "call_id", "method", "args"),
    "start_dp_wave": ("wave", "exclude"),
    "coord_stats": ("loads", "wave", "is_running"),
    "coord_wave": ("loads", "wave", "is_running"),
}


def kind_of(line: Golden) -> str:
    kinds = [kind for kind in CODECS if line.name.startswith(kind)]
    return max(kinds, key=len) if kinds else line.file


LINES = [
    line
    for file in ("request", "outputs", "utility_output", "utility_request", "control", "handshake")
    for line in golden(file)
] + [line for line in golden("coordinator") if line.name.startswith("coord")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.test_id)
def test_golden_message_decodes_to_its_value_and_encodes_to_its_bytes(line: Golden):
    kind = kind_of(line)
    decode, encode = CODECS[kind]
    skipped = []
    message = decode(line.frames, line.profile, on_skipped=skipped.append)
    assert skipped == []
    assert differences(line.python_value, comparable(kind, message)) == []
    assert encode(message, line.profile) == line.frames


def comparable(kind: str, message: object) -> object:
    if kind in FIELDS_OF_BARE_LISTS:
        values = [getattr(message, field) for field in FIELDS_OF_BARE_LISTS[kind]]
        if kind == "coord_stats":
            loads = values[0]
            values[0] = [
                [load.num_waiting, load.num_running, load.kv_cache_usage] for load in loads
            ]
        return values
    if isinstance(message, protocol.FirstRequest):
        return [message.exclude, message.wave]
    if isinstance(message, protocol.ScaleElasticEp):
        return ["SCALE_ELASTIC_EP", message.num_engines]
    return message


def test_all_files_of_vectors_are_read():
    assert len(LINES) > 200


def test_a_difference_is_found_at_every_level():
    (line,) = [line for line in golden("outputs") if line.test_id == "0.32-out_logprobs_aux"]
    message = protocol.decode_outputs(line.frames)
    fields = line.python_value["fields"]
    output = fields["outputs"][0]["fields"]
    arrays = output["new_logprobs"]["fields"]
    places = ((fields, "timestamp"), (output, "request_id"), (arrays["logprobs"], "shape"))
    for holder, key in places:
        kept, holder[key] = holder[key], "something else"
        assert len(differences(line.python_value, message)) == 1
        holder[key] = kept
    assert differences(line.python_value, message) == []
