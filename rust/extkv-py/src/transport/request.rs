//! A request as an engine sees it.

use extkv_core::protocol::EngineCoreRequest;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::values::to_python;

/// A request that a client sent: what an engine needs of it.
#[pyclass(frozen, name = "ServedRequest", module = "extkv._extkv")]
pub(crate) struct PyServedRequest {
    client: usize,
    request: Box<EngineCoreRequest>,
}

impl PyServedRequest {
    pub(super) fn new(client: usize, request: Box<EngineCoreRequest>) -> Self {
        Self { client, request }
    }
}

#[pymethods]
impl PyServedRequest {
    /// Which client sent it.
    #[getter]
    fn client(&self) -> usize {
        self.client
    }

    /// Its id.
    #[getter]
    fn request_id(&self) -> &str {
        &self.request.request_id
    }

    /// The prompt's tokens; None if only embeddings are given.
    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.request.prompt_token_ids.as_ref().map(|ids| PyList::new(py, ids.iter())).transpose()
    }

    /// How tokens are chosen, by vLLM's field names, without what has its default; None for pooling.
    #[getter]
    fn sampling_params<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let params = self.request.sampling_params.as_deref();
        params.map(|params| to_python(py, "sampling parameters", params)).transpose()
    }

    /// Rank among requests, lower first.
    #[getter]
    fn priority(&self) -> i64 {
        self.request.priority
    }

    /// Keeps the prefix cache of different users apart.
    #[getter]
    fn cache_salt(&self) -> Option<&str> {
        self.request.cache_salt.as_deref()
    }

    /// The data-parallel wave that the client knows.
    #[getter]
    fn current_wave(&self) -> i64 {
        self.request.current_wave
    }

    /// Whether it ends at once, without output.
    #[getter]
    fn abort_immediately(&self) -> bool {
        self.request.abort_immediately
    }

    /// Fields that are set and that change what must be computed, by vLLM's names.
    #[getter]
    fn special_fields(&self) -> Vec<&'static str> {
        let request = &self.request;
        let fields = [
            ("mm_features", request.mm_features.as_ref().is_some_and(|list| !list.is_empty())),
            ("pooling_params", request.pooling_params.is_some()),
            ("lora_request", request.lora_request.is_some()),
            ("prompt_embeds", request.prompt_embeds.is_some()),
            ("resumable", request.resumable),
        ];
        fields.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }

    fn __repr__(&self) -> String {
        format!("ServedRequest({:?}, client={})", self.request.request_id, self.client)
    }
}
