//! A front end and engines of ours, talking to each other on loopback.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use extkv_core::protocol::{
    EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse,
    EngineCoreRequest, FinishReason, Map, NumpyArray, Profile, SamplingMaskLists, StopReason,
    Untyped, UtilityOutput, UtilityResult, encode,
};
use extkv_core::transport::{
    CallOutcome, EngineEnd, EngineInput, EngineOptions, EngineStatus, FrontEnd, FrontEndOptions,
    SocketLimits, Stream, StreamEnd, StreamItem, TransportError,
};

const LONG: Duration = Duration::from_secs(20);
const PROFILE: Profile = Profile::V0_32;

fn front_end(num_engines: u16, change: impl FnOnce(&mut FrontEndOptions)) -> FrontEnd {
    let mut options = FrontEndOptions::new("tcp://127.0.0.1:0");
    options.num_engines = num_engines;
    change(&mut options);
    FrontEnd::bind(&options).unwrap()
}

fn ready_response() -> EngineCoreReadyResponse {
    EngineCoreReadyResponse {
        max_model_len: 128,
        num_gpu_blocks: 10,
        block_size: 16,
        dtype: Some("bfloat16".to_owned()),
        vllm_version: Some("0.32.0".to_owned()),
        world_size: Some(1),
        data_parallel_size: Some(1),
        tensor_parallel_size: Some(1),
        pipeline_parallel_size: Some(1),
        decode_context_parallel_size: Some(1),
        data_parallel_rank: Some(0),
        max_num_seqs: Some(16),
        max_num_batched_tokens: Some(512),
        instance_id: Some("test".to_owned()),
        supports_lora: Some(false),
        max_loras: Some(0),
        ..EngineCoreReadyResponse::default()
    }
}

fn engine_with(front: &FrontEnd, index: u16, limits: SocketLimits) -> EngineEnd {
    let mut options = EngineOptions::new(front.handshake_address(), index);
    options.handshake_timeout = LONG;
    options.limits = limits;
    let engine = EngineEnd::connect(options).unwrap();
    engine.start(&ready_response()).unwrap();
    engine
}

fn engine(front: &FrontEnd, index: u16) -> EngineEnd {
    engine_with(front, index, SocketLimits::default())
}

fn pair() -> (FrontEnd, EngineEnd) {
    let front = front_end(1, |_| ());
    let engine = engine(&front, 0);
    front.wait_ready(LONG).unwrap();
    (front, engine)
}

fn request(request_id: &str) -> EngineCoreRequest {
    EngineCoreRequest { request_id: request_id.to_owned(), ..EngineCoreRequest::default() }
}

fn receive_one(engine: &EngineEnd) -> EngineInput {
    let mut inputs = engine.receive(LONG);
    assert_eq!(inputs.len(), 1, "{inputs:?}");
    inputs.remove(0)
}

fn send_tokens(engine: &EngineEnd, request_id: &str, tokens: &[u32], reason: Option<FinishReason>) {
    let output = EngineCoreOutput {
        request_id: request_id.to_owned(),
        new_token_ids: tokens.to_vec(),
        finish_reason: reason,
        ..EngineCoreOutput::default()
    };
    send_output(engine, output);
}

fn send_output(engine: &EngineEnd, output: EngineCoreOutput) {
    let batch = EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() };
    engine.send(0, encode(&batch, PROFILE).unwrap()).unwrap();
}

fn next_tokens(stream: &Stream) -> Vec<u32> {
    match stream.wait(LONG) {
        Some(StreamItem::Output { output, .. }) => output.new_token_ids,
        other => panic!("{other:?}"),
    }
}

fn end_of(stream: &Stream) -> StreamEnd {
    loop {
        match stream.wait(LONG).expect("the stream stays open") {
            StreamItem::Output { .. } => {}
            StreamItem::End(end) => return end,
        }
    }
}

