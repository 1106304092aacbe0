//! What peers of other versions may send: accepted at every level, and what is unknown is counted.

use extkv_core::protocol::{
    ColumnarOutputs, Decoded, EncodeError, EngineCoreOutputs, EngineCoreReadyResponse,
    EngineCoreRequest, LoraRequest, Profile, SamplingParams, StructuredOutputsParams, Untyped,
    UtilityCall, UtilityOutput, Wire, decode, encode,
};
use rmpv::Value;

use crate::pack::{
    batch, batch_with, list, map, output, pack, read, request_sampling, request_with,
};

fn counts<T>(decoded: &Decoded<T>) -> (u64, u64) {
    (decoded.skipped.elements(), decoded.skipped.keys())
}

fn sampling<const N: usize>(entries: [(&str, Value); N]) -> SamplingParams {
    let request = read::<EngineCoreRequest>(&request_sampling(entries)).unwrap().message;
    *request.sampling_params.unwrap()
}

#[test]
fn outputs_of_12_13_and_14_elements_decode_in_the_profile_of_13() {
    for (len, num_extra) in [(12, 0), (13, 0), (14, 1)] {
        let Value::Array(mut elements) = output(13, 5, 1.into()) else { unreachable!() };
        elements.resize(len, "later".into());
        let frames = [pack(&batch(Value::Array(elements)))];
        let rows = decode::<EngineCoreOutputs>(&frames, Profile::V0_25).unwrap();
        // The batch itself has nine elements, one more than the profile knows.
        assert_eq!(counts(&rows), (num_extra + 1, 0), "{len}");
        assert_eq!(rows.message.outputs[0].new_token_ids, [7]);
        assert_eq!(rows.message.outputs[0].num_nans_in_logits, 0);
        let columns = decode::<ColumnarOutputs>(&frames, Profile::V0_25).unwrap();
        assert_eq!(columns.skipped, rows.skipped);
        assert_eq!(columns.message.to_rows().unwrap(), rows.message);
    }
}

#[test]
fn a_batch_with_a_tenth_element_is_read() {
    let Value::Array(mut elements) = batch_with(5, 0.into()) else { unreachable!() };
    elements.push(map([("type", "custom".into())]));
    let decoded = read::<ColumnarOutputs>(&Value::Array(elements)).unwrap();
    assert_eq!(counts(&decoded), (1, 0));
}

#[test]
fn the_shortest_outputs_take_defaults() {
    let value = list([0.into(), list([output(2, 0, "req".into())])]);
    let decoded = read::<EngineCoreOutputs>(&value).unwrap();
    assert_eq!(counts(&decoded), (0, 0));
    assert_eq!(decoded.message.outputs[0].finish_reason, None);
    assert_eq!(
        read::<ColumnarOutputs>(&value).unwrap().message.to_rows().unwrap(),
        decoded.message
    );
    assert_eq!(read::<EngineCoreOutputs>(&list([])).unwrap().message, EngineCoreOutputs::default());
}

#[test]
fn further_elements_are_counted_inside_logprobs_and_arrays() {
    let array = |dtype: &str, shape, num_bytes| {
        list([dtype.into(), shape, Value::Ext(3, vec![0; num_bytes]), "strides".into()])
    };
    let (one, pair) = (list([1.into()]), list([1.into(), 2.into()]));
    let ids = array("<i4", pair.clone(), 8);
    let logprobs = list([ids, array("<f4", pair, 8), array("<i8", one, 8), Value::Nil, 1.into()]);
    for finish_reason in [Value::Nil, 1.into()] {
        let Value::Array(mut elements) = output(18, 2, logprobs.clone()) else { unreachable!() };
        elements[5] = finish_reason;
        let value = batch(Value::Array(elements));
        assert_eq!(counts(&read::<EngineCoreOutputs>(&value).unwrap()), (4, 0));
        assert_eq!(counts(&read::<ColumnarOutputs>(&value).unwrap()), (4, 0));
    }
    // An output that is read a second time for its details counts once.
    let Value::Array(mut elements) = output(18, 2, logprobs) else { unreachable!() };
    elements[6] = "stop".into();
    let value = batch(Value::Array(elements));
    assert_eq!(counts(&read::<ColumnarOutputs>(&value).unwrap()), (4, 0));
}

