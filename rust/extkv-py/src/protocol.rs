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
    UtilityCall, Visible, Wire, decode, encode_parts,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

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
pub(crate) fn to_frames<'py>(
    py: Python<'py>,
    (first, others): &(Vec<u8>, Vec<bytes::Bytes>),
) -> PyResult<Bound<'py, PyList>> {
    let frames = PyList::new(py, [PyBytes::new(py, first)])?;
    others.iter().try_for_each(|frame| frames.append(PyBytes::new(py, frame)))?;
    Ok(frames)
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

fn encoded<'py, T: Wire + Visible>(
    py: Python<'py>,
    message: &Bound<'py, PyAny>,
    profile: Profile,
) -> PyResult<Bound<'py, PyList>> {
    let message = T::from_source(&PySource::new(message.clone())).map_err(BindingError::Message)?;
    to_frames(py, &encode_parts(&message, profile).map_err(BindingError::from)?)
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
        pub(crate) fn protocol_encode<'py>(
            py: Python<'py>,
            kind: &str,
            message: &Bound<'py, PyAny>,
            profile: &str,
        ) -> PyResult<Bound<'py, PyList>> {
            let profile = profile_of(profile)?;
            match kind {
                $($name => encoded::<$type>(py, message, profile),)*
                _ => Err(BindingError::UnknownMessage(UnknownMessage(kind.to_owned())).into()),
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
