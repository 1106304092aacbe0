//! `EngineCoreOutputs`: one message of an engine, its outputs as arrays and one by one.

use std::sync::Arc;

use bytes::Bytes;
use extkv_core::protocol::logprobs::LogprobsSpans;
use extkv_core::protocol::tensor::{ArraySpan, NumpyDtype};
use extkv_core::protocol::{
    ColumnarOutputs, EngineCoreOutputs, FinishReason, LogprobsRows, NumpyArray, OutputColumns,
    OutputRows, OutputsKind, Visible, decode, encode_parts,
};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::pyclass::CompareOp;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyString};

use super::frames::Frames;
use super::output::PyEngineCoreOutput;
use super::part::{ToPython, new_array};
use super::record::{check_keywords, equality, text_of};
use super::source::PySource;
use super::{SkippedCounts, counts, profile_of, to_frames};
use crate::error::{BindingError, BindingResult};

/// A decoded message and its frames.
pub(crate) struct Batch {
    message: ColumnarOutputs,
    pub(super) frames: Frames,
}

impl Batch {
    pub(super) fn columns(&self) -> &OutputColumns {
        &self.message.outputs
    }

    /// The request of one output; Python reads it as UTF-8.
    pub(super) fn request_id<'py>(
        &self,
        py: Python<'py>,
        index: usize,
    ) -> PyResult<Bound<'py, PyString>> {
        PyString::from_bytes(py, self.columns().request_id_bytes(index).unwrap_or_default())
    }

    /// The new tokens of one output.
    pub(super) fn token_ids(&self, index: usize) -> &[i32] {
        self.columns().tokens_of(index)
    }

    /// Whether an output holds nothing but tokens and a finish reason.
    pub(super) fn is_plain(&self, index: usize) -> bool {
        self.columns().is_plain(index)
    }
}

/// One message of an engine: its outputs as arrays, and one by one when they are asked for.
///
/// `token_ids`, `token_offsets`, `finish_reasons` and `request_ids` describe the whole batch;
/// `outputs` has an object per request. Arrays are read-only.
#[pyclass(frozen, module = "extkv.protocol", name = "EngineCoreOutputs")]
pub(crate) struct PyEngineCoreOutputs {
    batch: Arc<Batch>,
    skipped: SkippedCounts,
    outputs: PyOnceLock<Py<PyList>>,
    request_ids: PyOnceLock<Py<PyList>>,
}

impl PyEngineCoreOutputs {
    fn of(message: ColumnarOutputs, frames: Frames, skipped: SkippedCounts) -> Self {
        let batch = Arc::new(Batch { message, frames });
        Self { batch, skipped, outputs: PyOnceLock::new(), request_ids: PyOnceLock::new() }
    }

    fn convert<'py>(&self, py: Python<'py>, value: &impl Visible) -> PyResult<Bound<'py, PyAny>> {
        ToPython::new(py, &self.batch.frames).convert(&value.part())
    }

    fn stacked<'py>(
        &self,
        py: Python<'py>,
        array: impl Fn(&LogprobsSpans) -> &ArraySpan<NumpyDtype>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = self.batch.columns().stack(array).map_err(BindingError::Stack)?;
        ToPython::new(py, &self.batch.frames).numpy(&array.as_part())
    }
}

