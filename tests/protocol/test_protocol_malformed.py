"""Messages that are none raise typed errors with the path to the field; nothing else happens."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from extkv import _extkv, protocol
from extkv.errors import ExtkvError, InvalidArgumentError, InvalidMessageError, ProtocolError


def batch(*outputs: list[object]) -> bytes:
    return msgspec.msgpack.encode([0, list(outputs), None, 1.5, None, None, None, None, None])


def test_bytes_that_are_no_message_name_the_field():
    frame = batch(["a", [1]], ["b", [2, None]])
    with pytest.raises(
        ProtocolError, match=r"outputs\[1\]\.new_token_ids\[1\]: expected"
    ) as caught:
        protocol.decode_outputs(frame)
    assert caught.value.path == "outputs[1].new_token_ids[1]"
    assert isinstance(caught.value, (ExtkvError, ValueError))


def test_unknown_finish_reason_is_refused():
    frame = batch(["a", [1], None, None, None, 9])
    with pytest.raises(ProtocolError, match=r"outputs\[0\]\.finish_reason: 9 is no FinishReason"):
        protocol.decode_outputs(frame)


def test_pickled_arguments_are_refused_and_never_unpickled():
    pickle = msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'false'\ntR.")
    frame = msgspec.msgpack.encode([0, 1, "collective_rpc", [pickle]])
    with pytest.raises(ProtocolError, match="pickled object") as caught:
        protocol.decode_utility_call(frame)
    assert caught.value.path == "args[0]"


def test_a_tensor_in_shared_memory_is_refused():
    shared = ["float32", [4], {"sender_id": "a", "message_id": 0, "tensor_id": 0}]
    frame = msgspec.msgpack.encode(["r", None, None, None, None, 1.0, None, None, None, shared])
    with pytest.raises(
        ProtocolError, match=r"prompt_embeds\.data: the tensor lies in shared memory"
    ):
        protocol.decode_request(frame)


def test_no_frames_are_refused():
    with pytest.raises(ProtocolError, match="at least one frame"):
        protocol.decode_outputs([])


def test_the_dead_marker_is_no_message():
    with pytest.raises(ProtocolError):
        protocol.decode_outputs(protocol.ENGINE_CORE_DEAD)


@pytest.mark.parametrize("frame", [b"", b"\x04", b"\x45", b"READY"])
def test_unknown_type_frames_are_refused(frame: bytes):
    with pytest.raises(ProtocolError, match="no request type"):
        protocol.request_type(frame)


@pytest.mark.parametrize("frames", [3, None, [3], ["text"]])
def test_frames_of_a_wrong_type_raise_type_error(frames: object):
    with pytest.raises(TypeError):
        protocol.decode_outputs(frames)


def test_an_unknown_profile_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r'unknown wire profile "0\.31"'):
        protocol.decode_outputs(batch(), "0.31")


@pytest.mark.parametrize("version", ["dev", "", "0.9.1"])
def test_versions_without_a_profile_are_refused(version: str):
    with pytest.raises(InvalidArgumentError):
        protocol.profile_of_version(version)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 2**64}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [3]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias[0]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"output_kind": 7}, "output_kind"),
        ({"extra_args": {"f": object()}}, "extra_args"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": protocol.StructuredOutputsParams()}, "structured_outputs"),
        ({"prompt_logprob_token_ids": [["a"]]}, "prompt_logprob_token_ids"),
    ],
)
def test_values_that_a_field_cannot_have_name_it(fields: dict[str, object], path: str):
    with pytest.raises(InvalidMessageError) as caught:
        protocol.SamplingParams(**fields)
    assert caught.value.path == path
    assert isinstance(caught.value, (ValueError, TypeError))


def test_a_value_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidMessageError, match="contains itself"):
        protocol.encode_utility_call(
            protocol.UtilityCall(client_index=0, call_id=1, method="f", args=loop)
        )


def test_missing_and_unknown_fields_are_refused():
    with pytest.raises(InvalidMessageError, match="request_id: required"):
        protocol.EngineCoreOutput(new_token_ids=[1])
    with pytest.raises(TypeError, match='has no field "tokens"'):
        protocol.EngineCoreOutput(request_id="a", tokens=[1])


def test_messages_are_frozen():
    params = protocol.SamplingParams()
    with pytest.raises(AttributeError):
        params.n = 3
    with pytest.raises(AttributeError):
        protocol.EngineLoad(num_waiting=0, num_running=0).num_waiting = 3
    with pytest.raises(AttributeError):
        protocol.Tensor("uint8", (1,), b"a").dtype = "int8"
    with pytest.raises(AttributeError):
        del protocol.Tensor("uint8", (1,), b"a").dtype


def test_a_ready_response_without_what_its_profile_requires_is_refused():
    response = protocol.EngineCoreReadyResponse(
        max_model_len=8, num_gpu_blocks=8, block_size=8, dp_stats_address=None
    )
    with pytest.raises(
        InvalidArgumentError, match=r"field dtype needs a value in wire profile 0\.32"
    ):
        protocol.encode_ready_response(response)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"token_ids": [1]}, "token_ends must rise to 1, found 2 at 1"),
        ({"token_ids": [1, 2, 3]}, "token_ids has 3 entries, 2 expected"),
        ({"token_ids": [1, -2]}, "token ids must be in"),
        ({"token_ids": [[1, 2]]}, "one dimension"),
        ({"token_ids": [1.5, 2.5]}, "one dimension"),
        ({"token_offsets": [0, 1]}, "token_offsets must begin with 0"),
        ({"token_offsets": [1, 1, 2]}, "token_offsets must begin with 0"),
        ({"token_offsets": [0, 2, 1]}, "token_ends must rise"),
        ({"finish_reasons": [-1]}, "finish_reasons has 1 entries"),
        ({"timestamp": "now"}, "timestamp: expected a float"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, object], match: str):
    arguments = {"request_ids": ["a", "b"], "token_ids": [1, 2]} | columns
    with pytest.raises(InvalidArgumentError, match=match):
        protocol.encode_output_columns(**arguments)


def test_arrays_of_objects_cannot_be_sent():
    with pytest.raises(InvalidMessageError, match=r"new_logprobs\.logprob_token_ids"):
        protocol.EngineCoreOutput(
            request_id="a",
            new_token_ids=[1],
            new_logprobs=protocol.LogprobsLists(
                logprob_token_ids=np.array([["a"]]),
                logprobs=np.zeros((1, 1), np.float32),
                sampled_token_ranks=np.zeros(1, np.int32),
            ),
        )


def test_numpy_has_no_bfloat16():
    with pytest.raises(InvalidArgumentError, match="numpy has no type bfloat16"):
        protocol.Tensor("bfloat16", (1,), b"ab").numpy()


def one_output(width: int) -> protocol.EngineCoreOutput:
    return protocol.EngineCoreOutput(
        request_id="a",
        new_token_ids=[1],
        new_logprobs=protocol.LogprobsLists(
            logprob_token_ids=np.zeros((1, width), np.int32),
            logprobs=np.zeros((1, width), np.float32),
            sampled_token_ranks=np.zeros(1, np.int32),
        ),
    )


def test_log_probabilities_of_different_width_do_not_stack():
    outputs = protocol.EngineCoreOutputs(outputs=[one_output(2), one_output(3)])
    with pytest.raises(InvalidArgumentError, match=r"output 1 are <i4 of shape \[1, 3\]"):
        outputs.stacked_logprobs()


def test_log_probabilities_of_other_shapes_are_no_columns():
    lists = one_output(2).new_logprobs
    wrong = dataclasses.replace(lists, sampled_token_ranks=np.zeros(2, np.int32))
    with pytest.raises(InvalidArgumentError, match=r"sampled_token_ranks of shape \[2\]"):
        protocol.encode_output_columns(["a"], [1], logprobs=wrong)
    too_wide = dataclasses.replace(lists, logprobs=np.zeros((1, 2), np.longdouble))
    with pytest.raises(InvalidArgumentError, match='element type "<f16" is not supported'):
        protocol.encode_output_columns(["a"], [1], logprobs=too_wide)


def test_there_is_no_message_of_another_name():
    with pytest.raises(InvalidArgumentError, match='there is no message "letter"'):
        _extkv.protocol_decode("letter", b"", "0.32")
    with pytest.raises(InvalidArgumentError, match='there is no message "letter"'):
        _extkv.protocol_encode("letter", None, "0.32")
    with pytest.raises(InvalidArgumentError, match='there is no message "Letter"'):
        _extkv.protocol_fields("Letter")


def test_tokens_of_outputs_are_int32():
    output = protocol.EngineCoreOutput(request_id="a", new_token_ids=[2**31])
    with pytest.raises(InvalidMessageError, match=r"outputs\[0\]\.new_token_ids\[0\]"):
        protocol.EngineCoreOutputs(outputs=[output])
