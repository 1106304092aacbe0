//! Messages with random fields decode to themselves.

use std::collections::BTreeSet;
use std::fmt::Debug;

use bytes::Bytes;
use extkv_core::protocol::multimodal::{
    BatchedField, FlatField, MultiModalField, MultiModalFieldElem, NestedSlices, NestedTensors,
    PlaceholderRange, SharedField, Slice,
};
use extkv_core::protocol::sampling::{RepetitionDetectionParams, StopStrings};
use extkv_core::protocol::tensor::NumpyDtype;
use extkv_core::protocol::{
    CallId, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, LogprobsLists,
    LogprobsRows, Map, MultiModalFeatureSpec, NullableList, NumpyArray, OutputRows, Profile,
    RequestOutputKind, RowsError, SamplingParams, SchedulerStats, StackError, StopReason, TokenIds,
    TorchTensor, Untyped, UtilityOutput, UtilityResult, Wire, decode, encode, encode_parts,
};
use proptest::prelude::*;

fn assert_round_trip<T: Wire + PartialEq + Debug>(message: &T) {
    let frames = encode(message, Profile::V0_33).unwrap();
    let decoded = decode::<T>(&frames, Profile::V0_33).unwrap();
    assert!(decoded.skipped.is_empty());
    assert_eq!(&decoded.message, message);
}

fn value() -> impl Strategy<Value = rmpv::Value> {
    let leaf = prop_oneof![
        Just(rmpv::Value::Nil),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        (-1e9..1e9_f64).prop_map(Into::into),
        ".{0,40}".prop_map(Into::into),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(rmpv::Value::Binary),
    ];
    leaf.prop_recursive(4, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..20).prop_map(rmpv::Value::Array),
            prop::collection::vec((".{0,9}".prop_map(Into::into), inner), 0..20)
                .prop_map(rmpv::Value::Map),
        ]
    })
}

fn untyped() -> impl Strategy<Value = Untyped> {
    value().prop_map(|value| Untyped::from_value(&value).unwrap())
}

fn tensor() -> impl Strategy<Value = TorchTensor> {
    prop::collection::vec(any::<u8>(), 0..600).prop_map(|data| {
        let shape = vec![data.len() as u64];
        TorchTensor::named("uint8", shape, data.into()).unwrap()
    })
}

fn logprobs() -> impl Strategy<Value = LogprobsLists> {
    (1..6_u64, 1..40_u64, any::<bool>()).prop_map(|(rows, columns, has_counts)| {
        let bytes = |count: u64| Bytes::from(vec![7; usize::try_from(count * 4).unwrap()]);
        let array = |dtype, shape: &[u64]| {
            let count = shape.iter().product();
            NumpyArray::new(dtype, shape, bytes(count)).unwrap()
        };
        LogprobsLists {
            logprob_token_ids: array(NumpyDtype::INT32, &[rows, columns]),
            logprobs: array(NumpyDtype::FLOAT32, &[rows, columns]),
            sampled_token_ranks: array(NumpyDtype::INT32, &[rows]),
            cu_num_generated_tokens: has_counts.then(|| vec![0, 1]),
        }
    })
}

fn finish_reason() -> impl Strategy<Value = Option<FinishReason>> {
    prop::option::of(prop::sample::select(FinishReason::ALL))
}

prop_compose! {
    fn output()(
        request_id in ".{0,50}",
        new_token_ids in prop::collection::vec(0..1_u32 << 31, 0..40),
        new_logprobs in prop::option::weighted(0.3, logprobs()),
        finish_reason in finish_reason(),
        stop_reason in prop::option::weighted(0.2, any::<i64>().prop_map(StopReason::Token)),
        num_nans_in_logits in prop_oneof![4 => Just(0), 1 => any::<i64>()],
        pooling_output in prop::option::weighted(0.2, tensor()),
        kv_transfer_params in prop::option::weighted(0.2, untyped()),
    ) -> EngineCoreOutput {
        let kv_transfer_params = kv_transfer_params.filter(|value| !value.is_nil());
        EngineCoreOutput {
            request_id, new_token_ids, finish_reason, stop_reason, num_nans_in_logits,
            new_logprobs: new_logprobs.map(Box::new),
            pooling_output: pooling_output.map(Box::new),
            kv_transfer_params: kv_transfer_params.map(Box::new),
            ..EngineCoreOutput::default()
        }
    }
}