#[test]
fn a_request_comes_through_and_its_outputs_come_back() {
    let (front, engine) = pair();
    let stream = front.add(request("r1"), None).unwrap();
    match receive_one(&engine) {
        EngineInput::Request { client: 0, request } => assert_eq!(request.request_id, "r1"),
        other => panic!("{other:?}"),
    }
    send_tokens(&engine, "r1", &[1, 2], None);
    send_tokens(&engine, "r1", &[3], Some(FinishReason::Length));
    assert_eq!(next_tokens(&stream), [1, 2]);
    assert_eq!(next_tokens(&stream), [3]);
    assert_eq!(end_of(&stream), StreamEnd::Finished);
    assert_eq!(front.counts().num_streams, 0);
    assert!(stream.wait(Duration::from_millis(1)).is_none(), "the end comes once");
}

#[test]
fn an_abort_ends_the_stream_on_this_side_and_late_outputs_are_passed_over() {
    let (front, engine) = pair();
    let stream = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    stream.abort();
    assert_eq!(end_of(&stream), StreamEnd::Aborted);
    match receive_one(&engine) {
        EngineInput::Abort { request_ids } => assert_eq!(request_ids, ["r1"]),
        other => panic!("{other:?}"),
    }
    send_tokens(&engine, "r1", &[1], None);
    let stream = front.add(request("r2"), None).unwrap();
    receive_one(&engine);
    send_tokens(&engine, "r2", &[1], Some(FinishReason::Stop));
    assert_eq!(end_of(&stream), StreamEnd::Finished);
    assert_eq!(front.counts().num_late_outputs, 1);
}

#[test]
fn dropping_a_stream_aborts_its_request_but_not_a_later_one_of_the_same_id() {
    let (front, engine) = pair();
    let first = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    first.abort();
    receive_one(&engine);
    let second = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    drop(first);
    assert_eq!(front.counts().num_streams, 1);
    drop(second);
    assert!(matches!(receive_one(&engine), EngineInput::Abort { .. }));
    assert_eq!(front.counts().num_streams, 0);
}

#[test]
fn an_id_in_use_is_refused() {
    let (front, _engine) = pair();
    let _stream = front.add(request("r1"), None).unwrap();
    let error = front.add(request("r1"), None).unwrap_err();
    assert!(matches!(error, TransportError::DuplicateRequest { .. }), "{error}");
}

#[test]
fn calls_return_fail_and_time_out() {
    let (front, engine) = pair();
    let answer = |failure_message: Option<&str>, result| {
        let EngineInput::Utility { call, .. } = receive_one(&engine) else { panic!() };
        let utility_output = Some(UtilityOutput {
            call_id: call.call_id,
            failure_message: failure_message.map(str::to_owned),
            result,
        });
        let batch = EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() };
        engine.send(0, encode(&batch, PROFILE).unwrap()).unwrap();
        call.method
    };
    let call = front.call(0, "get_supported_tasks", Untyped::nil()).unwrap();
    let result = Some(UtilityResult { value: Untyped::nil() });
    assert_eq!(answer(None, result.clone()), "get_supported_tasks");
    assert_eq!(call.wait(LONG).unwrap(), CallOutcome::Returned(result));
    let call = front.call(0, "x", Untyped::nil()).unwrap();
    answer(Some("Call to x method failed: no"), None);
    let expected = CallOutcome::Failed("Call to x method failed: no".to_owned());
    assert_eq!(call.wait(LONG).unwrap(), expected);
    let call = front.call(0, "slow", Untyped::nil()).unwrap();
    let error = call.wait(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, TransportError::TimedOut { .. }), "{error}");
    assert_eq!(front.counts().num_calls, 1);
    drop(call);
    assert_eq!(front.counts().num_calls, 0);
}

#[test]
fn a_refusing_engine_answers_by_itself() {
    let (front, engine) = pair();
    engine.refuse_work();
    let stream = front.add(request("r1"), None).unwrap();
    match stream.wait(LONG).unwrap() {
        StreamItem::Output { output, .. } => {
            assert_eq!(output.finish_reason, Some(FinishReason::Abort));
        }
        other => panic!("{other:?}"),
    }
    let call = front.call(0, "x", Untyped::nil()).unwrap();
    let expected = CallOutcome::Failed("Server shutting down".to_owned());
    assert_eq!(call.wait(LONG).unwrap(), expected);
    assert!(engine.receive(Duration::from_millis(5)).is_empty());
}

