//! Core errors as the Python classes of `extkv.errors`, chosen by variant.

use dspark_sched::calibration::CalibrationError;
use dspark_sched::estimator::EstimatorError;
use dspark_sched::step_cost::CostError;
use dspark_sched::verify_plan::PlanError as VerifyPlanError;
use extkv_core::dtype::UnknownDtype;
use extkv_core::kv::{LayoutError, PlanError, RecordError, SizingError, UnknownCacheOrder};
use extkv_core::protocol::output_rows::RowsError;
use extkv_core::protocol::tensor::ArrayError;
use extkv_core::protocol::{DecodeError, EncodeError, ProfileError, StackError};
use extkv_core::transport::TransportError;
use extkv_core::{DriverError, Error, ProbeError};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::sched::ArgumentError;

/// A core error on its way to Python.
#[derive(Debug)]
pub(crate) enum BindingError {
    Memory(Error),
    Layout(PlanError),
    Sizing(SizingError),
    Record(RecordError),
    Dtype(UnknownDtype),
    CacheOrder(UnknownCacheOrder),
    Scheduler(dspark_sched::Error),
    SchedulerArgument(ArgumentError),
    /// A refusal of `add_request`.
    Request(dspark_sched::Error),
    RequestArgument(ArgumentError),
    /// Bytes that are no message.
    Decode(DecodeError),
    /// Python values that make no message.
    Message(DecodeError),
    Encode(EncodeError),
    Profile(ProfileError),
    Rows(RowsError),
    Array(ArrayError),
    Stack(StackError),
    UnknownMessage(UnknownMessage),
    Transport(TransportError),
    VerifyPlan(VerifyPlanError),
    Estimator(EstimatorError),
    SpeculationArgument(ArgumentError),
    Calibration(CalibrationError),
    Cost(CostError),
}

/// A kind of message that there is not.
#[derive(Debug)]
pub(crate) struct UnknownMessage(pub(crate) String);

impl std::fmt::Display for UnknownMessage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "there is no message {:?}", self.0)
    }
}

impl std::error::Error for UnknownMessage {}

/// Result of a binding function.
pub(crate) type BindingResult<T> = Result<T, BindingError>;

macro_rules! from_core {
    ($($source:ty => $variant:ident),* $(,)?) => {$(
        impl From<$source> for BindingError {
            fn from(error: $source) -> Self {
                Self::$variant(error.into())
            }
        }
    )*};
}

from_core! {
    Error => Memory,
    ProbeError => Memory,
    DriverError => Memory,
    PlanError => Layout,
    LayoutError => Layout,
    SizingError => Sizing,
    UnknownDtype => Dtype,
    UnknownCacheOrder => CacheOrder,
    dspark_sched::Error => Scheduler,
    ArgumentError => SchedulerArgument,
    DecodeError => Decode,
    EncodeError => Encode,
    ProfileError => Profile,
    TransportError => Transport,
    VerifyPlanError => VerifyPlan,
    EstimatorError => Estimator,
    CalibrationError => Calibration,
    CostError => Cost,
}

impl From<RecordError> for BindingError {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Sizing(error) => Self::Sizing(error),
            error => Self::Record(error),
        }
    }
}

impl From<BindingError> for PyErr {
    fn from(error: BindingError) -> Self {
        Python::attach(|py| to_python(py, &error).unwrap_or_else(|failure| failure))
    }
}

/// The error of an argument that fits no unsigned 64-bit number; others pass.
pub(crate) fn out_of_range(value: Borrowed<'_, '_, PyAny>, error: PyErr) -> PyErr {
    let py = value.py();
    if !error.is_instance_of::<PyOverflowError>(py) {
        return error;
    }
    let text = format!("expected a number in [0, 2**64), got {}", &*value);
    raised(py, "InvalidArgumentError", text, &PyDict::new(py)).unwrap_or_else(|failure| failure)
}

fn to_python(py: Python<'_>, error: &BindingError) -> PyResult<PyErr> {
    let attributes = attributes(py, error)?;
    raised(py, class_name(error), message(error.source()), &attributes)
}

fn raised(
    py: Python<'_>,
    class_name: &str,
    message: String,
    attributes: &Bound<'_, PyDict>,
) -> PyResult<PyErr> {
    let class = py.import("extkv.errors")?.getattr(class_name)?;
    let value = class.call((message,), Some(attributes))?;
    Ok(PyErr::from_value(value))
}

