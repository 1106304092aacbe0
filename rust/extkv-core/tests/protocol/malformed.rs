//! Every way in which bytes are no message: refused, with the path to the field.

use bytes::Bytes;
use extkv_core::protocol::{
    AbortRequests, ColumnarOutputs, CoordinatorCommand, DecodeProblem, EngineCoreOutputs,
    EngineCoreReadyResponse, EngineCoreRequest, HandshakeMessage, Profile, RequestType,
    StartDpWave, Untyped, UntypedError, UtilityCall, decode,
};
use rmpv::Value;

use crate::golden::golden;
use crate::pack::{
    assert_refused, batch, batch_with, list, map, output, pack, read_frames, request_sampling,
    request_with,
};

const NIL: Value = Value::Nil;

fn wrong_type(expected: &'static str, found: &'static str) -> DecodeProblem {
    DecodeProblem::WrongType { expected, found }
}

fn unknown(enumeration: &'static str, found: &str) -> DecodeProblem {
    DecodeProblem::UnknownMember { enumeration, found: found.to_owned() }
}

/// Both decoders of outputs refuse alike.
fn outputs_refused(value: &Value, path: &str, problem: &DecodeProblem) {
    assert_refused::<EngineCoreOutputs>(value, path, problem);
    assert_refused::<ColumnarOutputs>(value, path, problem);
}

fn array(dtype: &str, shape: Value, data: Value) -> Value {
    list([dtype.into(), shape, data])
}

fn raw_view(num_bytes: usize) -> Value {
    Value::Ext(3, vec![0; num_bytes])
}

fn logprobs(ids: Value) -> Value {
    let values = array("<f4", list([1.into(), 2.into()]), raw_view(8));
    let ranks = array("<i4", list([1.into()]), raw_view(4));
    list([ids, values, ranks, NIL])
}

#[test]
fn rejects_a_message_without_frames() {
    let error = decode::<AbortRequests>(&[], Profile::V0_32).unwrap_err();
    assert_eq!(error.problem(), &DecodeProblem::NoFrames);
    assert_eq!(error.path(), "");
}

#[test]
fn rejects_every_prefix_of_a_message() {
    for line in golden("outputs.jsonl").into_iter().take(12) {
        let mut frames = line.frames;
        let whole = frames[0].clone();
        for len in 0..whole.len() {
            frames[0] = whole.slice(..len);
            assert!(read_frames::<EngineCoreOutputs>(&frames).is_err(), "{} {len}", line.name);
            assert!(read_frames::<ColumnarOutputs>(&frames).is_err(), "{} {len}", line.name);
        }
    }
}

#[test]
fn rejects_a_string_that_ends_past_the_input() {
    let frames = [Bytes::from_static(b"\x91\xdb\xff\xff\xff\xff__")];
    let error = read_frames::<AbortRequests>(&frames).unwrap_err();
    let missing = u64::from(u32::MAX) - 2;
    assert_eq!(error.to_string(), format!("[0]: the input ends {missing} bytes too early"));
}

#[test]
fn rejects_an_array_of_more_members_than_bytes() {
    let frames = [Bytes::from_static(b"\xdd\xff\xff\xff\xff\x01")];
    let error = read_frames::<AbortRequests>(&frames).unwrap_err();
    let len = u64::from(u32::MAX);
    assert_eq!(error.problem(), &DecodeProblem::TooLong { what: "array", len, left: 1 });
}

#[test]
fn rejects_a_map_of_more_entries_than_bytes() {
    let frames = [Bytes::from_static(b"\xdf\xff\xff\xff\xff\x01\x02")];
    let error = read_frames::<HandshakeMessage>(&frames).unwrap_err();
    let len = u64::from(u32::MAX);
    assert_eq!(error.problem(), &DecodeProblem::TooLong { what: "map", len, left: 2 });
}

#[test]
fn rejects_bytes_after_the_message() {
    let frames = [Bytes::from_static(b"\x90\xc0\xc0")];
    let error = read_frames::<AbortRequests>(&frames).unwrap_err();
    assert_eq!(error.problem(), &DecodeProblem::TrailingBytes { len: 2 });
}

#[test]
fn rejects_the_reserved_byte() {
    let error = Untyped::from_msgpack(Bytes::from_static(b"\xc1")).unwrap_err();
    assert_eq!(error.problem(), &wrong_type("a value", "the reserved byte c1"));
}

#[test]
fn rejects_nil_for_a_list_of_tokens() {
    let error = read_frames::<EngineCoreOutputs>(&[pack(&batch_with(1, NIL))]).unwrap_err();
    assert_eq!(error.to_string(), "outputs[0].new_token_ids: expected an array, found nil");
    let error = read_frames::<ColumnarOutputs>(&[pack(&batch_with(1, NIL))]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "outputs[0].new_token_ids: expected an array of token ids, found nil"
    );
}

