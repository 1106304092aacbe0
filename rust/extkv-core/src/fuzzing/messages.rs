//! Decoders of messages: bounded, stable, and with the path to what is wrong.

use std::fmt::Debug;

use bytes::Bytes;

use super::{Meter, for_every_profile, frames_of};
use crate::protocol::handshake::decode_registration;
use crate::protocol::{
    AbortRequests, CoordinatorCommand, CoordinatorNews, DecodeError, DecodeProblem, Decoded,
    EncodeError, EngineCoreReadyResponse, EngineCoreRequest, EngineHandshakeMetadata,
    HandshakeMessage, Profile, Reader, RequestType, StartDpWave, Untyped, UtilityCall,
    UtilityOutput, Wire, decode, encode,
};
use crate::transport::peek;

/// What decoding may allocate: bytes for each byte of the first frame, and bytes for the message.
pub(super) const ALLOCATION_LIMIT: (usize, usize) = (64, 4096);

/// A new request, and a list of requests to abort.
pub(super) fn request(data: &[u8], meter: &Meter) {
    drop(RequestType::from_frame(data));
    let frames = frames_of(data, &[]);
    let seen = peek::request_id(&frames);
    for_every_profile(|profile| {
        if let Some(request) = check::<EngineCoreRequest>(&frames, profile, meter) {
            assert_eq!(seen.as_ref(), Some(&request.request_id));
        }
    });
    check::<AbortRequests>(&frames, Profile::default(), meter);
}

/// A call, its result, and the untyped values of both.
pub(super) fn utility(data: &[u8], meter: &Meter) {
    let frames = frames_of(data, &[]);
    let seen = peek::call_id(&frames);
    for_every_profile(|profile| {
        if let Some(call) = check::<UtilityCall>(&frames, profile, meter) {
            assert_eq!(seen, Some(call.call_id.number()));
            check_untyped(&call.args);
            drop(call.arg_values());
        }
        if let Some(output) = check::<UtilityOutput>(&frames, profile, meter)
            && let Some(result) = output.result
        {
            check_untyped(&result.value);
        }
    });
}

/// Start-up messages.
pub(super) fn handshake(data: &[u8], meter: &Meter) {
    let frames = frames_of(data, &[]);
    for_every_profile(|profile| {
        check::<HandshakeMessage>(&frames, profile, meter);
        check::<EngineHandshakeMetadata>(&frames, profile, meter);
        check::<EngineCoreReadyResponse>(&frames, profile, meter);
    });
    let registration = decode_registration(&frames).map(|known| known.map(|known| known.skipped));
    match decode::<EngineCoreReadyResponse>(&frames, Profile::V0_33) {
        Ok(response) => assert_eq!(registration, Ok(Some(response.skipped))),
        Err(_) if frames.len() == 1 && frames.iter().all(Bytes::is_empty) => {
            assert_eq!(registration, Ok(None));
        }
        Err(error) => assert_eq!(registration, Err(error)),
    }
}

/// Messages of the coordinator.
pub(super) fn coordinator(data: &[u8], meter: &Meter) {
    let frames = frames_of(data, &[]);
    for_every_profile(|profile| {
        check::<StartDpWave>(&frames, profile, meter);
        check::<CoordinatorNews>(&frames, profile, meter);
        check::<CoordinatorCommand>(&frames, profile, meter);
    });
}

/// Decodes frames and checks all that holds for any message.
pub(super) fn check<T: Wire + PartialEq + Debug>(
    frames: &[Bytes],
    profile: Profile,
    meter: &Meter,
) -> Option<T> {
    match check_decoder::<T>(frames, profile, ALLOCATION_LIMIT, meter) {
        Ok(decoded) => {
            check_stable(&decoded.message, profile, assert_same);
            Some(decoded.message)
        }
        Err(_) => None,
    }
}

/// Decodes frames and checks what is allocated and which error is returned.
pub(super) fn check_decoder<T: Wire>(
    frames: &[Bytes],
    profile: Profile,
    limit: (usize, usize),
    meter: &Meter,
) -> Result<Decoded<T>, DecodeError> {
    let num_bytes = frames.first().map_or(0, Bytes::len) + frames.len();
    let result = meter.measure(num_bytes, limit, || decode::<T>(frames, profile));
    if let Err(error) = &result {
        assert!(!error.path().is_empty() || is_of_message::<T>(error, frames), "no path: {error}");
    }
    result
}

/// Whether an error is about the message as a whole and not about a field of it.
fn is_of_message<T: Wire>(error: &DecodeError, frames: &[Bytes]) -> bool {
    let Some(first) = frames.first() else { return true };
    match error.problem() {
        DecodeProblem::TrailingBytes { .. } => true,
        DecodeProblem::WrongType { .. } => {
            let marker = first.slice(..first.len().min(1));
            decode::<T>(&[marker], Profile::V0_33).is_err_and(|of_marker| of_marker == *error)
        }
        DecodeProblem::Truncated { .. } | DecodeProblem::TooLong { .. } => {
            let header = |open: fn(&mut Reader<'_>) -> Result<usize, DecodeError>| {
                Reader::new(frames, Profile::V0_33).and_then(|mut reader| open(&mut reader)).err()
            };
            header(|reader| reader.array_len("an array")).as_ref() == Some(error)
                || header(|reader| reader.map_len("a map")).as_ref() == Some(error)
        }
        _ => false,
    }
}

/// Checks that a decoded message comes back from its own encoding.
pub(super) fn check_stable<T: Wire>(
    message: &T,
    profile: Profile,
    assert_same: impl FnOnce(&T, &T),
) {
    let frames = match encode(message, profile) {
        Ok(frames) => frames,
        // Ready responses may lack what an engine of the profile must say.
        Err(EncodeError::MissingField { .. }) => return,
        Err(error) => panic!("a decoded message cannot be written: {error}"),
    };
    let again = decode::<T>(&frames, profile).expect("an encoded message decodes");
    assert!(again.skipped.is_empty(), "{:?} of an encoded message", again.skipped);
    assert_eq!(encode(&again.message, profile).as_ref(), Ok(&frames));
    // Maps are read whole in every profile, and written without what the profile does not have.
    if profile == Profile::V0_33 {
        assert_same(&again.message, message);
    }
}

/// Checks that two messages are equal but for the sign of zero; NaN equals itself.
pub(super) fn assert_same<T: PartialEq + Debug>(found: &T, expected: &T) {
    if found != expected {
        let text = |message| format!("{message:?}").replace("-0.0", "0.0");
        assert_eq!(text(found), text(expected));
    }
}

fn check_untyped(value: &Untyped) {
    let tree = value.to_value();
    let again = Untyped::from_value(&tree).expect("a tree that was read can be written");
    assert_same(&again.to_value(), &tree);
}
