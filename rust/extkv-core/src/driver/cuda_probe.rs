//! What must hold before a CUDA driver can be opened, and what to ask of its memory.

use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use super::cuda_library::{Code, CudaLibrary};
use super::{AllocationProperties, Device, Shareable};
use crate::error::ProbeError;

const NOT_INITIALIZED: Code = sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as Code;
const STUB_LIBRARY: Code = sys::CUresult::CUDA_ERROR_STUB_LIBRARY as Code;
const NO_DEVICE: Code = sys::CUresult::CUDA_ERROR_NO_DEVICE as Code;

/// The oldest driver version supported, as CUDA numbers it (12000 is 12.0).
const MINIMUM_VERSION: i32 = 12_000;

/// Process in which CUDA was first started through this crate; 0 for none yet.
static STARTED_IN: AtomicU32 = AtomicU32::new(0);

/// Whether physical memory can be given to network cards (GPUDirect RDMA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Rdma {
    /// Where the device can.
    #[default]
    Auto,
    /// Yes, or an error.
    On,
    /// No.
    Off,
}

/// What to ask of physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CudaOptions {
    /// Export to other processes.
    pub shareable: Shareable,
    /// Registration with network cards.
    pub rdma: Rdma,
}

/// What the probe found out about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Product name.
    pub name: String,
    /// Driver version as `major.minor`.
    pub driver_version: String,
    /// Library the driver was loaded from.
    pub library: String,
}

/// Whether CUDA was started in this process, and not in one that it was forked from.
pub(super) fn is_started_here() -> bool {
    STARTED_IN.load(Ordering::SeqCst) == std::process::id()
}

/// Starts the driver (once a process) and checks its version.
pub(super) fn start(library: &CudaLibrary) -> Result<i32, ProbeError> {
    let child = std::process::id();
    let parent = STARTED_IN.load(Ordering::SeqCst);
    if parent != 0 && parent != child {
        return Err(ProbeError::Forked { parent, child });
    }
    match library.init() {
        0 => {}
        STUB_LIBRARY => {
            return Err(ProbeError::StubLibrary { library: library.name().to_owned() });
        }
        NO_DEVICE => {
            return Err(ProbeError::NoSuchDevice { ordinal: 0, count: 0 });
        }
        // What a fork of a process that started CUDA itself (through torch, say) gets.
        NOT_INITIALIZED => {
            let parent = std::os::unix::process::parent_id();
            return Err(ProbeError::Forked { parent, child });
        }
        code => return Err(init_failed(library, code)),
    }
    let version = library.driver_version().map_err(|code| init_failed(library, code))?;
    if version < MINIMUM_VERSION {
        return Err(ProbeError::DriverTooOld {
            found: version_text(version),
            minimum: version_text(MINIMUM_VERSION),
        });
    }
    STARTED_IN.store(child, Ordering::SeqCst);
    Ok(version)
}

/// The allocation properties to try, best first.
pub(super) fn property_candidates(
    options: CudaOptions,
    can_export: bool,
    can_rdma: bool,
    ordinal: u32,
) -> Result<Vec<AllocationProperties>, ProbeError> {
    let unsupported = |property| {
        let device = Device::Cuda { ordinal };
        Err(ProbeError::PropertyUnsupported { device, property })
    };
    let exports: &[bool] = match options.shareable {
        Shareable::PosixFd if !can_export => {
            return unsupported("a POSIX file descriptor handle");
        }
        Shareable::PosixFd => &[true],
        Shareable::Auto if can_export => &[true, false],
        Shareable::Auto | Shareable::None => &[false],
    };
    let rdmas: &[bool] = match options.rdma {
        Rdma::On if !can_rdma => return unsupported("GPUDirect RDMA capability"),
        Rdma::On => &[true],
        Rdma::Auto if can_rdma => &[true, false],
        Rdma::Auto | Rdma::Off => &[false],
    };
    let pairs = exports.iter().flat_map(|posix_fd| {
        rdmas.iter().map(|gpu_direct_rdma| AllocationProperties {
            posix_fd: *posix_fd,
            gpu_direct_rdma: *gpu_direct_rdma,
        })
    });
    Ok(pairs.collect())
}

pub(super) fn init_failed(library: &CudaLibrary, code: Code) -> ProbeError {
    ProbeError::InitFailed { code: code.into(), name: library.error_name(code) }
}

pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
