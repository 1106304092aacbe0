//! Requests and outputs against golden bytes, and live frames of real peers.

use bytes::Bytes;
use extkv_core::protocol::output::is_dead_marker;
use extkv_core::protocol::{
    AbortRequests, ColumnarOutputs, CoordinatorCommand, CoordinatorNews, EngineCoreOutputs,
    EngineCoreReadyResponse, EngineCoreRequest, EngineHandshakeMetadata, HandshakeMessage,
    OutputsKind, Profile, RequestType, StartDpWave, UtilityCall, Wire, decode, encode,
};

use crate::golden::{Golden, golden, golden_of_both};
use crate::small_messages::same_bytes;

#[test]
fn requests_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("request") {
        drop(same_bytes::<EngineCoreRequest>(profile, &line));
    }
}

#[test]
fn outputs_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("outputs") {
        drop(same_bytes::<EngineCoreOutputs>(profile, &line));
        drop(same_bytes::<ColumnarOutputs>(profile, &line));
    }
}

#[test]
fn utility_results_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("utility_output") {
        let outputs = same_bytes::<EngineCoreOutputs>(profile, &line);
        assert_eq!(outputs.kind(), OutputsKind::UtilityResult);
        let call_id = outputs.utility_output.unwrap().call_id;
        let expected = &line.line["python_value"]["fields"]["utility_output"]["fields"]["call_id"];
        assert_eq!(call_id.number().to_string(), expected.to_string());
    }
}

#[test]
fn columns_hold_what_the_rows_hold() {
    for (profile, line) in golden_of_both("outputs") {
        let rows = decode::<EngineCoreOutputs>(&line.frames, profile).unwrap().message;
        let columns = decode::<ColumnarOutputs>(&line.frames, profile).unwrap().message;
        assert_eq!(columns.to_rows().unwrap(), rows, "{}", line.name);
        assert_eq!(columns.kind(), rows.kind());
        let tokens: Vec<i64> =
            rows.outputs.iter().flat_map(|o| &o.new_token_ids).map(|id| i64::from(*id)).collect();
        let column: Vec<i64> =
            columns.outputs.token_ids().iter().map(|id| i64::from(*id)).collect();
        assert_eq!(column, tokens);
        let reasons: Vec<_> = rows.outputs.iter().map(|output| output.finish_reason).collect();
        assert_eq!(columns.outputs.finish_reasons(), reasons);
        let ids: Vec<&str> = columns.outputs.request_ids().collect();
        assert!(ids.into_iter().eq(rows.outputs.iter().map(|output| output.request_id.as_str())));
        for (index, spans) in columns.outputs.logprobs() {
            let lists = rows.outputs[*index as usize].new_logprobs.as_ref().unwrap();
            let frames = columns.outputs.frames();
            assert_eq!(spans.token_ids.resolve(frames).unwrap(), lists.logprob_token_ids);
            assert_eq!(spans.logprobs.resolve(frames).unwrap(), lists.logprobs);
            assert_eq!(spans.ranks.resolve(frames).unwrap(), lists.sampled_token_ranks);
        }
    }
}

#[test]
fn arrays_of_a_decoded_message_lie_in_its_frames() {
    let line = golden("outputs.jsonl").into_iter().find(|line| line.name == "out_logprobs_aux");
    let frames = line.unwrap().frames;
    let outputs = decode::<EngineCoreOutputs>(&frames, Profile::V0_32).unwrap().message;
    let lists = outputs.outputs[0].new_logprobs.as_ref().unwrap();
    assert_eq!(lists.logprobs.data().as_ptr(), frames[2].as_ptr());
    let inline = lists.sampled_token_ranks.data().as_ptr() as usize;
    let frame = frames[0].as_ptr() as usize;
    assert!((frame..frame + frames[0].len()).contains(&inline));
}

fn decodes<T: Wire>(name: &str, frames: &[Bytes]) -> T {
    let decoded = decode::<T>(frames, Profile::V0_32).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(decoded.skipped.is_empty(), "{name}: {:?}", decoded.skipped);
    decoded.message
}

fn check_input(name: &str, frames: &[Bytes]) {
    let (kind, payload) = frames.split_first().unwrap();
    match RequestType::from_frame(kind).unwrap() {
        RequestType::Add => {
            let request = decodes::<EngineCoreRequest>(name, payload);
            let again = encode(&request, Profile::V0_32).unwrap();
            assert_eq!(decodes::<EngineCoreRequest>(name, &again), request, "{name}");
        }
        RequestType::Abort => drop(decodes::<AbortRequests>(name, payload)),
        RequestType::StartDpWave => drop(decodes::<StartDpWave>(name, payload)),
        RequestType::Utility => drop(decodes::<UtilityCall>(name, payload)),
    }
}

fn check_outputs(name: &str, frames: &[Bytes]) {
    if is_dead_marker(frames) {
        return;
    }
    let outputs = decodes::<EngineCoreOutputs>(name, frames);
    let columns = decodes::<ColumnarOutputs>(name, frames);
    assert_eq!(columns.to_rows().unwrap(), outputs, "{name}");
    let again = encode(&outputs, Profile::V0_32).unwrap();
    assert_eq!(decodes::<EngineCoreOutputs>(name, &again), outputs, "{name}");
}

fn check_live(line: &Golden) {
    let name = line.name.as_str();
    let channel = line.line["channel"].as_str().unwrap();
    let direction = line.line["dir"].as_str().unwrap();
    let has_identity = name.starts_with("live2") && !channel.starts_with("output");
    let frames = line.frames.get(usize::from(has_identity)..).unwrap();
    match (channel.trim_end_matches(|c: char| c.is_ascii_digit()), direction) {
        ("handshake", "front->engine") => drop(decodes::<EngineHandshakeMetadata>(name, frames)),
        ("handshake", _) => drop(decodes::<HandshakeMessage>(name, frames)),
        ("input", "engine->front") => drop(decodes::<EngineCoreReadyResponse>(name, frames)),
        ("input", _) => check_input(name, frames),
        ("output", _) => check_outputs(name, frames),
        _ => panic!("{name}: unknown channel {channel}"),
    }
}

#[test]
fn live_frames_of_an_engine_and_two_front_ends_decode() {
    for file in ["live_engine", "live_python_frontend", "live_rust_frontend"] {
        golden(&format!("{file}.jsonl")).iter().for_each(check_live);
    }
}

#[test]
fn live_frames_of_a_coordinator_decode() {
    for line in golden("live_coordinator.jsonl") {
        let frames = line.frames.as_slice();
        let direction = line.line["dir"].as_str().unwrap();
        match (frames, direction) {
            ([only], _) if only.as_ref() == b"READY" || only.as_ref() == b"\x01" => {}
            ([kind, payload @ ..], "coord->engine") => {
                assert_eq!(RequestType::from_frame(kind).unwrap(), RequestType::StartDpWave);
                drop(decodes::<StartDpWave>(&line.name, payload));
            }
            (_, "engine->coord") => check_outputs(&line.name, frames),
            (_, "coord->front") => drop(decodes::<CoordinatorNews>(&line.name, frames)),
            _ => drop(decodes::<CoordinatorCommand>(&line.name, frames)),
        }
    }
}
