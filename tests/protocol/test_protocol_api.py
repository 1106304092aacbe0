"""What a user of the protocol classes relies on: fields, defaults, laziness, zero copies."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from extkv import _extkv, protocol
from extkv.errors import ProtocolError
from extkv.protocol import messages
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = st.text(max_size=40)


def lists(positions: int = 2, width: int = 21) -> protocol.LogprobsLists:
    return protocol.LogprobsLists(
        logprob_token_ids=np.arange(positions * width, dtype=np.int32).reshape(positions, width),
        logprobs=np.linspace(-9, 0, positions * width, dtype=np.float32).reshape(positions, width),
        sampled_token_ranks=np.arange(positions, dtype=np.int64),
    )


# Messages that the codec describes without a field table: results, and the two commands.
WITHOUT_FIELDS = {"UtilityResult", "FirstRequest", "ScaleElasticEp"}
DATACLASSES = [
    name
    for name, cls in messages.CLASSES.items()
    if dataclasses.is_dataclass(cls) and name not in WITHOUT_FIELDS
]


@pytest.mark.parametrize("name", DATACLASSES)
def test_both_languages_have_the_same_fields(name: str):
    python = {field.name for field in dataclasses.fields(messages.CLASSES[name])}
    assert python == set(_extkv.protocol_fields(name))


@pytest.mark.parametrize(
    "cls",
    [
        protocol.SamplingParams,
        protocol.EngineCoreRequest,
        protocol.EngineCoreOutput,
        protocol.EngineCoreOutputs,
    ],
)
def test_native_classes_have_the_fields_of_the_codec(cls: type):
    names = _extkv.protocol_fields(cls.__name__)
    assert [name for name in names if not hasattr(cls, name)] == []


def test_defaults_of_sampling_parameters_are_those_of_vllm():
    params = protocol.SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert (params.stop, params.bad_words, params._all_stop_token_ids) == ([], [], frozenset())
    assert params.output_kind is protocol.RequestOutputKind.CUMULATIVE
    assert params.skip_reading_prefix_cache is False
    assert protocol.SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert protocol.SamplingParams(stop="a", stop_token_ids=[3])._all_stop_token_ids == {3}


def test_messages_print_as_they_are_built():
    params = protocol.SamplingParams(temperature=0.5, stop=["a"])
    text = "SamplingParams(temperature=0.5, stop=['a'], skip_reading_prefix_cache=False)"
    assert repr(params) == text
    output = protocol.EngineCoreOutput(
        request_id="a", new_token_ids=[1], finish_reason=protocol.FinishReason.STOP
    )
    outputs = protocol.EngineCoreOutputs(outputs=[output], timestamp=1.5)
    inner = (
        "EngineCoreOutput(request_id='a', new_token_ids=[1], finish_reason=<FinishReason.STOP: 0>)"
    )
    assert repr(outputs) == f"EngineCoreOutputs(outputs=[{inner}], timestamp=1.5)"


def test_equality_is_by_value():
    def request(n: int) -> protocol.EngineCoreRequest:
        return protocol.EngineCoreRequest(
            request_id="a",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=protocol.SamplingParams(n=n),
            pooling_params=None,
            arrival_time=1.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    assert request(1) == request(1)
    assert request(1) != request(2)
    assert lists() == lists()
    assert lists(2) != lists(3)
    assert protocol.UtilityResult(result=1) != protocol.UtilityResult(result=2)
    with pytest.raises(TypeError):
        hash(request(1))
    with pytest.raises(TypeError):
        _ = request(1) < request(2)


def test_a_batch_is_read_as_arrays_without_objects():
    ids = [f"request-{index}" for index in range(1024)]
    frames = protocol.encode_output_columns(ids, np.arange(1024))
    gc.collect()
    before = sys.getallocatedblocks()
    outputs = protocol.decode_outputs(frames)
    arrays = (outputs.token_ids, outputs.token_offsets, outputs.finish_reasons)
    assert sys.getallocatedblocks() - before < 100
    assert [array.dtype for array in arrays] == [np.int32, np.int64, np.int8]
    assert arrays[0].tolist() == list(range(1024))
    assert arrays[1].tolist() == list(range(1025))
    assert set(arrays[2].tolist()) == {-1}
    assert outputs.request_ids == ids
    assert len(outputs) == len(outputs.outputs) == 1024
    assert outputs.outputs[7].request_id == "request-7"
    assert outputs.outputs[7].new_token_ids == [7]


def test_log_probabilities_are_views_of_the_frames():
    frames = protocol.encode_output_columns(
        ["a"], [5, 6], token_offsets=[0, 2], logprobs=lists(2, 64)
    )
    assert len(frames) == 3
    found = protocol.decode_outputs(frames).outputs[0].new_logprobs
    assert found == lists(2, 64)
    assert found.logprobs.base is frames[2]
    assert found.sampled_token_ranks.base is frames[0]
    assert not found.logprobs.flags.writeable


def test_arrays_keep_the_frames_alive():
    frames = protocol.encode_output_columns(["a"], [5, 6], token_offsets=[0, 2], logprobs=lists())
    logprobs = protocol.decode_outputs(frames).outputs[0].new_logprobs
    expected = lists()
    del frames
    gc.collect()
    assert logprobs == expected


def test_log_probabilities_stack_over_the_batch():
    frames = protocol.encode_output_columns(
        ["a", "b", "c"], [5, 6, 7], token_offsets=[0, 1, 1, 3], logprobs=lists(3)
    )
    outputs = protocol.decode_outputs(frames)
    assert outputs.logprob_indices == [0, 2]
    token_ids, logprobs, ranks = outputs.stacked_logprobs()
    assert np.array_equal(token_ids, lists(3).logprob_token_ids)
    assert np.array_equal(logprobs, lists(3).logprobs)
    assert np.array_equal(ranks, lists(3).sampled_token_ranks)


def test_outputs_with_details_are_named():
    plain = protocol.EngineCoreOutput(request_id="a", new_token_ids=[1])
    detailed = protocol.EngineCoreOutput(request_id="b", new_token_ids=[2], stop_reason="END")
    outputs = protocol.EngineCoreOutputs(outputs=[plain, detailed])
    assert outputs.detailed_indices == [1]
    assert outputs.outputs == [plain, detailed]
    assert outputs.outputs[1].stop_reason == "END"
    assert outputs.outputs[0].events is None


def test_messages_are_classified():
    call = protocol.UtilityOutput(call_id=2**64 - 1, result=protocol.UtilityResult(result=None))
    assert protocol.EngineCoreOutputs().kind == "request_batch"
    assert protocol.EngineCoreOutputs(utility_output=call).kind == "utility_result"
    assert protocol.EngineCoreOutputs(wave_complete=0).kind == "dp_control"
    assert protocol.EngineCoreOutputs(start_wave=0).kind == "dp_control"


@pytest.mark.parametrize("number", [13360216285664366642, 2**64 - 1, -(2**63)])
def test_numbers_of_64_bits_are_exact(number: int):
    call = protocol.UtilityCall(
        client_index=0, call_id=abs(number), method="f", args=[number, {"a": number}]
    )
    assert protocol.decode_utility_call(protocol.encode_utility_call(call)) == call


def test_unknown_parts_are_counted():
    frame = msgspec.msgpack.encode([0, [["a", [1], *[None] * 11, 0, *[None] * 4, "new"]]])
    skipped = []
    outputs = protocol.decode_outputs(frame, on_skipped=skipped.append)
    assert outputs.request_ids == ["a"]
    assert skipped == [protocol.Skipped(elements=1, keys=0)]
    protocol.decode_outputs(protocol.encode_outputs(outputs), on_skipped=skipped.append)
    assert len(skipped) == 1


@pytest.mark.parametrize("as_buffer", [bytes, bytearray, memoryview])
def test_frames_may_be_any_buffer(as_buffer: type):
    frames = protocol.encode_output_columns(["a"], [5, 6], token_offsets=[0, 2], logprobs=lists())
    outputs = protocol.decode_outputs([as_buffer(frame) for frame in frames])
    assert outputs.outputs[0].new_logprobs == lists()
    assert protocol.decode_abort(as_buffer(b"\x91\xa1a")) == ["a"]


@pytest.mark.parametrize(
    "embeds",
    [
        torch.arange(12, dtype=torch.float32).reshape(3, 4),
        torch.arange(300, dtype=torch.bfloat16).reshape(3, 100)[:, ::2],
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 4),
    ],
    ids=["float32", "strided-bfloat16", "scalar", "empty"],
)
def test_torch_tensors_cross_unchanged(embeds: torch.Tensor):
    request = protocol.EngineCoreRequest(
        request_id="a",
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=None,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=embeds,
    )
    found = protocol.decode_request(protocol.encode_request(request)).prompt_embeds
    assert (found.dtype, found.shape) == (str(embeds.dtype)[6:], tuple(embeds.shape))
    if embeds.numel():
        flat = torch.frombuffer(bytearray(found.data), dtype=embeds.dtype)
        assert torch.equal(flat.reshape(found.shape), embeds)


def test_torch_and_numpy_arrays_may_stand_for_each_other():
    params = protocol.SamplingParams(prompt_logprob_token_ids=torch.tensor([[1, 2]]))
    assert params.prompt_logprob_token_ids.dtype == np.int64
    output = protocol.EngineCoreOutput(
        request_id="a", new_token_ids=[], pooling_output=np.array([1.5], np.float32)
    )
    assert output.pooling_output == protocol.Tensor("float32", (1,), np.float32(1.5).tobytes())
    assert output.pooling_output.numpy().tolist() == [1.5]


def test_multimodal_fields_survive():
    part = protocol.MultiModalFieldElem(
        data=[protocol.Tensor("uint8", (2,), b"ab"), [1, 2.5]],
        field=protocol.MultiModalFlatField(slices=[slice(0, 2), [slice(None, 3, 1)]], dim=1),
    )
    feature = protocol.MultiModalFeatureSpec(
        data={"pixels": part},
        modality="image",
        identifier="h",
        mm_position=protocol.PlaceholderRange(offset=1, length=2),
    )
    request = protocol.EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[1],
        mm_features=[feature],
        sampling_params=None,
        pooling_params=protocol.PoolingParams(task="embed"),
        arrival_time=0.0,
        lora_request=protocol.LoRARequest(lora_name="l", lora_int_id=1, lora_path="/l"),
        cache_salt=None,
        data_parallel_rank=None,
    )
    found = protocol.decode_request(protocol.encode_request(request))
    assert found == request
    assert found.mm_features == [feature]


def test_each_profile_leaves_out_what_it_lacks():
    output = protocol.EngineCoreOutput(
        request_id="a",
        new_token_ids=[1],
        ec_transfer_params={"a": 1},
        mm_cache_miss_hashes=["h"],
        error=protocol.RequestError(code="validation_error", message="too long"),
    )
    outputs = protocol.EngineCoreOutputs(outputs=[output])
    found = {
        profile: protocol.decode_outputs(
            protocol.encode_outputs(outputs, profile), profile
        ).outputs[0]
        for profile in ("0.25", "0.26", "0.32", "0.33")
    }
    assert found["0.33"] == output
    assert found["0.32"].error is None
    assert found["0.32"].mm_cache_miss_hashes == ["h"]
    assert found["0.26"].mm_cache_miss_hashes is None
    assert found["0.26"].ec_transfer_params == {"a": 1}
    assert found["0.25"].ec_transfer_params is None


@pytest.mark.parametrize(
    ("version", "profile"),
    [("0.25.1", "0.25"), ("0.26.0", "0.26"), ("0.32.0+cpu", "0.32"), ("0.40.1", "0.33")],
)
def test_a_version_chooses_its_profile(version: str, profile: str):
    assert protocol.profile_of_version(version) == profile


@given(
    outputs=st.lists(
        st.builds(
            protocol.EngineCoreOutput,
            request_id=TEXT,
            new_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
            finish_reason=st.none() | st.sampled_from(protocol.FinishReason),
            stop_reason=st.none() | st.integers(-(2**63), 2**63 - 1) | TEXT,
            trace_headers=st.none() | st.dictionaries(TEXT, TEXT, max_size=4),
        ),
        max_size=20,
    ),
    finished=st.none() | st.sets(TEXT, max_size=3),
)
def test_outputs_round_trip(outputs: list[protocol.EngineCoreOutput], finished: set[str] | None):
    message = protocol.EngineCoreOutputs(outputs=outputs, finished_requests=finished, timestamp=2.5)
    found = protocol.decode_outputs(protocol.encode_outputs(message))
    assert found == message
    assert found.outputs == outputs
    assert found.request_ids == [output.request_id for output in outputs]
    assert found.token_offsets[-1] == sum(len(output.new_token_ids) for output in outputs)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(args=st.lists(PLAIN, max_size=4), call_id=st.integers(0, 2**64 - 1))
def test_arguments_of_calls_are_written_as_msgspec_writes_them(args: list[object], call_id: int):
    call = protocol.UtilityCall(client_index=0, call_id=call_id, method="f", args=args)
    frames = protocol.encode_utility_call(call)
    assert frames == [msgspec.msgpack.encode((0, call_id, "f", args))]
    assert protocol.decode_utility_call(frames).args == args


@given(prompt=st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_prompts_are_written_as_msgspec_writes_them(prompt: list[int]):
    fields = [None, None, None, 0.5, None, None, None]
    request = protocol.EngineCoreRequest(
        request_id="a",
        prompt_token_ids=np.array(prompt, dtype=np.uint32),
        mm_features=None,
        sampling_params=None,
        pooling_params=None,
        arrival_time=0.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    (frame,) = protocol.encode_request(request)
    assert frame[3:].startswith(msgspec.msgpack.encode(["a", prompt, *fields])[1:])
    assert protocol.decode_request(frame).prompt_token_ids.tolist() == prompt


DECODERS = (
    protocol.decode_request,
    protocol.decode_outputs,
    protocol.decode_abort,
    protocol.decode_utility_call,
    protocol.decode_handshake,
    protocol.decode_init,
    protocol.decode_ready_response,
    protocol.decode_start_dp_wave,
    protocol.decode_coordinator_news,
    protocol.decode_coordinator_command,
)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_errors(decode: Callable, data: bytes):
    with contextlib.suppress(ProtocolError):
        repr(decode(data))
