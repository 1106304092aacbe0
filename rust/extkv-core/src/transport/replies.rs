//! Answers that the transport gives by itself, without the engine's loop.

use crate::protocol::{
    CallId, EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestError, UtilityOutput,
};

use super::engine::{EngineShared, frames_of};
use super::zmtp::Frames;

/// What calls are told after shutdown has begun.
pub(super) const SHUTTING_DOWN: &str = "Server shutting down";

/// The end of a request that could not be read.
pub(super) fn error(shared: &EngineShared, request_id: &str, reason: &str) -> Option<Frames> {
    let error = RequestError {
        code: "invalid_request".to_owned(),
        message: reason.to_owned(),
        retryable: false,
    };
    batch_of(shared, request_id, FinishReason::Error, Some(error))
}

/// The end of a request that came too late.
pub(super) fn abort(shared: &EngineShared, request_id: &str) -> Option<Frames> {
    batch_of(shared, request_id, FinishReason::Abort, None)
}

/// The failure of a call.
pub(super) fn failure(shared: &EngineShared, call_id: CallId, text: &str) -> Option<Frames> {
    let failure_message = Some(text.to_owned());
    let batch = EngineCoreOutputs {
        engine_index: i64::from(shared.engine_index),
        utility_output: Some(UtilityOutput { call_id, failure_message, result: None }),
        ..EngineCoreOutputs::default()
    };
    frames_of("an answer", &batch, shared.profile).ok()
}

fn batch_of(
    shared: &EngineShared,
    request_id: &str,
    reason: FinishReason,
    error: Option<RequestError>,
) -> Option<Frames> {
    let output = EngineCoreOutput {
        request_id: request_id.to_owned(),
        finish_reason: Some(reason),
        error: error.map(Box::new),
        ..EngineCoreOutput::default()
    };
    let batch = EngineCoreOutputs {
        engine_index: i64::from(shared.engine_index),
        outputs: vec![output],
        finished_requests: Some([request_id.to_owned()].into()),
        ..EngineCoreOutputs::default()
    };
    frames_of("an answer", &batch, shared.profile).ok()
}
