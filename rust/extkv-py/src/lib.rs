//! The Python module `extkv._extkv`: parse, detach, call the core, wrap. No logic, no arithmetic.

mod device;
mod dlpack;
mod error;
mod memory;

use pyo3::prelude::*;

/// Native part of extkv.
#[pymodule]
mod _extkv {
    #[pymodule_export]
    use super::device::{PyDevice, cuda_device_count, host_memory_info, set_host_memory_budget};
    #[pymodule_export]
    use super::memory::{PyBuffer, grow_together, shrink_together};
}