#[test]
fn the_dead_marker_ends_streams_and_calls() {
    let (front, engine) = pair();
    let stream = front.add(request("r1"), None).unwrap();
    let call = front.call(0, "x", Untyped::nil()).unwrap();
    engine.send_dead();
    assert!(matches!(end_of(&stream), StreamEnd::EngineDead { engine: 0, .. }));
    assert!(matches!(call.wait(LONG).unwrap(), CallOutcome::EngineDead { engine: 0, .. }));
    let error = front.add(request("r2"), None).unwrap_err();
    assert!(matches!(error, TransportError::EngineDead { engine: 0, .. }), "{error}");
    assert_eq!(front.statuses(), [EngineStatus::Dead]);
}

#[test]
fn an_engine_that_vanishes_ends_only_its_own_streams() {
    let front = front_end(2, |_| ());
    let (first, second) = (engine(&front, 0), engine(&front, 1));
    front.wait_ready(LONG).unwrap();
    let doomed = front.add(request("a"), Some(0)).unwrap();
    let lucky = front.add(request("b"), Some(1)).unwrap();
    receive_one(&second);
    drop(first);
    assert!(matches!(end_of(&doomed), StreamEnd::EngineDead { engine: 0, .. }));
    let output = EngineCoreOutput {
        request_id: "b".to_owned(),
        finish_reason: Some(FinishReason::Stop),
        ..EngineCoreOutput::default()
    };
    let batch = EngineCoreOutputs {
        engine_index: 1,
        outputs: vec![output],
        ..EngineCoreOutputs::default()
    };
    second.send(0, encode(&batch, PROFILE).unwrap()).unwrap();
    assert_eq!(end_of(&lucky), StreamEnd::Finished);
    // New requests go to who is left, and a restarted engine is taken back.
    assert_eq!(front.add(request("c"), None).unwrap().engine(), 1);
    let _again = engine(&front, 0);
    front.wait_ready(LONG).unwrap();
    assert_eq!(front.add(request("d"), Some(0)).unwrap().engine(), 0);
}

#[test]
fn requests_are_spread_over_engines() {
    let front = front_end(2, |_| ());
    let _engines = (engine(&front, 0), engine(&front, 1));
    front.wait_ready(LONG).unwrap();
    let streams: Vec<_> =
        (0..10).map(|i| front.add(request(&i.to_string()), None).unwrap()).collect();
    assert_eq!(streams.iter().filter(|stream| stream.engine() == 0).count(), 5);
    let ranked = EngineCoreRequest { data_parallel_rank: Some(1), ..request("ranked") };
    assert_eq!(front.add(ranked, None).unwrap().engine(), 1);
    let error = front.add(request("far"), Some(7)).unwrap_err();
    assert!(matches!(error, TransportError::UnknownEngine { engine: 7, num_engines: 2 }));
}

#[test]
fn a_stream_that_nobody_reads_is_given_up_at_its_limit() {
    let front = front_end(1, |options| options.max_stream_bytes = 10_000);
    let engine = engine(&front, 0);
    front.wait_ready(LONG).unwrap();
    let stream = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    for _ in 0..100 {
        send_tokens(&engine, "r1", &[1; 100], None);
    }
    assert!(matches!(receive_one(&engine), EngineInput::Abort { .. }));
    assert!(matches!(
        stream.wait(LONG),
        Some(StreamItem::End(StreamEnd::SlowReader { limit_bytes: 10_000, .. }))
    ));
}

#[test]
fn every_part_of_an_output_counts_against_the_limit_of_its_stream() {
    let text = "x".repeat(3000);
    let plain = || EngineCoreOutput { request_id: "r1".to_owned(), ..EngineCoreOutput::default() };
    let value = Untyped::from_value(&text.as_str().into()).unwrap();
    let array = NumpyArray::named("|u1", vec![3000], vec![0; 3000].into()).unwrap();
    let mask = SamplingMaskLists { token_ids: array, ..SamplingMaskLists::default() };
    let outputs = [
        EngineCoreOutput { stop_reason: Some(StopReason::Text(text.clone())), ..plain() },
        EngineCoreOutput { kv_transfer_params: Some(Box::new(value)), ..plain() },
        EngineCoreOutput {
            trace_headers: Some(Map(vec![(text.clone(), text.clone())])),
            ..plain()
        },
        EngineCoreOutput { mm_cache_miss_hashes: Some(vec![text]), ..plain() },
        EngineCoreOutput { new_sampling_mask: Some(Box::new(mask)), ..plain() },
        EngineCoreOutput { events: Some(vec![EngineCoreEvent::default(); 100]), ..plain() },
    ];
    for output in outputs {
        let front = front_end(1, |options| options.max_stream_bytes = 10_000);
        let engine = engine(&front, 0);
        front.wait_ready(LONG).unwrap();
        let stream = front.add(request("r1"), None).unwrap();
        receive_one(&engine);
        (0..5).for_each(|_| send_output(&engine, output.clone()));
        assert!(matches!(receive_one(&engine), EngineInput::Abort { .. }), "{output:?}");
        assert!(matches!(end_of(&stream), StreamEnd::SlowReader { .. }));
    }
}

