//! Untyped values as Python objects, and back.

use extkv_core::protocol::Untyped;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet, PyString,
    PyTuple,
};
use rmpv::Value;

/// Nesting that is followed; the core allows less.
const MAX_DEPTH: usize = 100;

/// The Python object of a value.
pub(super) fn to_python<'py>(py: Python<'py>, value: &Untyped) -> PyResult<Bound<'py, PyAny>> {
    object_of(py, &value.to_value())
}

fn object_of<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Nil => py.None().into_bound(py),
        Value::Boolean(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Integer(value) => match (value.as_u64(), value.as_i64()) {
            (Some(value), _) => value.into_pyobject(py)?.into_any(),
            (None, value) => value.into_pyobject(py)?.into_any(),
        },
        Value::F32(value) => PyFloat::new(py, f64::from(*value)).into_any(),
        Value::F64(value) => PyFloat::new(py, *value).into_any(),
        Value::String(value) => PyString::new(py, value.as_str().unwrap_or_default()).into_any(),
        Value::Binary(data) | Value::Ext(_, data) => PyBytes::new(py, data).into_any(),
        Value::Array(items) => {
            let items =
                items.iter().map(|item| object_of(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Map(entries) => {
            let dict = PyDict::new(py);
            for (key, value) in entries {
                dict.set_item(object_of(py, key)?, object_of(py, value)?)?;
            }
            dict.into_any()
        }
    })
}

/// The value of a Python object.
pub(super) fn value_of(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth > MAX_DEPTH {
        return Err(PyTypeError::new_err("the value nests too deep, or contains itself"));
    }
    if object.is_none() {
        return Ok(Value::Nil);
    }
    if let Ok(value) = object.cast::<PyBool>() {
        return Ok(Value::Boolean(value.is_true()));
    }
    if object.is_instance_of::<PyInt>() {
        return int_value(object);
    }
    if let Ok(value) = object.cast::<PyFloat>() {
        return Ok(Value::F64(value.value()));
    }
    if let Ok(value) = object.cast::<PyString>() {
        return Ok(Value::from(value.to_cow()?.into_owned()));
    }
    if let Ok(value) = object.cast::<PyBytes>() {
        return Ok(Value::Binary(value.as_bytes().to_vec()));
    }
    if let Ok(value) = object.cast::<PyByteArray>() {
        return Ok(Value::Binary(value.to_vec()));
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let entry = |(key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            Ok((value_of(&key, depth + 1)?, value_of(&value, depth + 1)?))
        };
        return dict.iter().map(entry).collect::<PyResult<Vec<_>>>().map(Value::Map);
    }
    if is_sequence(object) {
        let item = |item: PyResult<Bound<'_, PyAny>>| value_of(&item?, depth + 1);
        return object.try_iter()?.map(item).collect::<PyResult<Vec<_>>>().map(Value::Array);
    }
    if object.hasattr("__index__")? {
        return int_value(&object.call_method0("__index__")?);
    }
    Err(PyTypeError::new_err(format!("a {} cannot be sent", object.get_type().name()?)))
}

/// Whether an object is a list, a tuple or a set.
pub(super) fn is_sequence(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>()
        || object.is_instance_of::<PyTuple>()
        || object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
}

fn int_value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(value) = object.extract::<u64>() {
        return Ok(Value::from(value));
    }
    if let Ok(value) = object.extract::<i64>() {
        return Ok(Value::from(value));
    }
    Err(PyOverflowError::new_err(format!("{object} is not in [-2**63, 2**64)")))
}