#[test]
fn rejects_bytes_for_a_text() {
    let value = batch_with(0, Value::Binary(b"req".to_vec()));
    outputs_refused(&value, "outputs[0].request_id", &wrong_type("a str", "bytes"));
}

#[test]
fn rejects_a_float_a_bool_a_text_and_nil_for_an_int() {
    for (value, found) in [(1.5.into(), "a float"), (true.into(), "a bool"), ("1".into(), "a str")]
    {
        outputs_refused(
            &batch_with(13, value),
            "outputs[0].num_nans_in_logits",
            &wrong_type("an int", found),
        );
    }
}

#[test]
fn rejects_an_int_for_a_bool() {
    let problem = wrong_type("a bool", "an int");
    assert_refused::<EngineCoreRequest>(&request_with(15, 1.into()), "resumable", &problem);
}

#[test]
fn rejects_a_text_for_a_float() {
    let problem = wrong_type("a float", "a str");
    assert_refused::<EngineCoreRequest>(&request_with(5, "now".into()), "arrival_time", &problem);
}

#[test]
fn rejects_a_text_key_of_a_map_by_token() {
    let bias = map([("5", 1.5.into())]);
    assert_refused::<EngineCoreRequest>(
        &request_sampling([("logit_bias", bias)]),
        "sampling_params.logit_bias[0]",
        &wrong_type("an int", "a str"),
    );
}

#[test]
fn names_the_key_of_a_wrong_value() {
    let bias = Value::Map(vec![(5.into(), 1.5.into()), (9.into(), "x".into())]);
    assert_refused::<EngineCoreRequest>(
        &request_sampling([("logit_bias", bias)]),
        "sampling_params.logit_bias[\"9\"]",
        &wrong_type("a float", "a str"),
    );
}

#[test]
fn rejects_token_ids_out_of_range() {
    for id in [Value::from(-1), Value::from(1_u64 << 32)] {
        let expected = "an int in [0, 2**32)";
        let found = i128::from(id.as_i64().unwrap());
        assert_refused::<EngineCoreRequest>(
            &request_with(1, list([7.into(), id])),
            "prompt_token_ids[1]",
            &DecodeProblem::OutOfRange { expected, found },
        );
    }
}

#[test]
fn columns_reject_tokens_that_are_no_int32() {
    let id = 1_u32 << 31;
    assert_refused::<ColumnarOutputs>(
        &batch_with(1, list([id.into()])),
        "outputs[0].new_token_ids[0]",
        &DecodeProblem::OutOfRange { expected: "an int in [0, 2**31)", found: i128::from(id) },
    );
}

#[test]
fn rejects_an_int_past_63_bits() {
    let found = i128::from(u64::MAX);
    assert_refused::<EngineCoreRequest>(
        &request_with(11, u64::MAX.into()),
        "client_index",
        &DecodeProblem::OutOfRange { expected: "an int in [-2**63, 2**63)", found },
    );
}

#[test]
fn rejects_unknown_finish_reason() {
    let value = batch_with(5, 9.into());
    outputs_refused(&value, "outputs[0].finish_reason", &unknown("FinishReason", "9"));
}

#[test]
fn rejects_unknown_event_type() {
    let events = list([map([("type", 4.into()), ("timestamp", 1.0.into())])]);
    outputs_refused(
        &batch_with(7, events),
        "outputs[0].events[0].type",
        &unknown("EngineCoreEventType", "4"),
    );
}

#[test]
fn rejects_unknown_output_kind() {
    assert_refused::<EngineCoreRequest>(
        &request_sampling([("output_kind", 3.into())]),
        "sampling_params.output_kind",
        &unknown("RequestOutputKind", "3"),
    );
}

#[test]
fn rejects_unknown_handshake_status() {
    let value = map([("status", "BYE".into()), ("local", true.into()), ("headless", true.into())]);
    assert_refused::<HandshakeMessage>(&value, "status", &unknown("handshake status", "BYE"));
}

#[test]
fn rejects_unknown_coordinator_command() {
    let value = list(["STOP".into(), 1.into()]);
    assert_refused::<CoordinatorCommand>(
        &value,
        "command",
        &unknown("coordinator command", "STOP"),
    );
}

#[test]
fn rejects_unknown_type_frames() {
    let cases: [(&[u8], &str); 4] = [
        (b"", "an empty frame is no request type"),
        (b"\x04", "byte 04 is no request type"),
        (b"\x45", "byte 45 is no request type"),
        (b"READY", "a frame of 5 bytes (5245414459…) is no request type"),
    ];
    for (frame, text) in cases {
        assert_eq!(RequestType::from_frame(frame).unwrap_err().to_string(), text);
    }
}