#[test]
fn unknown_keys_are_counted_at_every_level() {
    let cached = map([("hits", 3.into()), ("misses", 4.into())]);
    let stats =
        map([("num_running_reqs", 2.into()), ("new", list([])), ("prefix_cache_stats", cached)]);
    let decoded = read::<EngineCoreOutputs>(&list([0.into(), list([]), stats])).unwrap();
    assert_eq!(counts(&decoded), (0, 2));
    let stats = decoded.message.scheduler_stats.unwrap();
    assert_eq!((stats.num_running_reqs, stats.prefix_cache_stats.hits), (2, 3));
}

#[test]
fn unknown_parts_may_hold_what_known_parts_may_not() {
    let stats = map([("new", Value::Ext(1, vec![1, 2, 3]))]);
    let decoded = read::<EngineCoreOutputs>(&list([0.into(), list([]), stats])).unwrap();
    assert_eq!(counts(&decoded), (0, 1));
}

#[test]
fn an_int_or_a_short_float_stands_for_a_float() {
    let params = sampling([("temperature", 1.into()), ("top_p", Value::F32(0.9))]);
    assert!((params.temperature - 1.0).abs() < f64::EPSILON);
    assert!((params.top_p - f64::from(0.9_f32)).abs() < f64::EPSILON);
}

#[test]
fn the_last_of_two_equal_keys_counts() {
    assert_eq!(sampling([("n", 2.into()), ("n", 3.into())]).n, 3);
}

#[test]
fn one_stop_string_and_nil_lists_are_read() {
    let params = sampling([("stop", "END".into()), ("stop_token_ids", Value::Nil)]);
    assert_eq!(params.stop.0, ["END"]);
    assert!(params.stop_token_ids.0.is_empty());
}

#[test]
fn stop_tokens_join_all_stop_tokens() {
    let params =
        sampling([("stop_token_ids", list([9.into()])), ("_all_stop_token_ids", list([2.into()]))]);
    assert_eq!(Vec::from_iter(params.all_stop_token_ids), [2, 9]);
}

#[test]
fn the_prefix_cache_is_skipped_for_prompt_logprobs_unless_told() {
    assert_eq!(sampling([]).skip_reading_prefix_cache, Some(false));
    let wanted = ("prompt_logprobs", 2.into());
    assert_eq!(sampling([wanted.clone()]).skip_reading_prefix_cache, Some(true));
    let told = sampling([wanted, ("skip_reading_prefix_cache", false.into())]);
    assert_eq!(told.skip_reading_prefix_cache, Some(false));
}

#[test]
fn keys_that_hold_their_default_are_read_and_left_out_when_written() {
    let params = sampling([("top_k", 0.into()), ("temperature", 1.0.into()), ("n", 1.into())]);
    assert_eq!(params, SamplingParams::default().filled_in());
    let frames = encode(&params, Profile::V0_32).unwrap();
    assert_eq!(frames[0][..3], [0xde, 0, 4]);
}

#[test]
fn large_unsigned_numbers_are_exact() {
    for number in [13_360_216_285_664_366_642, u64::MAX] {
        let call = list([0.into(), number.into(), "f".into(), list([number.into()])]);
        let decoded = read::<UtilityCall>(&call).unwrap().message;
        assert_eq!(decoded.call_id.number(), i128::from(number));
        assert_eq!(decoded.arg_values().unwrap(), [Value::from(number)]);
        assert_eq!(encode(&decoded, Profile::V0_32).unwrap(), [pack(&call)]);
    }
}

