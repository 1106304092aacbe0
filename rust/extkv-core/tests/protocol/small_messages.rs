//! Handshake, control, utility and coordinator messages against golden bytes.

use std::fmt::Debug;

use extkv_core::protocol::coordinator::{READY_MARKER, SUBSCRIBE_ALL};
use extkv_core::protocol::handshake::decode_registration;
use extkv_core::protocol::output::is_dead_marker;
use extkv_core::protocol::{
    AbortRequests, CoordinatorCommand, CoordinatorNews, EngineCoreReadyResponse,
    EngineHandshakeMetadata, Exclusion, HandshakeMessage, HandshakeStatus, Profile, RequestType,
    StartDpWave, Untyped, UtilityCall, Wire, decode, encode,
};

use crate::golden::{Golden, golden, golden_of_both};

pub(crate) fn same_bytes<T: Wire + Debug>(profile: Profile, line: &Golden) -> T {
    let decoded =
        decode::<T>(&line.frames, profile).unwrap_or_else(|e| panic!("{}: {e}", line.name));
    assert!(decoded.skipped.is_empty(), "{}: {:?}", line.name, decoded.skipped);
    let frames = encode(&decoded.message, profile).unwrap();
    assert_eq!(frames, line.frames, "{} {:?}", line.name, decoded.message);
    decoded.message
}

#[test]
fn control_messages_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("control") {
        match RequestType::from_frame(&[line.request_type.unwrap()]).unwrap() {
            RequestType::Abort => drop(same_bytes::<AbortRequests>(profile, &line)),
            RequestType::StartDpWave => drop(same_bytes::<StartDpWave>(profile, &line)),
            other => panic!("{other:?} in control.jsonl"),
        }
    }
}

#[test]
fn utility_calls_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("utility_request") {
        let call = same_bytes::<UtilityCall>(profile, &line);
        let values = line.line["python_value"].as_array().unwrap();
        assert_eq!(call.call_id.number(), i128::from(values[1].as_u64().unwrap()));
        assert_eq!(call.method, values[2].as_str().unwrap());
        assert_eq!(call.arg_values().unwrap().len(), values[3].as_array().unwrap().len());
    }
}

#[test]
fn handshakes_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("handshake") {
        match line.name.as_str() {
            name if name.starts_with("hello") => {
                let message = same_bytes::<HandshakeMessage>(profile, &line);
                assert_eq!(message.status, HandshakeStatus::Hello);
            }
            "ready" | "ready_dp_hash" => {
                let message = same_bytes::<HandshakeMessage>(profile, &line);
                assert_eq!(message.status, HandshakeStatus::Ready);
                assert_eq!(message.parallel_config_hash.is_some(), line.name == "ready_dp_hash");
            }
            name if name.starts_with("init") => {
                drop(same_bytes::<EngineHandshakeMetadata>(profile, &line));
            }
            _ => drop(same_bytes::<EngineCoreReadyResponse>(profile, &line)),
        }
    }
}

#[test]
fn coordinator_messages_encode_to_the_same_bytes() {
    for (profile, line) in golden_of_both("coordinator") {
        match line.name.as_str() {
            "coord_stats_publish" | "coord_wave_change" => {
                drop(same_bytes::<CoordinatorNews>(profile, &line));
            }
            // In-process between two threads of a front end; never on the wire between processes.
            "front_internal_first_req" => drop(same_bytes::<Untyped>(profile, &line)),
            _ => drop(same_bytes::<CoordinatorCommand>(profile, &line)),
        }
    }
}

#[test]
fn an_engine_identity_can_stand_for_the_excluded_engine() {
    for line in golden("live_coordinator.jsonl") {
        if line.name == "coord_013" {
            let command = same_bytes::<CoordinatorCommand>(Profile::V0_32, &line);
            let exclude = Exclusion::Identity(vec![1, 0]);
            assert_eq!(command, CoordinatorCommand::FirstRequest { exclude, wave: 1 });
        }
    }
}

#[test]
fn markers_are_those_of_the_wire() {
    for line in golden("raw.jsonl") {
        let [frame] = line.frames.as_slice() else { panic!("{}", line.name) };
        match line.name.as_str() {
            "engine_core_dead" => assert!(is_dead_marker(&line.frames)),
            "coord_ready_marker" => assert_eq!(frame, READY_MARKER),
            "coord_subscribe_marker" => assert_eq!(frame, SUBSCRIBE_ALL),
            "input_registration_legacy_empty" => {
                assert_eq!(decode_registration(&line.frames), Ok(None));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_registration_is_a_ready_response_of_any_version() {
    for (_, line) in golden_of_both("handshake") {
        if line.name.starts_with("ready_response") {
            let response = decode_registration(&line.frames).unwrap().unwrap();
            assert!(response.skipped.is_empty());
            assert_eq!(response.message.vllm_version.as_deref(), Some("X"));
        }
    }
    assert!(decode_registration(&[]).is_err());
}
