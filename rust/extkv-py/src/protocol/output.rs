//! `EngineCoreOutput`: one output, of a batch or on its own.

use std::sync::Arc;

use extkv_core::protocol::{EngineCoreOutput, Part, Visible};
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyDict, PyList, PyString};

use super::frames::Frames;
use super::outputs::Batch;
use super::part::ToPython;
use super::record::{check_keywords, equality, text_of};
use super::source::PySource;
use crate::error::{BindingError, BindingResult};

/// What is new about one request.
#[pyclass(frozen, module = "extkv.protocol", name = "EngineCoreOutput")]
pub(crate) struct PyEngineCoreOutput(State);

enum State {
    InBatch { batch: Arc<Batch>, index: usize },
    Alone(Box<EngineCoreOutput>),
}

impl PyEngineCoreOutput {
    pub(super) fn in_batch(batch: Arc<Batch>, index: usize) -> Self {
        Self(State::InBatch { batch, index })
    }

    /// An output that was read already.
    pub(crate) fn alone(output: Box<EngineCoreOutput>) -> Self {
        Self(State::Alone(output))
    }

    /// The output, read from its batch.
    pub(super) fn record(&self) -> Option<EngineCoreOutput> {
        match &self.0 {
            State::InBatch { batch, index } => batch.columns().output(*index)?.ok(),
            State::Alone(output) => Some(output.as_ref().clone()),
        }
    }

    fn read(&self) -> BindingResult<EngineCoreOutput> {
        match &self.0 {
            State::InBatch { batch, index } => match batch.columns().output(*index) {
                Some(output) => Ok(output?),
                None => Ok(EngineCoreOutput::default()),
            },
            State::Alone(output) => Ok(output.as_ref().clone()),
        }
    }

    fn frames(&self) -> Frames {
        match &self.0 {
            State::InBatch { batch, .. } => batch.frames.clone(),
            State::Alone(_) => Frames::default(),
        }
    }

    fn field<'py>(
        &self,
        py: Python<'py>,
        part: impl for<'a> Fn(&'a EngineCoreOutput) -> Part<'a>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let is_plain = match &self.0 {
            State::InBatch { batch, index } => batch.is_plain(*index),
            State::Alone(_) => false,
        };
        let output = if is_plain { EngineCoreOutput::default() } else { self.read()? };
        ToPython::new(py, &self.frames()).convert(&part(&output))
    }
}

macro_rules! output_class {
    ([$($field:ident),* $(,)?]) => {
        #[pymethods]
        impl PyEngineCoreOutput {
            #[new]
            #[pyo3(signature = (**keywords))]
            fn new(py: Python<'_>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                let keywords = keywords.cloned().unwrap_or_else(|| PyDict::new(py));
                check_keywords(&EngineCoreOutput::default(), &keywords)?;
                let built = EngineCoreOutput::from_source(&PySource::arguments(keywords));
                Ok(Self::alone(Box::new(built.map_err(BindingError::Message)?)))
            }

            #[getter]
            fn request_id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
                match &self.0 {
                    State::InBatch { batch, index } => batch.request_id(py, *index),
                    State::Alone(output) => Ok(PyString::new(py, &output.request_id)),
                }
            }

            #[getter]
            fn new_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
                match &self.0 {
                    State::InBatch { batch, index } => PyList::new(py, batch.token_ids(*index)),
                    State::Alone(output) => PyList::new(py, &output.new_token_ids),
                }
            }

            #[getter]
            fn finish_reason<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let reason = match &self.0 {
                    State::InBatch { batch, index } => {
                        batch.columns().finish_reasons().get(*index).copied().flatten()
                    }
                    State::Alone(output) => output.finish_reason,
                };
                match reason {
                    Some(reason) => ToPython::new(py, &Frames::default()).convert(&reason.part()),
                    None => Ok(py.None().into_bound(py)),
                }
            }

            $(
                #[getter]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.field(py, |output| output.$field.part())
                }
            )*

            fn __richcmp__(&self, other: &Bound<'_, PyAny>, compare: CompareOp) -> Py<PyAny> {
                let is_equal = other.cast::<Self>().is_ok_and(|other| other.get().record() == self.record());
                equality(other.py(), is_equal, compare)
            }

            fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
                let output = slf.get().read()?;
                text_of(slf.as_any(), &output, &EngineCoreOutput::default())
            }
        }
    };
}

output_class!([
    new_logprobs,
    new_prompt_logprobs_tensors,
    pooling_output,
    stop_reason,
    events,
    kv_transfer_params,
    ec_transfer_params,
    trace_headers,
    prefill_stats,
    routed_experts,
    num_nans_in_logits,
    mm_cache_miss_hashes,
    new_sampling_mask,
    spec_decode_metrics,
    prompt_token_id_logprobs,
    error,
]);
