//! Options that both ends share.

use std::time::Duration;

use extkv_core::transport::{HeartbeatOptions, SocketLimits};
use pyo3::FromPyObject;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Seconds as Python gives them: a number of at least 0; None is nearly for ever.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seconds(pub(super) Duration);

/// Nobody waits for longer, and a deadline that far ahead can still be computed.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Some(seconds) = object.extract::<Option<f64>>()? else { return Ok(Self(LONGEST)) };
        if seconds.is_nan() || seconds < 0.0 {
            let text = format!("expected seconds of at least 0, or None, got {seconds}");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self(Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST)))
    }
}

/// Limits of all sockets; what is None stays as usual.
pub(super) fn socket_limits(
    max_message_bytes: Option<usize>,
    max_queued_bytes: Option<usize>,
    heartbeat_s: Option<(Seconds, Seconds)>,
    reconnect_for_s: Option<Seconds>,
) -> SocketLimits {
    let mut limits = SocketLimits::default();
    if let Some(bytes) = max_message_bytes {
        limits.max_message_bytes = bytes;
    }
    if let Some(bytes) = max_queued_bytes {
        limits.max_queued_bytes = bytes;
    }
    if let Some((interval, timeout)) = heartbeat_s {
        limits.heartbeat = Some(HeartbeatOptions { interval: interval.0, timeout: timeout.0 });
    }
    if let Some(seconds) = reconnect_for_s {
        limits.reconnect_for = seconds.0;
    }
    limits
}
