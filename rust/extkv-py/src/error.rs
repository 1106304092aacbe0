//! Core errors as the Python classes of `extkv.errors`, chosen by variant.

use extkv_core::{DriverError, Error, ProbeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

/// A core error on its way to Python.
#[derive(Debug)]
pub(crate) struct BindingError(Error);

/// Result of a binding function.
pub(crate) type BindingResult<T> = Result<T, BindingError>;

impl From<Error> for BindingError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<ProbeError> for BindingError {
    fn from(error: ProbeError) -> Self {
        Self(error.into())
    }
}

impl From<DriverError> for BindingError {
    fn from(error: DriverError) -> Self {
        Self(error.into())
    }
}

impl From<BindingError> for PyErr {
    fn from(error: BindingError) -> Self {
        Python::attach(|py| to_python(py, &error.0).unwrap_or_else(|failure| failure))
    }
}

fn to_python(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("extkv.errors")?.getattr(class_name(error))?;
    let value = class.call((message(error),), Some(&attributes(py, error)?))?;
    Ok(PyErr::from_value(value))
}

/// The error and its causes, as one line.
fn message(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        text = format!("{text} ({source})");
        cause = source.source();
    }
    text
}

fn class_name(error: &Error) -> &'static str {
    match error {
        Error::OutOfMemory { .. } | Error::AddressSpaceExhausted { .. } => "OutOfMemoryError",
        Error::CapacityExceeded { .. } => "CapacityError",
        Error::GrowOnly { .. } => "GrowOnlyError",
        Error::ShrinkOnly { .. }
        | Error::ZeroCapacity
        | Error::ZeroSegments
        | Error::Indivisible { .. }
        | Error::SizeOverflow { .. }
        | Error::SeveralSegments { .. }
        | Error::NoSuchSegment { .. }
        | Error::ViewOutOfRange { .. }
        | Error::DuplicateBuffer { .. }
        | Error::Unavailable(ProbeError::InvalidGranularity { .. }) => "InvalidArgumentError",
        Error::Freed { .. } => "FreedError",
        Error::LiveViews { .. } => "LiveViewsError",
        Error::Forked { .. } | Error::Unavailable(ProbeError::Forked { .. }) => {
            "ForkedProcessError"
        }
        Error::Poisoned { .. } => "PoisonedError",
        Error::StalePrepared => "StaleGrowthError",
        Error::Unavailable(ProbeError::NoSuchDevice { .. }) => "NoSuchDeviceError",
        Error::Unavailable(_) => "DriverUnavailableError",
        Error::Driver(DriverError::MappingLimit { .. }) => "MappingLimitError",
        Error::Driver(_) => "DriverError",
    }
}

fn attributes<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyDict>> {
    match error {
        Error::OutOfMemory {
            requested,
            available,
            ..
        } => {
            let available = available.map(|bytes| bytes.0);
            [("requested", Some(requested.0)), ("available", available)].into_py_dict(py)
        }
        Error::AddressSpaceExhausted { requested, .. } => {
            [("requested", Some(requested.0)), ("available", None)].into_py_dict(py)
        }
        Error::LiveViews { num_views } => [("num_views", num_views)].into_py_dict(py),
        Error::Driver(source) => {
            let attributes = [("call", source.call().name())].into_py_dict(py)?;
            attributes.set_item("code", source.code())?;
            Ok(attributes)
        }
        _ => Ok(PyDict::new(py)),
    }
}
