//! Python objects and msgpack values, both ways, for small messages without a class of their own.

use bytes::Bytes;
use extkv_core::protocol::{Profile, Wire, decode, encode};
use extkv_core::transport::TransportError;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use rmpv::Value;

use crate::error::BindingError;

/// Deepest nesting that is turned into Python objects or back.
const MAX_DEPTH: usize = 100;

/// A message as Python objects.
pub(super) fn to_python<'py, T: Wire>(
    py: Python<'py>,
    what: &'static str,
    message: &T,
) -> PyResult<Bound<'py, PyAny>> {
    let frames = encode(message, Profile::V0_33)
        .map_err(|error| TransportError::Unencodable { what, reason: error.to_string() })
        .map_err(BindingError::from)?;
    let value = frames.first().and_then(|frame| rmpv::decode::read_value(&mut &frame[..]).ok());
    value_to_python(py, &value.unwrap_or(Value::Nil))
}

/// A message from Python objects.
pub(super) fn from_python<T: Wire>(
    what: &'static str,
    object: &Bound<'_, PyAny>,
    profile: Profile,
) -> PyResult<T> {
    let frames = [msgpack(object)?];
    let decoded = decode::<T>(&frames, profile)
        .map_err(|error| TransportError::Malformed { what, reason: error.to_string() })
        .map_err(BindingError::from)?;
    Ok(decoded.message)
}

/// A Python object as msgpack.
pub(super) fn msgpack(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    let value = value_from_python(object, 0)?;
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &value)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(bytes.into())
}

/// A msgpack value as a Python object; raw array data becomes bytes.
pub(super) fn value_to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Nil => py.None().into_bound(py),
        Value::Boolean(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Integer(value) => match (value.as_u64(), value.as_i64()) {
            (Some(value), _) => value.into_pyobject(py)?.into_any(),
            (_, value) => value.unwrap_or_default().into_pyobject(py)?.into_any(),
        },
        Value::F32(value) => PyFloat::new(py, f64::from(*value)).into_any(),
        Value::F64(value) => PyFloat::new(py, *value).into_any(),
        Value::String(value) => {
            PyString::new(py, &String::from_utf8_lossy(value.as_bytes())).into_any()
        }
        Value::Binary(value) | Value::Ext(_, value) => PyBytes::new(py, value).into_any(),
        Value::Array(values) => {
            let items: PyResult<Vec<_>> =
                values.iter().map(|value| value_to_python(py, value)).collect();
            PyList::new(py, items?)?.into_any()
        }
        Value::Map(entries) => {
            let dict = PyDict::new(py);
            for (key, value) in entries {
                dict.set_item(value_to_python(py, key)?, value_to_python(py, value)?)?;
            }
            dict.into_any()
        }
    })
}

fn value_from_python(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth > MAX_DEPTH {
        return Err(PyValueError::new_err(format!("objects nested deeper than {MAX_DEPTH}")));
    }
    let inner = |object: Bound<'_, PyAny>| value_from_python(&object, depth + 1);
    if object.is_none() {
        Ok(Value::Nil)
    } else if let Ok(value) = object.cast::<PyBool>() {
        Ok(Value::Boolean(value.is_true()))
    } else if object.is_instance_of::<PyInt>() {
        match object.extract::<i64>() {
            Ok(value) => Ok(value.into()),
            Err(_) => Ok(object.extract::<u64>()?.into()),
        }
    } else if object.is_instance_of::<PyFloat>() {
        Ok(Value::F64(object.extract()?))
    } else if let Ok(value) = object.cast::<PyString>() {
        Ok(value.to_cow()?.as_ref().into())
    } else if let Ok(value) = object.cast::<PyBytes>() {
        Ok(value.as_bytes().into())
    } else if let Ok(list) = object.cast::<PyList>() {
        Ok(Value::Array(list.iter().map(inner).collect::<PyResult<_>>()?))
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        Ok(Value::Array(tuple.iter().map(inner).collect::<PyResult<_>>()?))
    } else if let Ok(dict) = object.cast::<PyDict>() {
        let entries = dict.iter().map(|(key, value)| Ok((inner(key)?, inner(value)?)));
        Ok(Value::Map(entries.collect::<PyResult<_>>()?))
    } else {
        let name = object.get_type().name()?;
        Err(PyTypeError::new_err(format!("a {name} has no form on the wire")))
    }
}

/// Python's frames of a message.
pub(super) fn frames_to_python(py: Python<'_>, frames: &[Bytes]) -> Vec<Py<PyBytes>> {
    frames.iter().map(|frame| PyBytes::new(py, frame).unbind()).collect()
}
