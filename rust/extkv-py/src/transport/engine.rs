//! An engine's end.

use std::time::Duration;

use extkv_core::protocol::{
    CallId, EngineCoreOutputs, EngineCoreReadyResponse, SchedulerStats, Untyped, UtilityOutput,
    UtilityResult, encode,
};
use extkv_core::transport::{EngineEnd, EngineInput, EngineOptions, TransportError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::limits::{Seconds, socket_limits};
use super::outputs::News;
use super::values::{from_python, msgpack, to_python, value_to_python};
use crate::error::{BindingError, BindingResult};
use crate::protocol::{PyEngineCoreRequest, profile_of};

/// An engine's connections to its front ends and to the coordinator.
#[pyclass(frozen, name = "EngineEnd", module = "extkv._extkv")]
pub(crate) struct PyEngineEnd {
    inner: EngineEnd,
    engine_index: u16,
}

#[pymethods]
impl PyEngineEnd {
    /// Say HELLO and wait for INIT.
    #[staticmethod]
    #[pyo3(signature = (
        handshake_address, engine_index, *, is_local, is_headless, profile, handshake_timeout_s,
        parallel_config_hash=None, max_waiting_bytes=None, max_message_bytes=None,
        max_queued_bytes=None, heartbeat_s=None, reconnect_for_s=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn connect(
        py: Python<'_>,
        handshake_address: &str,
        engine_index: u16,
        is_local: bool,
        is_headless: bool,
        profile: &str,
        handshake_timeout_s: Seconds,
        parallel_config_hash: Option<String>,
        max_waiting_bytes: Option<usize>,
        max_message_bytes: Option<usize>,
        max_queued_bytes: Option<usize>,
        heartbeat_s: Option<(Seconds, Seconds)>,
        reconnect_for_s: Option<Seconds>,
    ) -> PyResult<Self> {
        let mut options = EngineOptions::new(handshake_address, engine_index);
        options.is_local = is_local;
        options.is_headless = is_headless;
        options.profile = profile_of(profile)?;
        options.handshake_timeout = handshake_timeout_s.0;
        options.parallel_config_hash = parallel_config_hash;
        options.max_waiting_bytes = max_waiting_bytes.unwrap_or(options.max_waiting_bytes);
        options.limits =
            socket_limits(max_message_bytes, max_queued_bytes, heartbeat_s, reconnect_for_s);
        let inner = py.detach(|| EngineEnd::connect(options)).map_err(BindingError::from)?;
        Ok(Self { inner, engine_index })
    }

    /// What the front end said at start-up, by vLLM's names.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, "INIT", self.inner.metadata())
    }

    /// Number of clients.
    #[getter]
    fn num_clients(&self) -> usize {
        self.inner.num_clients()
    }

    /// Whether there is a coordinator to send to.
    #[getter]
    fn has_coordinator(&self) -> bool {
        self.inner.has_coordinator()
    }

    /// Elements and keys of requests that the profile does not know.
    #[getter]
    fn num_skipped(&self) -> u64 {
        self.inner.num_skipped()
    }

    /// Connect to clients and coordinator and tell them that the engine is ready.
    fn start(&self, py: Python<'_>, ready_response: &Bound<'_, PyAny>) -> PyResult<()> {
        let ready: EngineCoreReadyResponse =
            from_python("the ready response", ready_response, self.inner.profile())?;
        Ok(py.detach(|| self.inner.start(&ready)).map_err(BindingError::from)?)
    }

    /// Take all input that is there; wait for some at most this long.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Seconds,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let inputs = py.detach(|| self.inner.receive(timeout_s.0));
        inputs.into_iter().map(|input| input_to_python(py, input)).collect()
    }

    /// Make a waiting `receive` return.
    fn wake(&self) {
        self.inner.wake();
    }

    /// Send outputs and statistics to a client; over its limit only what ends requests.
    #[pyo3(signature = (client, news, *, timestamp, scheduler_stats, finished_requests, over_limit))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn send_outputs(
        &self,
        py: Python<'_>,
        client: i64,
        news: Vec<News>,
        timestamp: f64,
        scheduler_stats: Option<&Bound<'_, PyAny>>,
        finished_requests: Option<Vec<String>>,
        over_limit: bool,
    ) -> PyResult<()> {
        let scheduler_stats = self.stats_of(scheduler_stats)?;
        let outputs = news.into_iter().map(News::into_output).collect::<PyResult<Vec<_>>>()?;
        let batch = EngineCoreOutputs {
            engine_index: i64::from(self.engine_index),
            outputs,
            scheduler_stats,
            timestamp,
            finished_requests: finished_requests.map(|ids| ids.into_iter().collect()),
            weight_version: Some("default".to_owned()),
            ..EngineCoreOutputs::default()
        };
        Ok(py.detach(|| self.send(client, &batch, over_limit))?)
    }

    /// Answer a call with a value or the text of a failure.
    #[pyo3(signature = (client, call_id, *, value, failure))]
    fn answer(
        &self,
        py: Python<'_>,
        client: i64,
        call_id: i128,
        value: &Bound<'_, PyAny>,
        failure: Option<String>,
    ) -> PyResult<()> {
        let result = match &failure {
            Some(_) => None,
            None => Some(UtilityResult { value: untyped(value)? }),
        };
        let call_id = match (u64::try_from(call_id), i64::try_from(call_id)) {
            (Ok(number), _) => CallId::from(number),
            (_, Ok(number)) => CallId::from(number),
            _ => return Err(PyValueError::new_err("a call id has at most 64 bits")),
        };
        let batch = EngineCoreOutputs {
            engine_index: i64::from(self.engine_index),
            utility_output: Some(UtilityOutput { call_id, failure_message: failure, result }),
            ..EngineCoreOutputs::default()
        };
        Ok(py.detach(|| self.send(client, &batch, true))?)
    }

    /// Tell the coordinator of load or of a change of the wave.
    #[pyo3(signature = (*, timestamp, scheduler_stats=None, wave_complete=None, start_wave=None))]
    fn send_to_coordinator(
        &self,
        py: Python<'_>,
        timestamp: f64,
        scheduler_stats: Option<&Bound<'_, PyAny>>,
        wave_complete: Option<i64>,
        start_wave: Option<i64>,
    ) -> PyResult<()> {
        let batch = EngineCoreOutputs {
            engine_index: i64::from(self.engine_index),
            scheduler_stats: self.stats_of(scheduler_stats)?,
            timestamp,
            wave_complete,
            start_wave,
            ..EngineCoreOutputs::default()
        };
        let frames = self.encoded(&batch)?;
        Ok(py.detach(|| self.inner.send_to_coordinator(frames)).map_err(BindingError::from)?)
    }

    /// Bytes that wait for a client.
    fn num_queued_bytes(&self, client: i64) -> BindingResult<usize> {
        Ok(self.inner.num_queued_bytes(client)?)
    }

    /// From now on answer new requests with an abort and calls with a failure.
    fn refuse_work(&self) {
        self.inner.refuse_work();
    }

    /// Tell every client that the engine's loop has failed.
    fn send_dead(&self) {
        self.inner.send_dead();
    }

    /// Send what waits, at most this long, and end the connections.
    fn close(&self, py: Python<'_>, linger_s: Seconds) {
        py.detach(|| self.inner.close(linger_s.0.min(Duration::from_secs(3600))));
    }
}

