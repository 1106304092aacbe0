//! Growable buffers.

use std::sync::{Mutex, PoisonError};

use extkv_core::Error;
use extkv_core::driver::{DriverCall, Fence};
use extkv_core::memory::{
    BufferOptions, BufferStats, ChunkPolicy, ChunkSize, GrowableBuffer, Growth, PreparedGrowth,
    SegmentLayout,
};
use extkv_core::units::tensor_bytes;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::device::PyDevice;
use crate::dlpack::{self, DataType};
use crate::error::BindingResult;

/// One reservation with its segments; sizes in units of the segments.
#[pyclass(frozen, name = "Buffer", module = "extkv._extkv")]
pub(crate) struct PyBuffer {
    inner: GrowableBuffer,
}

impl PyBuffer {
    fn open(
        py: Python<'_>,
        device: &PyDevice,
        layout: SegmentLayout,
        max_chunk_bytes: Option<u64>,
        is_exact: bool,
    ) -> BindingResult<Self> {
        let size = max_chunk_bytes.map_or(ChunkSize::Automatic, ChunkSize::AtMost);
        let growth = if is_exact { Growth::Exact } else { Growth::Geometric };
        let policy = ChunkPolicy { size, growth };
        let driver = device.driver();
        let inner = py.detach(|| GrowableBuffer::new(driver, layout, BufferOptions { policy }))?;
        Ok(Self { inner })
    }
}

#[pymethods]
impl PyBuffer {
    /// Reserve equal segments, sized in bytes per segment.
    #[staticmethod]
    #[pyo3(signature = (device, num_bytes, num_segments, *, max_chunk_bytes=None, is_exact=false))]
    fn equal(
        py: Python<'_>,
        device: &PyDevice,
        num_bytes: u64,
        num_segments: u64,
        max_chunk_bytes: Option<u64>,
        is_exact: bool,
    ) -> BindingResult<Self> {
        let layout = SegmentLayout::equal(num_bytes, num_segments)?;
        Self::open(py, device, layout, max_chunk_bytes, is_exact)
    }

    /// Reserve segments of (capacity bytes, bytes per unit), sized in units.
    #[staticmethod]
    #[pyo3(signature = (device, parts, *, max_chunk_bytes=None, is_exact=false))]
    fn unequal(
        py: Python<'_>,
        device: &PyDevice,
        parts: Vec<(u64, u64)>,
        max_chunk_bytes: Option<u64>,
        is_exact: bool,
    ) -> BindingResult<Self> {
        let layout = SegmentLayout::unequal(&parts)?;
        Self::open(py, device, layout, max_chunk_bytes, is_exact)
    }

    /// Address of the first byte.
    #[getter]
    fn base(&self) -> u64 {
        self.inner.base()
    }

    /// Bytes of address space.
    #[getter]
    fn reserved_bytes(&self) -> u64 {
        self.inner.reserved_bytes()
    }

    /// Bytes of all segments together.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.inner.layout().total()
    }

    /// Bytes per granule.
    #[getter]
    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    /// Largest size.
    #[getter]
    fn max_size(&self) -> u64 {
        self.inner.layout().max_size()
    }

    /// Committed size.
    fn size(&self, py: Python<'_>) -> BindingResult<u64> {
        Ok(py.detach(|| self.inner.size())?)
    }

    /// Whether the buffer was freed.
    fn is_freed(&self, py: Python<'_>) -> BindingResult<bool> {
        Ok(py.detach(|| self.inner.is_freed())?)
    }

    /// Grow to a size, all or nothing.
    fn grow_to(&self, py: Python<'_>, size: u64, zero_new: bool) -> BindingResult<()> {
        Ok(py.detach(|| self.inner.grow_to(size, zero_new))?)
    }

    /// Grow by a number of units and return the new size.
    fn grow_by(&self, py: Python<'_>, units: u64, zero_new: bool) -> BindingResult<u64> {
        Ok(py.detach(|| self.inner.grow_by(units, zero_new))?)
    }

    /// Export bytes as a DLPack capsule that keeps them alive.
    fn dlpack<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        shape: Vec<u64>,
        dtype: DataType,
        is_committed: bool,
        is_versioned: bool,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let length = tensor_bytes(&shape, dtype.bits()).ok_or_else(|| {
            crate::error::BindingError::from(Error::SizeOverflow { what: "the view's size" })
        })?;
        let view = py
            .detach(|| match is_committed {
                true => self.inner.view_committed(offset, length),
                false => self.inner.view_capacity(offset, length),
            })
            .map_err(crate::error::BindingError::from)?;
        dlpack::export(py, view, &shape, dtype, is_versioned)
    }

    /// Number of physical handles behind a byte range.
    fn num_handles_in(&self, offset: u64, length: u64) -> BindingResult<usize> {
        Ok(self.inner.num_handles_in(offset, length)?)
    }

    /// Free, now or with the last view.
    fn free(&self, py: Python<'_>) -> BindingResult<()> {
        py.detach(|| self.inner.free())?;
        Ok(())
    }

    /// Free now, or raise if views live.
    fn free_strict(&self, py: Python<'_>) -> BindingResult<()> {
        Ok(py.detach(|| self.inner.free_strict())?)
    }

    /// State and costs.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.inner.stats()).map_err(crate::error::BindingError::from)?;
        stats_dict(py, &stats)
    }
}