impl BindingError {
    fn source(&self) -> &(dyn std::error::Error + 'static) {
        match self {
            Self::Memory(error) => error,
            Self::Layout(error) => error,
            Self::Sizing(error) => error,
            Self::Record(error) => error,
            Self::Dtype(error) => error,
            Self::CacheOrder(error) => error,
            Self::Scheduler(error) | Self::Request(error) => error,
            Self::Decode(error) | Self::Message(error) => error,
            Self::Encode(error) => error,
            Self::Profile(error) => error,
            Self::Rows(error) => error,
            Self::Array(error) => error,
            Self::Stack(error) => error,
            Self::UnknownMessage(error) => error,
            Self::Transport(error) => error,
            Self::SchedulerArgument(error)
            | Self::RequestArgument(error)
            | Self::SpeculationArgument(error) => error,
            Self::VerifyPlan(error) => error,
            Self::Estimator(error) => error,
            Self::Calibration(error) => error,
            Self::Cost(error) => error,
        }
    }
}

/// The error and its causes, as one line.
fn message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text} ({source})");
        cause = source.source();
    }
    text
}

fn class_name(error: &BindingError) -> &'static str {
    match error {
        BindingError::Memory(error) => memory_class_name(error),
        BindingError::Layout(_) => "LayoutError",
        BindingError::Sizing(SizingError::TooSmallForOneRequest { .. }) => "CacheTooSmallError",
        BindingError::Sizing(_) => "SizingError",
        BindingError::Record(_) | BindingError::Dtype(_) | BindingError::CacheOrder(_) => {
            "InvalidArgumentError"
        }
        BindingError::Scheduler(error) => scheduler_class_name(error),
        BindingError::SchedulerArgument(_)
        | BindingError::Request(dspark_sched::Error::Corrupt { .. }) => "SchedulerError",
        BindingError::Request(_) | BindingError::RequestArgument(_) => "InvalidRequestError",
        BindingError::VerifyPlan(_)
        | BindingError::Estimator(_)
        | BindingError::SpeculationArgument(_) => "SpeculationError",
        BindingError::Calibration(_) => "CalibrationError",
        BindingError::Cost(_) => "CostTableError",
        BindingError::Decode(_) => "ProtocolError",
        BindingError::Message(_) => "InvalidMessageError",
        BindingError::Encode(_)
        | BindingError::Profile(_)
        | BindingError::Rows(_)
        | BindingError::Array(_)
        | BindingError::Stack(_)
        | BindingError::UnknownMessage(_) => "InvalidArgumentError",
        BindingError::Transport(error) => transport_class_name(error),
    }
}

fn transport_class_name(error: &TransportError) -> &'static str {
    match error {
        TransportError::Address { .. }
        | TransportError::Identity { .. }
        | TransportError::UnknownEngine { .. }
        | TransportError::UnknownClient { .. }
        | TransportError::DuplicateRequest { .. }
        | TransportError::Unencodable { .. } => "InvalidArgumentError",
        TransportError::Bind { .. } | TransportError::Thread(_) => "TransportError",
        TransportError::Closed => "TransportClosedError",
        TransportError::NotConnected { .. } => "NotConnectedError",
        TransportError::Stalled { .. } => "StalledPeerError",
        TransportError::TimedOut { .. } => "TransportTimeoutError",
        TransportError::Malformed { .. } => "MalformedMessageError",
        TransportError::EngineDead { .. } => "EngineDeadError",
    }
}

fn scheduler_class_name(error: &dspark_sched::Error) -> &'static str {
    match error {
        dspark_sched::Error::UnknownRequest { .. } => "UnknownRequestError",
        _ => "SchedulerError",
    }
}

fn memory_class_name(error: &Error) -> &'static str {
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

fn attributes<'py>(py: Python<'py>, error: &BindingError) -> PyResult<Bound<'py, PyDict>> {
    match error {
        BindingError::Memory(error) => memory_attributes(py, error),
        BindingError::Sizing(SizingError::TooSmallForOneRequest {
            needed,
            blocks,
            longest,
            ..
        }) => {
            [("longest_len", *longest), ("needed_blocks", needed.0), ("available_blocks", blocks.0)]
                .into_py_dict(py)
        }
        BindingError::Decode(error) | BindingError::Message(error) => {
            [("path", error.path())].into_py_dict(py)
        }
        _ => Ok(PyDict::new(py)),
    }
}

fn memory_attributes<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyDict>> {
    match error {
        Error::OutOfMemory { requested, available, .. } => {
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