macro_rules! outputs_class {
    ([$($field:ident),* $(,)?]) => {
        #[pymethods]
        impl PyEngineCoreOutputs {
            #[new]
            #[pyo3(signature = (**keywords))]
            fn new(py: Python<'_>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                let keywords = keywords.cloned().unwrap_or_else(|| PyDict::new(py));
                check_keywords(&EngineCoreOutputs::default(), &keywords)?;
                let built = EngineCoreOutputs::from_source(&PySource::arguments(keywords))
                    .map_err(BindingError::Message)?;
                let message = built.to_columns().map_err(BindingError::Message)?;
                Ok(Self::of(message, Frames::default(), (0, 0)))
            }

            $(
                #[getter]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.convert(py, &self.batch.message.$field)
                }
            )*

            /// Reads a message from its frames.
            #[staticmethod]
            fn decode(frames: Frames, profile: &str) -> BindingResult<Self> {
                let decoded = decode(frames.bytes(), profile_of(profile)?)?;
                Ok(Self::of(decoded.message, frames, counts(decoded.skipped)))
            }

            /// What was passed over when it was read: elements of arrays and keys of maps.
            #[getter]
            fn skipped(&self) -> SkippedCounts {
                self.skipped
            }

            /// The frames of the message.
            fn encode<'py>(
                &self,
                py: Python<'py>,
                profile: &str,
            ) -> PyResult<Bound<'py, PyList>> {
                let parts = encode_parts(&self.batch.message, profile_of(profile)?).map_err(BindingError::from)?;
                to_frames(py, &parts)
            }

            /// `request_batch`, `utility_result` or `dp_control`.
            #[getter]
            fn kind(&self) -> &'static str {
                match self.batch.message.kind() {
                    OutputsKind::RequestBatch => "request_batch",
                    OutputsKind::UtilityResult => "utility_result",
                    OutputsKind::DpControl => "dp_control",
                }
            }

            /// One `EngineCoreOutput` per request; the list is made once.
            #[getter]
            fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
                let made = self.outputs.get_or_try_init(py, || {
                    let one = |index| PyEngineCoreOutput::in_batch(self.batch.clone(), index);
                    let all = (0..self.batch.columns().len()).map(one);
                    Ok::<_, PyErr>(PyList::new(py, all)?.unbind())
                })?;
                Ok(made.bind(py).clone())
            }

            /// The request of each output; the list is made once.
            #[getter]
            fn request_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
                let made = self.request_ids.get_or_try_init(py, || {
                    let one = |index| self.batch.request_id(py, index);
                    let ids: Vec<_> =
                        (0..self.batch.columns().len()).map(one).collect::<PyResult<_>>()?;
                    Ok::<_, PyErr>(PyList::new(py, ids)?.unbind())
                })?;
                Ok(made.bind(py).clone())
            }

            /// New tokens of all outputs, one output after the other (int32, [tokens]).
            #[getter]
            fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let ids = self.batch.columns().token_ids().iter();
                new_array(py, "<i4", ids, |id| id.to_le_bytes())
            }

            /// Where each output's tokens begin, and the end of the last (int64, [outputs + 1]).
            #[getter]
            fn token_offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let offsets = self.batch.columns().token_offsets();
                new_array(py, "<i8", offsets, |offset| i64::from(offset).to_le_bytes())
            }

            /// Numbers of `FinishReason`, -1 while a request runs (int8, [outputs]).
            #[getter]
            fn finish_reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let reasons = self.batch.columns().finish_reasons().iter();
                new_array(py, "|i1", reasons, |reason| match reason {
                    Some(reason) => [reason.number()],
                    None => (-1_i8).to_le_bytes(),
                })
            }

            /// Outputs that hold more than tokens, log-probabilities and a finish reason.
            #[getter]
            fn detailed_indices(&self) -> Vec<u32> {
                self.batch.columns().detailed().to_vec()
            }

            /// Outputs that have log-probabilities.
            #[getter]
            fn logprob_indices(&self) -> Vec<u32> {
                self.batch.columns().logprobs().iter().map(|(index, _)| *index).collect()
            }

            /// Token ids, log-probabilities and ranks of all outputs that have them, row after row:
            /// [tokens, k + 1] twice, [tokens] once. Copies; raises if the outputs differ in k.
            fn stacked_logprobs<'py>(
                &self,
                py: Python<'py>,
            ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
                let token_ids = self.stacked(py, |spans| &spans.token_ids)?;
                let logprobs = self.stacked(py, |spans| &spans.logprobs)?;
                Ok((token_ids, logprobs, self.stacked(py, |spans| &spans.ranks)?))
            }

            fn __len__(&self) -> usize {
                self.batch.columns().len()
            }

            fn __richcmp__(&self, other: &Bound<'_, PyAny>, compare: CompareOp) -> Py<PyAny> {
                let is_equal = other
                    .cast::<Self>()
                    .is_ok_and(|other| other.get().batch.message == self.batch.message);
                equality(other.py(), is_equal, compare)
            }

            fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
                text_of(slf.as_any(), &slf.get().batch.message, &ColumnarOutputs::default())
            }
        }
    };
}

outputs_class!([
    engine_index,
    scheduler_stats,
    timestamp,
    utility_output,
    finished_requests,
    wave_complete,
    start_wave,
    weight_version,
]);

/// Log-probabilities of a batch: ids, log-probabilities, ranks, each `(dtype, shape, data)`.
type LogprobsArrays = [(String, Vec<u64>, PyBackedBytes); 3];

/// Encodes a message from columns: request ids, tokens (u4), ends (u8), finish reasons (i1, -1 for
/// none) and optional log-probabilities.
#[pyfunction]
#[pyo3(signature = (request_ids, columns, logprobs, envelope, profile))]
pub(crate) fn encode_output_columns<'py>(
    py: Python<'py>,
    request_ids: Vec<PyBackedStr>,
    columns: (PyBackedBytes, PyBackedBytes, PyBackedBytes),
    logprobs: Option<LogprobsArrays>,
    envelope: Bound<'py, PyDict>,
    profile: &str,
) -> PyResult<Bound<'py, PyList>> {
    let envelope = EngineCoreOutputs::from_source(&PySource::arguments(envelope))
        .map_err(BindingError::Message)?;
    let (token_ids, ends, reasons) = columns;
    let (token_ids, _) = token_ids.as_chunks();
    let (ends, _) = ends.as_chunks();
    let rows = OutputRows::new(
        request_ids,
        token_ids.iter().map(|id| u32::from_le_bytes(*id)).collect(),
        ends.iter().map(|end| usize::from_le_bytes(*end)).collect(),
        reasons.iter().map(|number| FinishReason::from_number(*number)).collect(),
        logprobs.map(logprobs_rows).transpose()?,
    )
    .map_err(BindingError::Rows)?;
    let parts = rows.encode(&envelope, profile_of(profile)?).map_err(BindingError::from)?;
    to_frames(py, &parts)
}

fn logprobs_rows(arrays: LogprobsArrays) -> BindingResult<LogprobsRows> {
    let [token_ids, logprobs, ranks] = arrays.map(|(dtype, shape, data)| {
        NumpyArray::named(&dtype, shape, Bytes::from_owner(data)).map_err(BindingError::Array)
    });
    LogprobsRows::new(&token_ids?, &logprobs?, &ranks?).map_err(BindingError::Rows)
}
