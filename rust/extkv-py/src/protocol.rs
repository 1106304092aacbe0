//! EngineCore messages: native classes for requests and outputs, and a generic way to and from the
//! Python classes of everything else.

mod frames;
mod output;
mod outputs;
mod part;
mod record;
mod request;
mod source;
mod untyped;

use extkv_core::protocol::{
    AbortRequests, CoordinatorCommand, CoordinatorNews, EngineCoreReadyResponse,
    EngineHandshakeMetadata, HandshakeMessage, Profile, RequestType, Skipped, StartDpWave,
    UtilityCall, Visible, Wire, decode, encode,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

pub(crate) use frames::Frames;
pub(crate) use output::PyEngineCoreOutput;
pub(crate) use outputs::{PyEngineCoreOutputs, encode_output_columns};
pub(crate) use request::{PyEngineCoreRequest, PySamplingParams};

use crate::error::{BindingError, BindingResult, UnknownMessage};
use part::ToPython;
use source::PySource;

/// What a decoder passed over: `(elements, keys)`.
pub(crate) type SkippedCounts = (u64, u64);

fn counts(skipped: Skipped) -> SkippedCounts {
    (skipped.elements(), skipped.keys())
}

/// Parses a profile's name.
pub(crate) fn profile_of(name: &str) -> BindingResult<Profile> {
    name.parse().map_err(BindingError::Profile)
}

/// Python's frames of an encoded message.
pub(crate) fn to_frames(py: Python<'_>, frames: &[bytes::Bytes]) -> Vec<Py<PyBytes>> {
    frames.iter().map(|frame| PyBytes::new(py, frame).unbind()).collect()
}

/// The wire profile of a vLLM version.
#[pyfunction]
pub(crate) fn protocol_profile_of_version(version: &str) -> BindingResult<&'static str> {
    Profile::of_vllm_version(version).map(Profile::name).map_err(BindingError::Profile)
}

/// The type that a request's type frame announces.
#[pyfunction]
pub(crate) fn protocol_request_type(frame: &[u8]) -> BindingResult<u8> {
    Ok(RequestType::from_frame(frame)?.number())
}

fn decoded<T: Wire + Visible>(
    py: Python<'_>,
    frames: &Frames,
    profile: Profile,
) -> PyResult<(Py<PyAny>, SkippedCounts)> {
    let decoded = decode::<T>(frames.bytes(), profile).map_err(BindingError::from)?;
    let value = ToPython::new(py, frames).convert(&decoded.message.part())?;
    Ok((value.unbind(), counts(decoded.skipped)))
}

fn encoded<T: Wire + Visible>(
    py: Python<'_>,
    message: &Bound<'_, PyAny>,
    profile: Profile,
) -> BindingResult<Vec<Py<PyBytes>>> {
    let message = T::from_source(&PySource::new(message.clone())).map_err(BindingError::Message)?;
    Ok(to_frames(py, &encode(&message, profile)?))
}

macro_rules! small_messages {
    ($($name:literal => $type:ty),* $(,)?) => {
        /// Decodes a message of the named kind; returns it and what was passed over.
        #[pyfunction]
        pub(crate) fn protocol_decode(
            py: Python<'_>,
            kind: &str,
            frames: Frames,
            profile: &str,
        ) -> PyResult<(Py<PyAny>, SkippedCounts)> {
            let profile = profile_of(profile)?;
            match kind {
                $($name => decoded::<$type>(py, &frames, profile),)*
                _ => Err(BindingError::UnknownMessage(UnknownMessage(kind.to_owned())).into()),
            }
        }

        /// Encodes a message of the named kind into its frames.
        #[pyfunction]
        pub(crate) fn protocol_encode(
            py: Python<'_>,
            kind: &str,
            message: &Bound<'_, PyAny>,
            profile: &str,
        ) -> BindingResult<Vec<Py<PyBytes>>> {
            let profile = profile_of(profile)?;
            match kind {
                $($name => encoded::<$type>(py, message, profile),)*
                _ => Err(BindingError::UnknownMessage(UnknownMessage(kind.to_owned()))),
            }
        }
    };
}

small_messages! {
    "abort" => AbortRequests,
    "coordinator_command" => CoordinatorCommand,
    "coordinator_news" => CoordinatorNews,
    "handshake" => HandshakeMessage,
    "init" => EngineHandshakeMetadata,
    "ready_response" => EngineCoreReadyResponse,
    "start_dp_wave" => StartDpWave,
    "utility_call" => UtilityCall,
}

/// The fields of a message class of the core, in wire order.
#[pyfunction]
pub(crate) fn protocol_fields(name: &str) -> BindingResult<Vec<&'static str>> {
    record::fields_of(name)
        .ok_or_else(|| BindingError::UnknownMessage(UnknownMessage(name.to_owned())))
}
