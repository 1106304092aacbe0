//! Parts of messages as Python objects: frozen classes, and arrays that lie in the frames.

use extkv_core::protocol::{ArrayPart, Part, Record};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyBytes, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyMemoryView, PySlice, PyString,
    PyTuple,
};

use super::frames::Frames;
use super::untyped;

/// Makes Python objects of parts of one message.
pub(crate) struct ToPython<'a, 'py> {
    py: Python<'py>,
    frames: &'a Frames,
}

/// An attribute of a Python module, looked up once.
pub(crate) struct Imported {
    module: &'static str,
    name: &'static str,
    object: PyOnceLock<Py<PyAny>>,
}

impl Imported {
    pub(crate) const fn new(module: &'static str, name: &'static str) -> Self {
        Self { module, name, object: PyOnceLock::new() }
    }

    pub(crate) fn get<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let load = || Ok::<_, PyErr>(py.import(self.module)?.getattr(self.name)?.unbind());
        Ok(self.object.get_or_try_init(py, load)?.bind(py).clone())
    }
}

static CLASSES: Imported = Imported::new("extkv.protocol.messages", "CLASSES");
static TENSOR: Imported = Imported::new("extkv.protocol.arrays", "Tensor");
static NDARRAY: Imported = Imported::new("numpy", "ndarray");
static FROMBUFFER: Imported = Imported::new("numpy", "frombuffer");

/// A read-only numpy array in one new buffer.
pub(crate) fn new_array<'py, const N: usize, T>(
    py: Python<'py>,
    dtype: &str,
    items: impl ExactSizeIterator<Item = T>,
    bytes_of: impl Fn(T) -> [u8; N],
) -> PyResult<Bound<'py, PyAny>> {
    let buffer = PyBytes::new_with(py, items.len() * N, |buffer| {
        let (places, _) = buffer.as_chunks_mut();
        places.iter_mut().zip(items).for_each(|(place, item)| *place = bytes_of(item));
        Ok(())
    })?;
    FROMBUFFER.get(py)?.call1((buffer, dtype))
}

impl<'a, 'py> ToPython<'a, 'py> {
    pub(crate) fn new(py: Python<'py>, frames: &'a Frames) -> Self {
        Self { py, frames }
    }

    /// The object of a part.
    pub(crate) fn convert(&self, part: &Part<'_>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match part {
            Part::Nil => py.None().into_bound(py),
            Part::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
            Part::Int(value) => self.int(*value)?.into_any(),
            Part::Float(value) => PyFloat::new(py, *value).into_any(),
            Part::Text(value) => PyString::new(py, value).into_any(),
            Part::Bytes(value) => PyBytes::new(py, value).into_any(),
            Part::Tokens(ids) => {
                new_array(py, "<i8", ids.iter(), |id| i64::from(*id).to_le_bytes())?
            }
            Part::Member { enumeration, number } => self.class(enumeration)?.call1((*number,))?,
            Part::Numpy(array) => self.numpy(array)?,
            Part::Torch(array) => self.tensor(array)?,
            Part::Untyped(value) => untyped::to_python(py, value)?,
            Part::List(items) => PyList::new(py, self.all(items)?)?.into_any(),
            Part::Set(items) => PyFrozenSet::new(py, self.all(items)?)?.into_any(),
            Part::Map(entries) => {
                let dict = PyDict::new(py);
                for (key, value) in entries {
                    dict.set_item(self.convert(key)?, self.convert(value)?)?;
                }
                dict.into_any()
            }
            Part::Record(record) => self.record(*record)?,
        })
    }

    fn int(&self, value: i128) -> PyResult<Bound<'py, PyInt>> {
        if let Ok(value) = i64::try_from(value) {
            return Ok(value.into_pyobject(self.py)?);
        }
        Ok(u64::try_from(value).unwrap_or(u64::MAX).into_pyobject(self.py)?)
    }

    fn all(&self, items: &[Part<'_>]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        items.iter().map(|item| self.convert(item)).collect()
    }

    fn class(&self, name: &str) -> PyResult<Bound<'py, PyAny>> {
        CLASSES.get(self.py)?.get_item(name)
    }

    fn record(&self, record: &dyn Record) -> PyResult<Bound<'py, PyAny>> {
        let fields = PyDict::new(self.py);
        for (name, part) in record.parts() {
            fields.set_item(name, self.convert(&part)?)?;
        }
        if record.name() == "Slice" {
            let all = ["start", "stop", "step"].map(|name| fields.get_item(name));
            let [start, stop, step] = all;
            return self.py.get_type::<PySlice>().call1((start?, stop?, step?));
        }
        self.class(record.name())?.call((), Some(&fields))
    }

    /// A numpy array over the frame that holds its data.
    pub(crate) fn numpy(&self, array: &ArrayPart<'_>) -> PyResult<Bound<'py, PyAny>> {
        let (frame, offset) = self.frames.locate(self.py, array.data);
        let shape = PyTuple::new(self.py, array.shape)?;
        NDARRAY.get(self.py)?.call1((shape, array.dtype, frame, offset))
    }

    fn tensor(&self, array: &ArrayPart<'_>) -> PyResult<Bound<'py, PyAny>> {
        let (frame, offset) = self.frames.locate(self.py, array.data);
        let whole = PyMemoryView::from(frame.as_any())?;
        let end = offset + array.data.len();
        let data = whole.get_item(self.py.get_type::<PySlice>().call1((offset, end))?)?;
        let shape = PyTuple::new(self.py, array.shape)?;
        TENSOR.get(self.py)?.call1((array.dtype, shape, data))
    }
}