/// Grow several buffers as one.
#[pyfunction]
pub(crate) fn grow_together(
    py: Python<'_>,
    buffers: Vec<Py<PyBuffer>>,
    sizes: Vec<u64>,
    zero_new: bool,
) -> BindingResult<()> {
    let targets: Vec<_> = buffers.iter().map(|b| &b.get().inner).zip(sizes).collect();
    Ok(py.detach(|| extkv_core::memory::grow_together(&targets, zero_new))?)
}

/// Shrink several buffers as one after the streams (None: the device) and return bytes given back.
#[pyfunction]
pub(crate) fn shrink_together(
    py: Python<'_>,
    buffers: Vec<Py<PyBuffer>>,
    sizes: Vec<u64>,
    streams: Option<Vec<u64>>,
) -> BindingResult<u64> {
    let targets: Vec<_> = buffers.iter().map(|b| &b.get().inner).zip(sizes).collect();
    let fence = streams.as_deref().map_or(Fence::Device, Fence::Streams);
    Ok(py.detach(|| extkv_core::memory::shrink_together(&targets, fence))?)
}

/// Physical memory created for a growth that is not mapped yet.
#[pyclass(frozen, name = "PreparedGrowth", module = "extkv._extkv")]
pub(crate) struct PyPreparedGrowth {
    inner: Mutex<Option<PreparedGrowth>>,
}

impl PyPreparedGrowth {
    fn take(&self) -> Option<PreparedGrowth> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl PyPreparedGrowth {
    /// Map, zero and publish. Works once.
    fn commit(&self, py: Python<'_>, zero_new: bool) -> BindingResult<()> {
        let prepared = self.take().ok_or(Error::StalePrepared)?;
        Ok(py.detach(|| prepared.commit(zero_new))?)
    }

    /// Release the memory. Does nothing the second time.
    fn release(&self, py: Python<'_>) {
        let prepared = self.take();
        py.detach(|| drop(prepared));
    }
}

/// Create the physical memory of a growth and map none of it.
#[pyfunction]
pub(crate) fn prepare_together(
    py: Python<'_>,
    buffers: Vec<Py<PyBuffer>>,
    sizes: Vec<u64>,
) -> BindingResult<PyPreparedGrowth> {
    let targets: Vec<_> = buffers.iter().map(|b| &b.get().inner).zip(sizes).collect();
    let prepared = py.detach(|| extkv_core::memory::prepare_together(&targets))?;
    Ok(PyPreparedGrowth { inner: Mutex::new(Some(prepared)) })
}

fn stats_dict<'py>(py: Python<'py>, stats: &BufferStats) -> PyResult<Bound<'py, PyDict>> {
    let calls = PyDict::new(py);
    for call in DriverCall::ALL {
        let of_call = stats.driver_calls[call.index()];
        calls.set_item(call.name(), (of_call.count, of_call.total_ns, of_call.max_ns))?;
    }
    let dict = PyDict::new(py);
    dict.set_item("reserved_bytes", stats.reserved_bytes)?;
    dict.set_item("committed_bytes", stats.committed_bytes)?;
    dict.set_item("logical_bytes", stats.logical_bytes)?;
    dict.set_item("rounding_bytes", stats.rounding_bytes)?;
    dict.set_item("num_handles", stats.num_handles)?;
    dict.set_item("num_views", stats.num_views)?;
    dict.set_item("is_freed", stats.is_freed)?;
    dict.set_item("has_deferred_free", stats.has_deferred_free)?;
    dict.set_item("granularity", stats.granularity)?;
    dict.set_item("posix_fd", stats.properties.posix_fd)?;
    dict.set_item("gpu_direct_rdma", stats.properties.gpu_direct_rdma)?;
    dict.set_item("driver_calls", calls)?;
    Ok(dict)
}
