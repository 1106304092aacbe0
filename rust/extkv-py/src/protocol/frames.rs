//! The frames of a message as Python gave them, and where in them the core's bytes lie.

use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

/// Frames that messages and arrays refer to. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Frames(Arc<Held>);

#[derive(Default)]
struct Held {
    objects: Vec<Py<PyBytes>>,
    bytes: Vec<Bytes>,
}

impl Frames {
    /// The frames as the core reads them.
    pub(crate) fn bytes(&self) -> &[Bytes] {
        &self.0.bytes
    }

    /// The object that holds `part`, and the offset in it; a copy if it lies in no frame.
    pub(crate) fn locate<'py>(
        &self,
        py: Python<'py>,
        part: &Bytes,
    ) -> (Bound<'py, PyBytes>, usize) {
        let address = part.as_ptr() as usize;
        for (object, frame) in self.0.objects.iter().zip(&self.0.bytes) {
            let offset = address.wrapping_sub(frame.as_ptr() as usize);
            if offset <= frame.len() && part.len() <= frame.len() - offset {
                return (object.bind(py).clone(), offset);
            }
        }
        (PyBytes::new(py, part), 0)
    }
}

fn frame_of<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(bytes.clone());
    }
    let is_buffer = value.cast::<PyByteArray>().is_ok()
        || value.cast::<PyMemoryView>().is_ok()
        || value.hasattr("bytes")?;
    if !is_buffer {
        let found = value.get_type().name()?;
        let text =
            format!("a frame must be bytes, bytearray, memoryview or zmq.Frame, not {found}");
        return Err(PyTypeError::new_err(text));
    }
    Ok(value.py().get_type::<PyBytes>().call1((value,))?.cast_into()?)
}

impl<'py> FromPyObject<'_, 'py> for Frames {
    type Error = PyErr;

    /// One frame, or a sequence of frames. `bytes` are used in place, other buffers copied.
    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let objects = if value.cast::<PyBytes>().is_ok()
            || value.cast::<PyByteArray>().is_ok()
            || value.cast::<PyMemoryView>().is_ok()
        {
            vec![frame_of(&value)?]
        } else {
            let frames = value.try_iter().map_err(|_| {
                PyTypeError::new_err("frames must be bytes or a sequence of bytes-like objects")
            })?;
            frames.map(|frame| frame_of(&frame?)).collect::<PyResult<Vec<_>>>()?
        };
        let bytes = objects
            .iter()
            .map(|object| Bytes::from_owner(PyBackedBytes::from(object.clone())))
            .collect();
        let objects = objects.into_iter().map(Bound::unbind).collect();
        Ok(Self(Arc::new(Held { objects, bytes })))
    }
}