impl PyEngineEnd {
    fn stats_of(&self, stats: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Box<SchedulerStats>>> {
        let profile = self.inner.profile();
        stats.map(|stats| from_python("scheduler statistics", stats, profile)).transpose()
    }

    fn encoded(&self, batch: &EngineCoreOutputs) -> BindingResult<Vec<bytes::Bytes>> {
        encode(batch, self.inner.profile()).map_err(|error| {
            TransportError::Unencodable { what: "outputs", reason: error.to_string() }.into()
        })
    }

    fn send(&self, client: i64, batch: &EngineCoreOutputs, over_limit: bool) -> BindingResult<()> {
        let frames = self.encoded(batch)?;
        Ok(match over_limit {
            true => self.inner.send_over_limit(client, frames),
            false => self.inner.send(client, frames),
        }?)
    }
}

pub(super) fn untyped(value: &Bound<'_, PyAny>) -> PyResult<Untyped> {
    let error = |error: extkv_core::protocol::DecodeError| PyValueError::new_err(error.to_string());
    Untyped::from_msgpack(msgpack(value)?).map_err(error)
}

/// Kind and contents, as `extkv.transport.engine` names them.
fn input_to_python(py: Python<'_>, input: EngineInput) -> PyResult<Bound<'_, PyAny>> {
    let tuple = match input {
        EngineInput::Request { client, request } => {
            let request = PyEngineCoreRequest::received(*request);
            ("request", (client, request)).into_pyobject(py)
        }
        EngineInput::Abort { request_ids } => ("abort", request_ids).into_pyobject(py),
        EngineInput::Utility { client, call } => {
            let args = value_to_python(py, &call.args.to_value())?;
            let id = call.call_id.number();
            ("utility", (client, id, call.method, args)).into_pyobject(py)
        }
        EngineInput::StartDpWave { wave, is_excluded } => {
            ("start_wave", (wave, is_excluded)).into_pyobject(py)
        }
        EngineInput::ClientLost { client, reason } => {
            ("client_lost", (client, reason)).into_pyobject(py)
        }
        EngineInput::CoordinatorLost { reason } => ("coordinator_lost", reason).into_pyobject(py),
        EngineInput::Rejected { source, reason } => {
            ("rejected", (source, reason)).into_pyobject(py)
        }
    };
    tuple.map(Bound::<PyTuple>::into_any)
}