#[test]
fn outputs_that_cannot_be_read_end_the_streams_that_may_have_been_in_them() {
    let (front, engine) = pair();
    let stream = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    engine.send(0, vec![b"\x99\x00\xc1".as_slice().into()]).unwrap();
    assert!(matches!(end_of(&stream), StreamEnd::Garbled { engine: 0, .. }));
    assert!(matches!(receive_one(&engine), EngineInput::Abort { .. }));
    assert_eq!(front.counts().num_rejected, 1);
    assert!(front.take_notices()[0].contains("cannot be read"));
    let stream = front.add(request("r2"), None).unwrap();
    receive_one(&engine);
    send_tokens(&engine, "r2", &[], Some(FinishReason::Stop));
    assert_eq!(end_of(&stream), StreamEnd::Finished);
}

#[test]
fn a_front_end_that_vanishes_is_told_once_after_the_grace() {
    let front = front_end(1, |_| ());
    let limits =
        SocketLimits { reconnect_for: Duration::from_millis(50), ..SocketLimits::default() };
    let engine = engine_with(&front, 0, limits);
    front.wait_ready(LONG).unwrap();
    drop(front);
    assert!(matches!(receive_one(&engine), EngineInput::ClientLost { client: 0, .. }));
    std::thread::sleep(Duration::from_millis(200));
    assert!(engine.receive(Duration::from_millis(5)).is_empty());
    let error = engine.send(0, vec![]).unwrap_err();
    assert!(matches!(error, TransportError::NotConnected { .. }), "{error}");
}

#[test]
fn closing_a_front_end_ends_streams_and_aborts_requests() {
    let (front, engine) = pair();
    let stream = front.add(request("r1"), None).unwrap();
    receive_one(&engine);
    front.close(LONG);
    assert_eq!(end_of(&stream), StreamEnd::Closed);
    assert!(matches!(receive_one(&engine), EngineInput::Abort { .. }));
    assert!(matches!(front.add(request("r2"), None), Err(TransportError::Closed)));
}

#[test]
fn waiting_for_engines_names_those_that_are_missing() {
    let front = front_end(2, |_| ());
    let _engine = engine(&front, 1);
    let error = front.wait_ready(Duration::from_millis(200)).unwrap_err();
    assert!(error.to_string().contains("engines [0]"), "{error}");
}

#[test]
fn an_engine_gives_up_when_nobody_answers_its_hello() {
    let mut options = EngineOptions::new("tcp://127.0.0.1:1", 0);
    options.handshake_timeout = Duration::from_millis(50);
    let error = EngineEnd::connect(options).unwrap_err();
    assert!(matches!(error, TransportError::TimedOut { .. }), "{error}");
}

#[test]
fn clients_that_do_not_exist_are_typed_errors() {
    let (_front, engine) = pair();
    for client in [-1, 1] {
        let error = engine.send(client, vec![]).unwrap_err();
        assert!(matches!(error, TransportError::UnknownClient { num_clients: 1, .. }), "{error}");
    }
}

#[test]
fn a_response_that_lacks_a_field_is_not_sent() {
    let front = front_end(1, |_| ());
    let engine = EngineEnd::connect(EngineOptions::new(front.handshake_address(), 0)).unwrap();
    let incomplete = EngineCoreReadyResponse { dtype: None, ..ready_response() };
    let error = engine.start(&incomplete).unwrap_err();
    assert!(matches!(error, TransportError::Unencodable { .. }), "{error}");
    assert!(error.to_string().contains("dtype"), "{error}");
}