prop_compose! {
    fn sampling_params()(
        floats in prop::array::uniform6(-3.0..3.0_f64),
        n in any::<i64>(),
        seed in any::<Option<i64>>(),
        stop in prop::collection::vec(".{0,9}", 0..3),
        stop_token_ids in prop::collection::vec(any::<u32>(), 0..4),
        flags in any::<[bool; 6]>(),
        max_tokens in any::<Option<i64>>(),
        output_kind in prop::sample::select(RequestOutputKind::ALL),
        all_stop_token_ids in prop::collection::btree_set(any::<u32>(), 0..5),
        logit_bias in prop::option::of(prop::collection::vec((any::<u32>(), -9.0..9.0_f64), 0..20)),
        bad_words_token_ids in prop::option::of(prop::collection::vec(prop::collection::vec(any::<u32>(), 0..3), 0..3)),
        extra_args in prop::option::of(untyped()),
    ) -> SamplingParams {
        let [presence_penalty, frequency_penalty, repetition_penalty, temperature, top_p, min_p] = floats;
        let [ignore_eos, detokenize, flat_logprobs, skip_clone, watermarking, skips] = flags;
        SamplingParams {
            n, presence_penalty, frequency_penalty, repetition_penalty, temperature, top_p, min_p,
            seed, max_tokens, ignore_eos, detokenize, flat_logprobs, skip_clone, bad_words_token_ids,
            stop: StopStrings(stop),
            stop_token_ids: NullableList(stop_token_ids),
            all_stop_token_ids,
            output_kind,
            logit_bias: logit_bias.map(Map),
            watermarking: Some(watermarking),
            skip_reading_prefix_cache: Some(skips),
            extra_args: extra_args.filter(|value| !value.is_nil()),
            repetition_detection: skips.then(RepetitionDetectionParams::default),
            ..SamplingParams::default()
        }
        .filled_in()
    }
}

fn slices() -> impl Strategy<Value = NestedSlices> {
    let ends = (any::<Option<i64>>(), any::<Option<i64>>(), any::<Option<i64>>());
    let leaf =
        ends.prop_map(|(start, stop, step)| NestedSlices::Slice(Slice { start, stop, step }));
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(NestedSlices::List)
    })
}

fn nested_tensors() -> impl Strategy<Value = NestedTensors> {
    let leaf = prop_oneof![
        tensor().prop_map(|tensor| NestedTensors::Tensor(Box::new(tensor))),
        any::<i64>().prop_map(NestedTensors::Int),
        (-1e9..1e9_f64).prop_map(NestedTensors::Float),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(NestedTensors::List)
    })
}

fn field() -> impl Strategy<Value = MultiModalField> {
    prop_oneof![
        any::<bool>()
            .prop_map(|keep_on_cpu| MultiModalField::Batched(BatchedField { keep_on_cpu })),
        (any::<bool>(), any::<i64>()).prop_map(|(keep_on_cpu, batch_size)| {
            MultiModalField::Shared(SharedField { keep_on_cpu, batch_size })
        }),
        (any::<bool>(), slices(), any::<i64>()).prop_map(|(keep_on_cpu, slices, dim)| {
            MultiModalField::Flat(FlatField { keep_on_cpu, slices, dim })
        }),
    ]
}

