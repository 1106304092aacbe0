//! Devices and what they can do.

use std::sync::Arc;

use extkv_core::driver::{
    CudaOptions, Device, DeviceFacts, HostDriver, Rdma, Shareable, VmmDriver, registry,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::BindingResult;

/// A device that growable memory can live on. Opening one probes it.
#[pyclass(frozen, name = "Device", module = "extkv._extkv")]
pub(crate) struct PyDevice {
    driver: Arc<dyn VmmDriver>,
    facts: Option<DeviceFacts>,
}

impl PyDevice {
    pub(crate) fn driver(&self) -> Arc<dyn VmmDriver> {
        Arc::clone(&self.driver)
    }
}

#[pymethods]
impl PyDevice {
    /// Open host memory.
    #[staticmethod]
    #[pyo3(signature = (granularity=None))]
    fn host(granularity: Option<u64>) -> BindingResult<Self> {
        let driver = registry::host(granularity.unwrap_or(HostDriver::DEFAULT_GRANULARITY))?;
        Ok(Self { driver, facts: None })
    }

    /// Open a CUDA device.
    #[staticmethod]
    fn cuda(
        py: Python<'_>,
        ordinal: u32,
        shareable: ShareableArg,
        gpu_direct_rdma: RdmaArg,
    ) -> BindingResult<Self> {
        let options = CudaOptions { shareable: shareable.0, rdma: gpu_direct_rdma.0 };
        let driver = py.detach(|| registry::cuda(ordinal, options))?;
        Ok(Self { facts: Some(driver.facts().clone()), driver })
    }

    /// Name as torch prints it.
    #[getter]
    fn name(&self) -> String {
        self.driver.device().to_string()
    }

    /// Kind and index of the device as DLPack counts them.
    #[getter]
    fn dlpack_device(&self) -> (i32, i32) {
        crate::dlpack::device_of(self.driver.device())
    }

    /// Bytes per granule.
    #[getter]
    fn granularity(&self) -> u64 {
        self.driver.granularity()
    }

    /// Whether memory can be exported as a POSIX file descriptor.
    #[getter]
    fn posix_fd(&self) -> bool {
        self.driver.properties().posix_fd
    }

    /// Whether network cards may be given the memory.
    #[getter]
    fn gpu_direct_rdma(&self) -> bool {
        self.driver.properties().gpu_direct_rdma
    }

    /// Product name, None for the host.
    #[getter]
    fn product_name(&self) -> Option<&str> {
        self.facts.as_ref().map(|facts| facts.name.as_str())
    }

    /// Driver version, None for the host.
    #[getter]
    fn driver_version(&self) -> Option<&str> {
        self.facts.as_ref().map(|facts| facts.driver_version.as_str())
    }

    /// Library that the driver was loaded from, None for the host.
    #[getter]
    fn driver_library(&self) -> Option<&str> {
        self.facts.as_ref().map(|facts| facts.library.as_str())
    }

    /// Free and total bytes.
    fn memory_info(&self, py: Python<'_>) -> BindingResult<(u64, u64)> {
        let info = py.detach(|| self.driver.memory_info())?;
        Ok((info.free, info.total))
    }

    fn __repr__(&self) -> String {
        match self.driver.device() {
            Device::Host => "Device.host()".to_owned(),
            Device::Cuda { ordinal } => format!("Device.cuda({ordinal})"),
        }
    }
}

/// Number of CUDA devices; raises when CUDA cannot be used.
#[pyfunction]
pub(crate) fn cuda_device_count(py: Python<'_>) -> BindingResult<u32> {
    Ok(py.detach(registry::cuda_device_count)?)
}

/// Free and total bytes of the host budget.
#[pyfunction]
pub(crate) fn host_memory_info() -> (u64, u64) {
    let info = registry::host_budget().info();
    (info.free, info.total)
}

/// Set the host budget; None for this machine's memory.
#[pyfunction]
pub(crate) fn set_host_memory_budget(num_bytes: Option<u64>) {
    let machine = extkv_core::driver::HostBudget::machine_memory;
    registry::host_budget().set_limit(num_bytes.unwrap_or_else(machine));
}

struct ShareableArg(Shareable);

impl<'py> FromPyObject<'_, 'py> for ShareableArg {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<&str>()? {
            "auto" => Ok(Self(Shareable::Auto)),
            "posix_fd" => Ok(Self(Shareable::PosixFd)),
            "none" => Ok(Self(Shareable::None)),
            other => Err(unknown("shareable", other, "auto, posix_fd, none")),
        }
    }
}

struct RdmaArg(Rdma);

impl<'py> FromPyObject<'_, 'py> for RdmaArg {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<&str>()? {
            "auto" => Ok(Self(Rdma::Auto)),
            "on" => Ok(Self(Rdma::On)),
            "off" => Ok(Self(Rdma::Off)),
            other => Err(unknown("gpu_direct_rdma", other, "auto, on, off")),
        }
    }
}

fn unknown(name: &str, found: &str, known: &str) -> PyErr {
    PyValueError::new_err(format!("{name} must be one of {known}, got {found:?}"))
}
