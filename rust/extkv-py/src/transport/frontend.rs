//! A front end's end.

use std::sync::Arc;
use std::time::Duration;

use extkv_core::protocol::{EngineCoreRequest, decode};
use extkv_core::transport::{
    Call, CallOutcome, CoordinatorAddresses, EngineStatus, FrontEnd, FrontEndOptions, Stream,
    StreamEnd, StreamItem, TransportError,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use super::engine::untyped;
use super::limits::{Seconds, socket_limits};
use super::values::{frames_to_python, value_to_python};
use crate::error::{BindingError, BindingResult};
use crate::protocol::{Frames, PyEngineCoreOutput, profile_of};

/// A front end's sockets.
#[pyclass(frozen, name = "FrontEnd", module = "extkv._extkv")]
pub(crate) struct PyFrontEnd {
    inner: Arc<FrontEnd>,
}

#[pymethods]
impl PyFrontEnd {
    /// Listen for engines.
    #[staticmethod]
    #[pyo3(signature = (
        handshake_address, *, input_address, output_address, num_engines, expects_local, profile,
        coordinator=None, max_stream_bytes=None, max_message_bytes=None, max_queued_bytes=None,
        heartbeat_s=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn bind(
        py: Python<'_>,
        handshake_address: &str,
        input_address: &str,
        output_address: &str,
        num_engines: u16,
        expects_local: Option<bool>,
        profile: &str,
        coordinator: Option<(String, String, String)>,
        max_stream_bytes: Option<usize>,
        max_message_bytes: Option<usize>,
        max_queued_bytes: Option<usize>,
        heartbeat_s: Option<(Seconds, Seconds)>,
    ) -> PyResult<Self> {
        let mut options = FrontEndOptions::new(handshake_address);
        input_address.clone_into(&mut options.input_address);
        output_address.clone_into(&mut options.output_address);
        options.num_engines = num_engines;
        options.expects_local = expects_local;
        options.default_profile = profile_of(profile)?;
        options.coordinator = coordinator.map(|(to_engines, from_engines, to_front_ends)| {
            CoordinatorAddresses { to_engines, from_engines, to_front_ends }
        });
        options.max_stream_bytes = max_stream_bytes.unwrap_or(options.max_stream_bytes);
        options.limits = socket_limits(max_message_bytes, max_queued_bytes, heartbeat_s, None);
        let inner = py.detach(|| FrontEnd::bind(&options)).map_err(BindingError::from)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where engines say HELLO.
    #[getter]
    fn handshake_address(&self) -> &str {
        self.inner.handshake_address()
    }

    /// Readable while streams or calls that were asked for have something.
    #[getter]
    fn descriptor(&self) -> i32 {
        self.inner.notifier().descriptor()
    }

    /// Keys of streams and calls that have something since they were asked.
    fn take_ready(&self) -> Vec<u64> {
        self.inner.notifier().take()
    }

    /// Wait until every engine takes requests.
    fn wait_ready(&self, py: Python<'_>, timeout_s: Seconds) -> BindingResult<()> {
        Ok(py.detach(|| self.inner.wait_ready(timeout_s.0))?)
    }

    /// How far each engine is: awaited, starting, ready or dead.
    fn statuses(&self) -> Vec<&'static str> {
        let name = |status| match status {
            EngineStatus::Awaited => "awaited",
            EngineStatus::Starting => "starting",
            EngineStatus::Ready => "ready",
            EngineStatus::Dead => "dead",
        };
        self.inner.statuses().into_iter().map(name).collect()
    }

    /// Frames of what an engine said of itself; empty before that, and of old engines.
    fn response(&self, py: Python<'_>, engine: u16) -> PyResult<Vec<Py<PyBytes>>> {
        let frames = self.inner.response_frames(engine).map_err(BindingError::from)?;
        Ok(frames_to_python(py, &frames))
    }

    /// Name of the wire profile that an engine speaks.
    fn profile(&self, engine: u16) -> BindingResult<&'static str> {
        Ok(self.inner.profile(engine)?.name())
    }

    /// Send an encoded request.
    #[pyo3(signature = (frames, *, profile, engine))]
    fn add(
        &self,
        py: Python<'_>,
        frames: Frames,
        profile: &str,
        engine: Option<u16>,
    ) -> PyResult<PyStream> {
        let profile = profile_of(profile)?;
        let added = py.detach(|| {
            let request =
                decode::<EngineCoreRequest>(frames.bytes(), profile).map_err(|error| {
                    TransportError::Malformed { what: "the request", reason: error.to_string() }
                })?;
            self.inner.add(request.message, engine)
        });
        Ok(PyStream { inner: added.map_err(BindingError::from)? })
    }

    /// End streams and tell their engines.
    fn abort(&self, py: Python<'_>, request_ids: Vec<String>) {
        py.detach(|| self.inner.abort(&request_ids));
    }

    /// Call a method of an engine.
    fn call(
        &self,
        py: Python<'_>,
        engine: u16,
        method: &str,
        args: &Bound<'_, PyTuple>,
    ) -> PyResult<PyCall> {
        let args = untyped(args)?;
        let call = py.detach(|| self.inner.call(engine, method, args));
        Ok(PyCall { inner: call.map_err(BindingError::from)? })
    }

    /// Mark an engine as dead.
    fn declare_dead(&self, py: Python<'_>, engine: u16, reason: &str) -> BindingResult<()> {
        Ok(py.detach(|| self.inner.declare_dead(engine, reason))?)
    }

    /// What is open, and what was passed over.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.inner.counts();
        let dict = PyDict::new(py);
        dict.set_item("num_streams", counts.num_streams)?;
        dict.set_item("num_calls", counts.num_calls)?;
        dict.set_item("num_late_outputs", counts.num_late_outputs)?;
        dict.set_item("num_rejected", counts.num_rejected)?;
        dict.set_item("num_skipped", counts.num_skipped)?;
        Ok(dict)
    }

    /// What was refused or lost since the last call.
    fn take_notices(&self) -> Vec<String> {
        self.inner.take_notices()
    }

    /// End streams and calls, send what waits at most this long, stop listening.
    fn close(&self, py: Python<'_>, linger_s: Seconds) {
        py.detach(|| self.inner.close(linger_s.0.min(Duration::from_secs(3600))));
    }
}