#[test]
fn rejects_requests_with_too_few_elements() {
    let Value::Array(mut elements) = request_with(0, "req".into()) else { unreachable!() };
    elements.truncate(8);
    let problem = DecodeProblem::MissingElement { len: 8 };
    assert_refused::<EngineCoreRequest>(&Value::Array(elements), "data_parallel_rank", &problem);
}

#[test]
fn rejects_outputs_with_too_few_elements() {
    let problem = DecodeProblem::MissingElement { len: 1 };
    outputs_refused(&batch(output(1, 0, "req".into())), "outputs[0].new_token_ids", &problem);
    let problem = DecodeProblem::MissingElement { len: 0 };
    outputs_refused(&batch(list([])), "outputs[0].request_id", &problem);
}

#[test]
fn rejects_a_ready_response_without_block_size() {
    let value = map([("max_model_len", 8.into()), ("num_gpu_blocks", 8.into())]);
    let problem = DecodeProblem::MissingKey;
    assert_refused::<EngineCoreReadyResponse>(&value, "block_size", &problem);
}

#[test]
fn rejects_text_that_is_not_utf8() {
    let frames = [Bytes::from_static(b"\x91\xa2\xff\xfe")];
    let error = read_frames::<AbortRequests>(&frames).unwrap_err();
    assert_eq!(error.problem(), &DecodeProblem::InvalidUtf8);
}

#[test]
fn rejects_pickled_objects_and_unknown_extensions() {
    let cases = [
        (1, DecodeProblem::Pickled { code: 1 }),
        (2, DecodeProblem::Pickled { code: 2 }),
        (5, DecodeProblem::UnknownExtension { code: 5 }),
        (-1, DecodeProblem::UnknownExtension { code: -1 }),
    ];
    for (code, problem) in cases {
        let pickle = Value::Ext(code, vec![0x80, 0x04]);
        let call = list([0.into(), 1.into(), "f".into(), list([pickle.clone()])]);
        assert_refused::<UtilityCall>(&call, "args[0]", &problem);
        let extra = map([("hook", pickle.clone())]);
        let request = request_sampling([("extra_args", extra)]);
        assert_refused::<EngineCoreRequest>(&request, "sampling_params.extra_args[0]", &problem);
        let ids = array("<i4", list([1.into()]), pickle);
        let path = "outputs[0].new_logprobs.logprob_token_ids.data";
        outputs_refused(&batch_with(2, logprobs(ids)), path, &problem);
    }
}

#[test]
fn rejects_tensors_in_shared_memory() {
    let shared =
        map([("sender_id", "a".into()), ("message_id", 0.into()), ("tensor_id", 0.into())]);
    let tensor = array("float32", list([4.into()]), shared);
    let problem = DecodeProblem::OutOfBandTensor;
    assert_refused::<EngineCoreRequest>(&request_with(9, tensor), "prompt_embeds.data", &problem);
}

#[test]
fn rejects_frames_that_the_message_does_not_have() {
    for index in [0, -1, 1, 70_000] {
        let tensor = array("float32", list([4.into()]), index.into());
        let problem = DecodeProblem::NoSuchFrame { index: index.into(), last: 0 };
        assert_refused::<EngineCoreRequest>(
            &request_with(9, tensor),
            "prompt_embeds.data",
            &problem,
        );
    }
}

#[test]
fn rejects_element_types_that_arrays_do_not_have() {
    for dtype in ["|O", "|V8", "<U4", "int32"] {
        let ids = array(dtype, list([1.into()]), raw_view(4));
        let problem = DecodeProblem::UnknownDtype { name: dtype.to_owned() };
        let path = "outputs[0].new_logprobs.logprob_token_ids.dtype";
        outputs_refused(&batch_with(2, logprobs(ids)), path, &problem);
    }
}

#[test]
fn rejects_data_that_does_not_fill_the_shape() {
    let cases = [
        (list([2.into(), 3.into()]), "[2, 3]"),
        (list([u64::MAX.into()]), "[18446744073709551615]"),
    ];
    for (shape, text) in cases {
        let problem = DecodeProblem::ShapeMismatch {
            dtype: "<i4".to_owned(),
            shape: text.to_owned(),
            found: 20,
        };
        let ids = array("<i4", shape, raw_view(20));
        let path = "outputs[0].new_logprobs.logprob_token_ids";
        outputs_refused(&batch_with(2, logprobs(ids)), path, &problem);
    }
}