#[test]
fn type_information_of_results_is_ignored() {
    let kinds = list([list(["vllm.v1.engine".into(), "Secret".into()])]);
    let value = list([1.into(), Value::Nil, list([kinds, list([5.into()])])]);
    let decoded = read::<UtilityOutput>(&value).unwrap().message;
    assert_eq!(decoded.result.unwrap().value.to_value(), list([5.into()]));
}

#[test]
fn a_sparse_constraint_is_read() {
    let value = map([("regex", "a+".into()), ("_backend", "guidance".into())]);
    let params = read::<StructuredOutputsParams>(&value).unwrap().message;
    assert_eq!(params.fields().backend.as_deref(), Some("guidance"));
}

fn ready(extra: &[(&str, Value)]) -> Value {
    let required = ["max_model_len", "num_gpu_blocks", "block_size"];
    let mut entries: Vec<_> = required.into_iter().map(|key| (key.into(), 8.into())).collect();
    entries.push(("dp_stats_address".into(), Value::Nil));
    entries.extend(extra.iter().map(|(key, value)| ((*key).into(), value.clone())));
    Value::Map(entries)
}

#[test]
fn a_ready_response_may_lack_optional_keys_and_have_unknown_ones() {
    let decoded = read::<EngineCoreReadyResponse>(&ready(&[])).unwrap();
    assert_eq!(decoded.message.vllm_version, None);
    let decoded = read::<EngineCoreReadyResponse>(&ready(&[("new", 1.into())])).unwrap();
    assert_eq!(counts(&decoded), (0, 1));
    let later = ready(&[("coord_store_port", 29_600.into())]);
    assert_eq!(read::<EngineCoreReadyResponse>(&later).unwrap().message.coord_store_port, 29_600);
}

#[test]
fn a_ready_response_needs_what_its_profile_requires() {
    let message = read::<EngineCoreReadyResponse>(&ready(&[])).unwrap().message;
    let error = encode(&message, Profile::V0_32).unwrap_err();
    assert_eq!(error, EncodeError::MissingField { field: "dtype", profile: Profile::V0_32 });
}

#[test]
fn an_adapter_of_025_has_one_more_field() {
    let old = list([
        "a".into(),
        1.into(),
        "/a".into(),
        Value::Nil,
        Value::Nil,
        true.into(),
        false.into(),
    ]);
    let adapter = decode::<LoraRequest>(&[pack(&old)], Profile::V0_25).unwrap().message;
    assert!(adapter.fields().load_inplace);
    let new = list(["a".into(), 1.into(), "/a".into(), Value::Nil, true.into(), false.into()]);
    assert_eq!(decode::<LoraRequest>(&[pack(&new)], Profile::V0_32).unwrap().message, adapter);
}

#[test]
fn each_profile_writes_its_own_number_of_elements() {
    let request = read::<EngineCoreRequest>(&request_with(0, "req".into())).unwrap().message;
    let outputs = read::<EngineCoreOutputs>(&batch_with(5, 0.into())).unwrap().message;
    let expected = [
        (Profile::V0_25, (20, 13, 8)),
        (Profile::V0_26, (20, 14, 8)),
        (Profile::V0_32, (22, 18, 9)),
        (Profile::V0_33, (22, 19, 9)),
    ];
    for (profile, (in_request, in_output, in_outputs)) in expected {
        assert_eq!(num_elements(&request, profile), in_request);
        assert_eq!(num_elements(&outputs, profile), in_outputs);
        assert_eq!(num_elements(&outputs.outputs[0], profile), in_output);
        let columns = outputs.to_columns().unwrap();
        assert_eq!(encode(&columns, profile), encode(&outputs, profile));
    }
}

fn num_elements(message: &impl Wire, profile: Profile) -> usize {
    let frames = encode(message, profile).unwrap();
    match Untyped::from_msgpack(frames[0].clone()).unwrap().to_value() {
        Value::Array(elements) => elements.len(),
        other => panic!("{other}"),
    }
}
