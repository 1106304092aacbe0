//! `EngineCoreRequest` and `SamplingParams`: native, each field made when it is asked for.

use extkv_core::protocol::{
    EngineCoreRequest, Profile, SamplingParams, Untyped, Visible, decode, encode, encode_parts,
};
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyDict, PyList};

use super::frames::Frames;
use super::part::ToPython;
use super::record::{check_keywords, equality, text_of};
use super::source::PySource;
use super::{SkippedCounts, counts, profile_of, to_frames, untyped};
use crate::error::{BindingError, BindingResult};

macro_rules! record_class {
    (
        $(#[$meta:meta])*
        $Class:ident, $name:literal, $Record:ty,
        fields [$($field:ident $(as $python:ident)?),* $(,)?]
        state { $($state:ident: $State:ty)? }
        methods { $($methods:tt)* }
    ) => {
        $(#[$meta])*
        #[pyclass(frozen, module = "extkv.protocol", name = $name)]
        pub(crate) struct $Class {
            record: $Record,
            frames: Frames,
            $($state: $State,)?
        }

        impl $Class {
            fn built(keywords: Option<&Bound<'_, PyDict>>, py: Python<'_>) -> PyResult<$Record> {
                let keywords = keywords.cloned().unwrap_or_else(|| PyDict::new(py));
                check_keywords(&<$Record>::default(), &keywords)?;
                let built = <$Record>::from_source(&PySource::arguments(keywords));
                Ok(built.map_err(BindingError::Message)?)
            }
        }

        #[pymethods]
        impl $Class {
            $(
                #[getter $(($python))?]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    ToPython::new(py, &self.frames).convert(&self.record.$field.part())
                }
            )*

            fn __richcmp__(&self, other: &Bound<'_, PyAny>, compare: CompareOp) -> Py<PyAny> {
                let is_equal = other.cast::<Self>().is_ok_and(|other| other.get().record == self.record);
                equality(other.py(), is_equal, compare)
            }

            fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
                text_of(slf.as_any(), &slf.get().record, &<$Record>::default())
            }

            $($methods)*
        }
    };
}

record_class! {
    /// How a request wants its tokens chosen, and when it ends.
    PySamplingParams, "SamplingParams", SamplingParams,
    fields [
        n, presence_penalty, frequency_penalty, repetition_penalty, temperature, watermarking,
        top_p, top_k, min_p, seed, stop, stop_token_ids, ignore_eos, max_tokens, min_tokens,
        logprobs, prompt_logprobs, prompt_logprob_token_ids, prompt_logprob_start,
        logprob_token_ids, flat_logprobs, detokenize, skip_special_tokens,
        spaces_between_special_tokens, include_stop_str_in_output, output_kind, stream_interval,
        skip_clone, output_text_buffer_length, eos_token_id as _eos_token_id,
        all_stop_token_ids as _all_stop_token_ids, watermarking_skipped as _watermarking_skipped,
        structured_outputs, logit_bias, allowed_token_ids, extra_args, bad_words,
        bad_words_token_ids as _bad_words_token_ids, skip_reading_prefix_cache,
        thinking_token_budget, repetition_detection, routed_experts_prompt_start,
        trace_decode_token_ids,
    ]
    state {}
    methods {
        #[new]
        #[pyo3(signature = (**keywords))]
        fn new(py: Python<'_>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
            let record = Self::built(keywords, py)?.filled_in();
            Ok(Self { record, frames: Frames::default() })
        }

        /// Fields that do not have their default, as they are on the wire, by name.
        fn changed_fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
            let frames = encode(&self.record, Profile::V0_33).map_err(BindingError::from)?;
            let message = frames.into_iter().next().unwrap_or_default();
            let value = Untyped::from_msgpack(message).map_err(BindingError::Message)?;
            untyped::to_python(py, &value)
        }
    }
}

impl PySamplingParams {
    /// The parameters.
    pub(super) fn record(&self) -> &SamplingParams {
        &self.record
    }
}

impl PyEngineCoreRequest {
    /// A request that was read already.
    pub(crate) fn received(record: EngineCoreRequest) -> Self {
        Self { record, frames: Frames::default(), skipped: (0, 0) }
    }
}

record_class! {
    /// A request to an engine.
    PyEngineCoreRequest, "EngineCoreRequest", EngineCoreRequest,
    fields [
        request_id, prompt_token_ids, mm_features, pooling_params, arrival_time, lora_request,
        cache_salt, data_parallel_rank, prompt_embeds, prompt_is_token_ids, client_index,
        current_wave, priority, trace_headers, resumable, external_req_id, reasoning_ended,
        reasoning_parser_kwargs, abort_immediately, session_id, kv_hints,
    ]
    state { skipped: SkippedCounts }
    methods {
        #[new]
        #[pyo3(signature = (**keywords))]
        fn new(py: Python<'_>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
            let record = Self::built(keywords, py)?;
            Ok(Self { record, frames: Frames::default(), skipped: (0, 0) })
        }

        #[getter]
        fn sampling_params(&self) -> Option<PySamplingParams> {
            let record = self.record.sampling_params.as_deref()?.clone();
            Some(PySamplingParams { record, frames: self.frames.clone() })
        }

        /// Reads a request from its frames.
        #[staticmethod]
        fn decode(frames: Frames, profile: &str) -> BindingResult<Self> {
            let decoded = decode(frames.bytes(), profile_of(profile)?)?;
            let skipped = counts(decoded.skipped);
            Ok(Self { record: decoded.message, frames, skipped })
        }

        /// What was passed over when it was read: elements of arrays and keys of maps.
        #[getter]
        fn skipped(&self) -> SkippedCounts {
            self.skipped
        }

        /// The frames of the request.
        fn encode<'py>(
                &self,
                py: Python<'py>,
                profile: &str,
            ) -> PyResult<Bound<'py, PyList>> {
            let parts = encode_parts(&self.record, profile_of(profile)?).map_err(BindingError::from)?;
                to_frames(py, &parts)
        }
    }
}