#[test]
fn rejects_arrays_of_too_many_dimensions() {
    let shape = Value::Array(vec![1.into(); 65]);
    let problem = DecodeProblem::Invalid { rule: "an array has at most 64 dimensions" };
    assert_refused::<EngineCoreRequest>(
        &request_with(9, array("uint8", shape, raw_view(1))),
        "prompt_embeds.shape",
        &problem,
    );
}

#[test]
fn rejects_values_that_nest_too_deep() {
    let deep = (0..80).fold(NIL, |inner, _| list([inner]));
    let call = list([0.into(), 1.into(), "f".into(), deep]);
    let error = read_frames::<UtilityCall>(&[pack(&call)]).unwrap_err();
    assert_eq!(error.problem(), &DecodeProblem::TooDeep { limit: 64 });
    let tensors = (0..80).fold(1.into(), |inner, _| list([inner]));
    let part = map([("data", tensors), ("field", list(["batched".into(), map([])]))]);
    let position = map([("offset", 0.into()), ("length", 1.into())]);
    let feature = map([
        ("data", map([("x", part)])),
        ("modality", "image".into()),
        ("identifier", "a".into()),
        ("mm_position", position),
    ]);
    let request = request_with(2, list([feature]));
    let error = read_frames::<EngineCoreRequest>(&[pack(&request)]).unwrap_err();
    assert_eq!(error.problem(), &DecodeProblem::TooDeep { limit: 64 });
    assert!(error.path().starts_with("mm_features[0].data[\"x\"].data[0][0]"), "{error}");
}

#[test]
fn rejects_keys_that_python_cannot_hash() {
    let call = list([0.into(), 1.into(), "f".into(), Value::Map(vec![(map([]), 1.into())])]);
    let expected = "a str, a number, a bool, bytes or nil as key";
    assert_refused::<UtilityCall>(&call, "args", &wrong_type(expected, "a map"));
}

#[test]
fn rejects_trees_that_cannot_be_sent() {
    let cases = [
        (Value::Ext(1, vec![0]), DecodeProblem::Pickled { code: 1 }),
        (Value::Ext(9, vec![0]), DecodeProblem::UnknownExtension { code: 9 }),
    ];
    for (value, problem) in cases {
        let tree = list([NIL, map([("a", value)])]);
        let UntypedError::Refused { source } = Untyped::from_value(&tree).unwrap_err();
        assert_eq!((source.path().as_str(), source.problem()), ("[1][0]", &problem));
    }
}

#[test]
fn rejects_unknown_multimodal_fields() {
    let field = list(["ragged".into(), map([])]);
    let part = map([("data", NIL), ("field", field)]);
    let feature = map([("data", map([("x", part)]))]);
    assert_refused::<EngineCoreRequest>(
        &request_with(2, list([feature])),
        "mm_features[0].data[\"x\"].field.name",
        &unknown("multimodal field", "ragged"),
    );
}

#[test]
fn rejects_malformed_values_in_what_is_passed_over() {
    let mut frame = pack(&batch_with(13, 0.into())).to_vec();
    frame[0] = 0x9a;
    frame.extend(b"\x92\x01\xc1");
    let error = read_frames::<EngineCoreOutputs>(&[frame.clone().into()]).unwrap_err();
    let problem = wrong_type("a value", "the reserved byte c1");
    assert_eq!((error.path().as_str(), error.problem()), ("[9][1]", &problem));
    assert_eq!(read_frames::<ColumnarOutputs>(&[frame.into()]).unwrap_err(), error);
}

#[test]
fn rejects_adapters_without_number_or_path() {
    let cases = [
        (0, "/a", "lora_request.lora_int_id", "the id of an adapter is at least 1"),
        (1, "", "lora_request.lora_path", "the path of an adapter is not empty"),
    ];
    for (id, adapter_path, path, rule) in cases {
        let adapter = list(["a".into(), id.into(), adapter_path.into()]);
        let problem = DecodeProblem::Invalid { rule };
        assert_refused::<EngineCoreRequest>(&request_with(6, adapter), path, &problem);
    }
}

#[test]
fn rejects_no_constraint_and_two_constraints() {
    let cases = [
        (map([("_backend", "xgrammar".into())]), "no constraint is set, one is needed"),
        (
            map([("regex", "a".into()), ("grammar", "b".into())]),
            "several constraints are set, exactly one is allowed",
        ),
    ];
    for (params, rule) in cases {
        assert_refused::<EngineCoreRequest>(
            &request_sampling([("structured_outputs", params)]),
            "sampling_params.structured_outputs",
            &DecodeProblem::Invalid { rule },
        );
    }
}

#[test]
fn rejects_a_wave_without_a_known_exclusion() {
    let value = list([1.into(), "everyone".into()]);
    let problem = wrong_type("an int, bytes or nil", "a str");
    assert_refused::<StartDpWave>(&value, "exclude", &problem);
}
