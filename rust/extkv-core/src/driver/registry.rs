//! The drivers of this process, opened once each.
//!
//! In a fork of the process that opened them the cached drivers are not used: the host gets a new
//! driver each time, and CUDA refuses.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{CudaDriver, CudaLibrary, CudaOptions, HostBudget, HostDriver};
use crate::error::ProbeError;

/// Environment variable with the path of the CUDA driver library to use instead of the usual one.
pub const LIBRARY_VARIABLE: &str = "EXTKV_LIBCUDA";

#[derive(Debug, Default)]
struct Drivers {
    host: HashMap<u64, Arc<HostDriver>>,
    cuda: HashMap<(u32, CudaOptions), Arc<CudaDriver>>,
}

static DRIVERS: LazyLock<Mutex<Drivers>> = LazyLock::new(Mutex::default);
static OWNER: AtomicU32 = AtomicU32::new(0);
static HOST_BUDGET: LazyLock<Arc<HostBudget>> =
    LazyLock::new(|| Arc::new(HostBudget::new(HostBudget::machine_memory())));
static LIBRARY: OnceLock<Result<Arc<CudaLibrary>, ProbeError>> = OnceLock::new();

/// The cache, unless this process is a fork: there its lock may be held by nobody.
fn drivers() -> Option<MutexGuard<'static, Drivers>> {
    let pid = std::process::id();
    match OWNER.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => {}
        Err(owner) if owner == pid => {}
        Err(_) => return None,
    }
    Some(DRIVERS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The budget that all host drivers of the process share.
#[must_use]
pub fn host_budget() -> &'static HostBudget {
    &HOST_BUDGET
}

/// The host driver of a granularity.
///
/// # Errors
/// As [`HostDriver::new`].
pub fn host(granularity: u64) -> Result<Arc<HostDriver>, ProbeError> {
    let open = || HostDriver::new(granularity, Arc::clone(&HOST_BUDGET)).map(Arc::new);
    let Some(mut drivers) = drivers() else {
        return open();
    };
    if let Some(driver) = drivers.host.get(&granularity) {
        return Ok(Arc::clone(driver));
    }
    let driver = open()?;
    drivers.host.insert(granularity, Arc::clone(&driver));
    Ok(driver)
}

/// The driver of a CUDA device, probed when first asked for.
///
/// # Errors
/// As [`CudaDriver::open`].
pub fn cuda(ordinal: u32, options: CudaOptions) -> Result<Arc<CudaDriver>, ProbeError> {
    let library = cuda_library()?;
    let open = || CudaDriver::open(library, ordinal, options).map(Arc::new);
    let Some(mut drivers) = drivers() else {
        return open();
    };
    if let Some(driver) = drivers.cuda.get(&(ordinal, options)) {
        return Ok(Arc::clone(driver));
    }
    let driver = open()?;
    drivers.cuda.insert((ordinal, options), Arc::clone(&driver));
    Ok(driver)
}

/// Number of CUDA devices that the process sees.
///
/// # Errors
/// Why CUDA cannot be used at all.
pub fn cuda_device_count() -> Result<u32, ProbeError> {
    CudaDriver::device_count(&*cuda_library()?)
}

fn cuda_library() -> Result<Arc<CudaLibrary>, ProbeError> {
    let load = || {
        let library = match std::env::var(LIBRARY_VARIABLE) {
            Ok(path) => CudaLibrary::load_from(&path),
            Err(_) => CudaLibrary::load(),
        };
        library.map(Arc::new)
    };
    LIBRARY.get_or_init(load).clone()
}