/// Outputs of one request. Dropping an unfinished one aborts the request.
#[pyclass(frozen, name = "Stream", module = "extkv._extkv")]
pub(crate) struct PyStream {
    inner: Stream,
}

#[pymethods]
impl PyStream {
    /// The request.
    #[getter]
    fn request_id(&self) -> &str {
        self.inner.request_id()
    }

    /// Index of the engine that has it.
    #[getter]
    fn engine(&self) -> u16 {
        self.inner.engine()
    }

    /// The key that `take_ready` tells.
    #[getter]
    fn key(&self) -> u64 {
        self.inner.key()
    }

    /// The next item if it is there; else `take_ready` will tell.
    fn take_or_await<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.take_or_await().map(|item| item_to_python(py, item)).transpose()
    }

    /// The next item; wait for it at most this long.
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Seconds,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let item = py.detach(|| self.inner.wait(timeout_s.0));
        item.map(|item| item_to_python(py, item)).transpose()
    }

    /// End the stream and tell the engine.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.inner.abort());
    }
}

/// A call of an engine's method.
#[pyclass(frozen, name = "Call", module = "extkv._extkv")]
pub(crate) struct PyCall {
    inner: Call,
}

#[pymethods]
impl PyCall {
    /// The key that `take_ready` tells.
    #[getter]
    fn key(&self) -> u64 {
        self.inner.key()
    }

    /// The outcome if it is there; else `take_ready` will tell.
    fn take_or_await<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.take_or_await().map(|outcome| outcome_to_python(py, outcome)).transpose()
    }

    /// Wait for the outcome.
    fn wait<'py>(&self, py: Python<'py>, timeout_s: Seconds) -> PyResult<Bound<'py, PyAny>> {
        let outcome = py.detach(|| self.inner.wait(timeout_s.0)).map_err(BindingError::from)?;
        outcome_to_python(py, outcome)
    }
}

/// Kind and contents, as `extkv.transport.streams` names them.
fn item_to_python(py: Python<'_>, item: StreamItem) -> PyResult<Bound<'_, PyAny>> {
    let tuple = match item {
        StreamItem::Output { output, .. } => {
            ("output", PyEngineCoreOutput::alone(output)).into_pyobject(py)
        }
        StreamItem::End(StreamEnd::Finished) => ("finished", ()).into_pyobject(py),
        StreamItem::End(StreamEnd::Aborted) => ("aborted", ()).into_pyobject(py),
        StreamItem::End(StreamEnd::Closed) => ("closed", ()).into_pyobject(py),
        StreamItem::End(StreamEnd::EngineDead { engine, reason }) => {
            ("engine_dead", (engine, reason)).into_pyobject(py)
        }
        StreamItem::End(StreamEnd::Garbled { engine, reason }) => {
            ("garbled", (engine, reason)).into_pyobject(py)
        }
        StreamItem::End(StreamEnd::SlowReader { waiting_bytes, limit_bytes }) => {
            ("slow_reader", (waiting_bytes, limit_bytes)).into_pyobject(py)
        }
    };
    tuple.map(Bound::<PyTuple>::into_any)
}

fn outcome_to_python(py: Python<'_>, outcome: CallOutcome) -> PyResult<Bound<'_, PyAny>> {
    let tuple = match outcome {
        CallOutcome::Returned(result) => {
            let value = result.map_or(rmpv::Value::Nil, |result| result.value.to_value());
            ("returned", value_to_python(py, &value)?).into_pyobject(py)
        }
        CallOutcome::Failed(text) => ("failed", text).into_pyobject(py),
        CallOutcome::EngineDead { engine, reason } => {
            ("engine_dead", (engine, reason)).into_pyobject(py)
        }
        CallOutcome::Closed => ("closed", ()).into_pyobject(py),
    };
    tuple.map(Bound::<PyTuple>::into_any)
}