fn feature() -> impl Strategy<Value = MultiModalFeatureSpec> {
    let part = (prop::option::of(nested_tensors()), field())
        .prop_map(|(data, field)| MultiModalFieldElem { data, field });
    let data = prop::option::of(prop::collection::vec((".{0,9}", part), 0..3));
    (data, ".{0,9}", prop::option::of(tensor())).prop_map(|(data, modality, is_embed)| {
        MultiModalFeatureSpec {
            data: data.map(Map),
            modality,
            mm_position: PlaceholderRange { offset: 3, length: 4, is_embed },
            ..MultiModalFeatureSpec::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn untyped_values_keep_their_tree(value in value()) {
        let untyped = Untyped::from_value(&value).unwrap();
        prop_assert_eq!(untyped.to_value(), value);
        assert_round_trip(&untyped);
    }

    #[test]
    fn requests_decode_to_themselves(
        request_id in ".{0,40}",
        prompt in prop::option::of(prop::collection::vec(any::<u32>(), 0..400)),
        params in prop::option::of(sampling_params()),
        features in prop::option::of(prop::collection::vec(feature(), 0..3)),
        embeds in prop::option::of(tensor()),
        priority in any::<i64>(),
        headers in prop::option::of(prop::collection::vec((".{0,9}", ".{0,9}"), 0..20)),
    ) {
        assert_round_trip(&EngineCoreRequest {
            request_id,
            prompt_token_ids: prompt.map(TokenIds::from),
            sampling_params: params.map(Box::new),
            mm_features: features,
            prompt_embeds: embeds,
            priority,
            trace_headers: headers.map(Map),
            arrival_time: 1.5,
            ..EngineCoreRequest::default()
        });
    }

    #[test]
    fn outputs_and_their_columns_decode_to_themselves(
        outputs in prop::collection::vec(output(), 0..40),
        has_stats in any::<bool>(),
        finished in prop::option::of(prop::collection::btree_set(".{0,9}", 0..4)),
        wave_complete in any::<Option<i64>>(),
    ) {
        let message = EngineCoreOutputs {
            outputs,
            scheduler_stats: has_stats.then(|| Box::new(SchedulerStats::default())),
            finished_requests: finished,
            wave_complete,
            ..EngineCoreOutputs::default()
        };
        assert_round_trip(&message);
        let columns = message.to_columns().unwrap();
        assert_round_trip(&columns);
        prop_assert_eq!(columns.to_rows().unwrap(), message);
    }

    #[test]
    fn call_ids_of_64_bits_decode_to_themselves(positive in any::<u64>(), any in any::<i64>()) {
        for call_id in [CallId::from(positive), CallId::from(any)] {
            let result = Some(UtilityResult { value: Untyped::nil() });
            assert_round_trip(&UtilityOutput { call_id, failure_message: None, result });
        }
    }

    #[test]
    fn rows_are_written_as_outputs_are(
        outputs in prop::collection::vec(
            (".{0,40}", prop::collection::vec(any::<u32>(), 0..20), finish_reason()), 0..30)
    ) {
        let ids: Vec<String> = outputs.iter().map(|output| output.0.clone()).collect();
        let tokens: Vec<u32> = outputs.iter().flat_map(|output| output.1.clone()).collect();
        let ends = outputs.iter().scan(0, |end, output| { *end += output.1.len(); Some(*end) });
        let reasons = outputs.iter().map(|output| output.2).collect();
        let rows = OutputRows::new(ids, tokens, ends.collect(), reasons, None).unwrap();
        let envelope = EngineCoreOutputs { timestamp: 2.5, ..EngineCoreOutputs::default() };
        let one = |(request_id, new_token_ids, finish_reason)| EngineCoreOutput {
            request_id, new_token_ids, finish_reason, ..EngineCoreOutput::default()
        };
        let same = EngineCoreOutputs {
            outputs: outputs.into_iter().map(one).collect(), ..envelope.clone()
        };
        for profile in Profile::ALL {
            prop_assert_eq!(rows.encode(&envelope, profile), encode_parts(&same, profile));
        }
    }
}

fn array(dtype: NumpyDtype, shape: &[u64], size: usize) -> NumpyArray {
    let count: u64 = shape.iter().product();
    let bytes: Vec<u8> = (0..=255).cycle().take(usize::try_from(count).unwrap() * size).collect();
    NumpyArray::new(dtype, shape, bytes.into()).unwrap()
}

fn rows_with_logprobs(columns: u64) -> Vec<Bytes> {
    let ids = array(NumpyDtype::INT32, &[3, columns], 4);
    let logprobs = array(NumpyDtype::FLOAT32, &[3, columns], 4);
    let ranks = array(NumpyDtype::INT64, &[3], 8);
    let logprobs = LogprobsRows::new(&ids, &logprobs, &ranks).unwrap();
    let names = vec!["a", "b", "c"];
    let rows = OutputRows::new(names, vec![5, 6, 7], vec![1, 1, 3], vec![None; 3], Some(logprobs));
    let encoded = rows.unwrap().encode(&EngineCoreOutputs::default(), Profile::V0_32);
    let (first, others) = encoded.unwrap();
    [vec![first.into()], others].concat()
}

#[test]
fn log_probabilities_of_rows_stack_to_what_was_written() {
    for columns in [1, 21, 64] {
        let frames = rows_with_logprobs(columns);
        let outputs = decode::<EngineCoreOutputs>(&frames, Profile::V0_32).unwrap().message;
        let lengths: Vec<_> = outputs.outputs.iter().map(|o| o.new_token_ids.len()).collect();
        assert_eq!(lengths, [1, 0, 2]);
        assert_eq!(outputs.outputs[1].new_logprobs, None);
        let columns_of = outputs.to_columns().unwrap().outputs;
        let stacked = columns_of.stack(|spans| &spans.token_ids).unwrap();
        assert_eq!(stacked, array(NumpyDtype::INT32, &[3, columns], 4));
        let ranks = columns_of.stack(|spans| &spans.ranks).unwrap();
        assert_eq!(ranks, array(NumpyDtype::INT64, &[3], 8));
    }
}

#[test]
fn arrays_of_different_width_do_not_stack() {
    let lists = |columns| LogprobsLists {
        logprob_token_ids: array(NumpyDtype::INT32, &[1, columns], 4),
        ..LogprobsLists::default()
    };
    let one = |columns| EngineCoreOutput {
        new_logprobs: Some(Box::new(lists(columns))),
        ..EngineCoreOutput::default()
    };
    let message =
        EngineCoreOutputs { outputs: vec![one(3), one(4)], ..EngineCoreOutputs::default() };
    let error = message.to_columns().unwrap().outputs.stack(|spans| &spans.token_ids).unwrap_err();
    let expected = StackError::Differ {
        index: 1,
        dtype: "<i4",
        shape: vec![1, 4],
        first_dtype: "<i4",
        first_shape: vec![1, 3],
    };
    assert_eq!(error, expected);
}

#[test]
fn stacking_nothing_gives_nothing() {
    let columns = EngineCoreOutputs::default().to_columns().unwrap().outputs;
    assert_eq!(columns.stack(|spans| &spans.logprobs).unwrap().shape(), [0, 0]);
}

#[test]
fn rejects_columns_that_do_not_fit() {
    let rows = |ids: &[&'static str], tokens: &[u32], ends: &[usize], num_reasons| {
        let reasons = vec![None; num_reasons];
        OutputRows::new(ids.to_vec(), tokens.to_vec(), ends.to_vec(), reasons, None).unwrap_err()
    };
    let wrong = |column, found, expected| RowsError::WrongLength { column, found, expected };
    assert_eq!(rows(&["a"], &[1], &[], 1), wrong("token_ends", 0, 1));
    assert_eq!(rows(&["a"], &[1], &[1], 2), wrong("finish_reasons", 2, 1));
    assert_eq!(rows(&["a"], &[1, 2], &[1], 1), wrong("token_ids", 2, 1));
    let falling = RowsError::WrongEnds { num_tokens: 2, found: 1, index: 1 };
    assert_eq!(rows(&["a", "b"], &[1, 2], &[2, 1], 2), falling);
    let past = RowsError::WrongEnds { num_tokens: 1, found: 2, index: 0 };
    assert_eq!(rows(&["a"], &[1], &[2], 1), past);
}

#[test]
fn rejects_log_probabilities_of_other_shapes() {
    let ids = array(NumpyDtype::INT32, &[3, 2], 4);
    let ranks = array(NumpyDtype::INT32, &[3], 4);
    let wrong = array(NumpyDtype::INT32, &[2, 2], 4);
    let error = |array, found: &[u64]| RowsError::WrongShape { array, found: found.to_vec() };
    let of = |ids, logprobs, ranks| LogprobsRows::new(ids, logprobs, ranks).unwrap_err();
    assert_eq!(of(&ranks, &ids, &ranks), error("logprob_token_ids", &[3]));
    assert_eq!(of(&ids, &wrong, &ranks), error("logprobs", &[2, 2]));
    assert_eq!(of(&ids, &ids, &wrong), error("sampled_token_ranks", &[2, 2]));
    let rows = LogprobsRows::new(&ids, &ids, &ranks).unwrap();
    let error = OutputRows::new(vec!["a"], vec![1], vec![1], vec![None], Some(rows)).unwrap_err();
    let (column, found, expected) = ("logprobs", 3, 1);
    assert_eq!(error, RowsError::WrongLength { column, found, expected });
}

#[test]
fn sets_are_written_in_order() {
    let finished = BTreeSet::from(["b".to_owned(), "a".to_owned()]);
    let frames = encode(&finished, Profile::V0_32).unwrap();
    assert_eq!(frames[0].as_ref(), b"\x92\xa1a\xa1b");
}
