//! Python objects as the source of messages.

use std::any::Any;

use bytes::Bytes;
use extkv_core::protocol::{
    ArraySource, DecodeError, DecodeProblem, DecodeResult, Source, TokenIds, Untyped,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple,
};

use super::output::PyEngineCoreOutput;
use super::part::Imported;
use super::request::PySamplingParams;
use super::untyped::{is_sequence, value_of};

static ARRAY_PARTS: Imported = Imported::new("extkv.protocol.arrays", "array_parts");
static TOKEN_BYTES: Imported = Imported::new("extkv.protocol.arrays", "token_bytes");

/// A Python object that describes a value of a message.
pub(crate) struct PySource<'py> {
    value: Bound<'py, PyAny>,
    /// Whether it is a constructor's keyword arguments.
    is_arguments: bool,
}

impl<'py> PySource<'py> {
    pub(crate) fn new(value: Bound<'py, PyAny>) -> Self {
        Self { value, is_arguments: false }
    }

    pub(crate) fn arguments(arguments: Bound<'py, PyDict>) -> Self {
        Self { value: arguments.into_any(), is_arguments: true }
    }

    /// The failure of a Python call as a problem of this value.
    fn failed(&self, expected: &'static str, error: &PyErr) -> DecodeError {
        let found = format!("{} ({})", self.type_name(), error.value(self.value.py()));
        DecodeProblem::NotA { expected, found }.into()
    }

    fn has_fields(&self) -> bool {
        let value = &self.value;
        !(value.is_none()
            || self.is_text()
            || self.is_bytes()
            || self.is_map()
            || value.is_instance_of::<PyInt>()
            || value.is_instance_of::<PyFloat>()
            || is_sequence(value))
    }
}

impl Source for PySource<'_> {
    fn is_nil(&self) -> bool {
        self.value.is_none()
    }

    fn is_text(&self) -> bool {
        self.value.is_instance_of::<PyString>()
    }

    fn is_int(&self) -> bool {
        self.value.is_instance_of::<PyInt>() && !self.value.is_instance_of::<PyBool>()
    }

    fn is_float(&self) -> bool {
        self.value.is_instance_of::<PyFloat>()
    }

    fn is_bytes(&self) -> bool {
        self.value.is_instance_of::<PyBytes>() || self.value.is_instance_of::<PyByteArray>()
    }

    fn is_map(&self) -> bool {
        self.value.is_instance_of::<PyDict>()
    }

    fn is_list(&self) -> bool {
        self.value.is_instance_of::<PyList>() || self.value.is_instance_of::<PyTuple>()
    }

    fn type_name(&self) -> String {
        self.value
            .get_type()
            .name()
            .map_or_else(|_| "an object".to_owned(), |name| name.to_string())
    }

    fn bool(&self) -> DecodeResult<bool> {
        self.value.cast::<PyBool>().map(|value| value.is_true()).map_err(|_| self.is_not("a bool"))
    }

    fn int(&self) -> DecodeResult<i128> {
        if self.value.is_instance_of::<PyBool>() || self.is_float() || self.is_text() {
            return Err(self.is_not("an int"));
        }
        if let Ok(value) = self.value.extract::<i64>() {
            return Ok(i128::from(value));
        }
        match self.value.extract::<u64>() {
            Ok(value) => Ok(i128::from(value)),
            Err(_) if self.is_int() => Err(self.is_not("an int in [-2**63, 2**64)")),
            Err(_) => Err(self.is_not("an int")),
        }
    }

    fn float(&self) -> DecodeResult<f64> {
        if self.is_text() || self.value.is_instance_of::<PyBool>() {
            return Err(self.is_not("a float"));
        }
        self.value.extract().map_err(|_| self.is_not("a float"))
    }

    fn text(&self) -> DecodeResult<String> {
        let text = self.value.cast::<PyString>().map_err(|_| self.is_not("a str"))?;
        text.to_cow().map(|text| text.into_owned()).map_err(|_| DecodeProblem::InvalidUtf8.into())
    }

    fn bytes(&self) -> DecodeResult<Vec<u8>> {
        self.value.extract().map_err(|_| self.is_not("bytes"))
    }

    fn tokens(&self) -> DecodeResult<TokenIds> {
        let expected = "a list or an array of ints in [0, 2**32)";
        if self.is_list() {
            let ids = self.value.extract::<Vec<u32>>();
            return ids.map(TokenIds::from).map_err(|error| self.failed(expected, &error));
        }
        let bytes = TOKEN_BYTES
            .get(self.value.py())
            .and_then(|convert| convert.call1((&self.value,)))
            .map_err(|error| self.failed(expected, &error))?;
        let bytes = bytes.cast::<PyBytes>().map_err(|_| self.is_not(expected))?;
        let (ids, _) = bytes.as_bytes().as_chunks();
        Ok(ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
    }

    fn array(&self, is_torch: bool) -> DecodeResult<ArraySource> {
        let expected = "an array";
        let failed = |error: PyErr| self.failed(expected, &error);
        let convert = ARRAY_PARTS.get(self.value.py()).map_err(failed)?;
        let parts = convert.call1((&self.value, is_torch)).map_err(failed)?;
        let (dtype, shape, data): (String, Vec<u64>, PyBackedBytes) =
            parts.extract().map_err(failed)?;
        Ok((dtype, shape, Bytes::from_owner(data)))
    }

    fn untyped(&self) -> DecodeResult<Untyped> {
        let expected = "a value of plain types";
        let value = value_of(&self.value, 0).map_err(|error| self.failed(expected, &error))?;
        Untyped::from_value(&value)
            .map_err(|error| DecodeProblem::NotA { expected, found: error.to_string() }.into())
    }

    fn items(&self) -> DecodeResult<Vec<Self>> {
        if !is_sequence(&self.value) && !self.value.hasattr("tolist").unwrap_or(false) {
            return Err(self.is_not("a list"));
        }
        let items = self.value.try_iter().map_err(|_| self.is_not("a list"))?;
        let all = items.map(|item| item.map(Self::new)).collect::<PyResult<_>>();
        all.map_err(|error| self.failed("a list", &error))
    }

    fn entries(&self) -> DecodeResult<Vec<(Self, Self)>> {
        let dict = self.value.cast::<PyDict>().map_err(|_| self.is_not("a dict"))?;
        Ok(dict.iter().map(|(key, value)| (Self::new(key), Self::new(value))).collect())
    }

    fn field(&self, name: &'static str) -> DecodeResult<Option<Self>> {
        if self.is_arguments {
            let dict = self.value.cast::<PyDict>().map_err(|_| self.is_not("arguments"))?;
            let found = dict.get_item(name).map_err(|error| self.failed("arguments", &error))?;
            return Ok(found.map(Self::new));
        }
        if !self.has_fields() {
            return Err(self.is_not("a message"));
        }
        let found = self.value.getattr_opt(name);
        Ok(found.map_err(|error| self.failed("a message", &error))?.map(Self::new))
    }

    fn native<T: Clone + 'static>(&self) -> Option<T> {
        if let Ok(params) = self.value.cast::<PySamplingParams>() {
            return (params.get().record() as &dyn Any).downcast_ref().cloned();
        }
        let output = self.value.cast::<PyEngineCoreOutput>().ok()?.get().record()?;
        (&output as &dyn Any).downcast_ref().cloned()
    }
}
