//! Where memory is mapped: one trait with the verbs of virtual memory management, and its drivers.
//!
//! This folder holds the crate's only `unsafe` code. Everything above it is safe Rust over
//! [`VmmDriver`]; addresses are numbers there and are never dereferenced.

mod call;
mod cuda;
mod cuda_library;
mod cuda_probe;
mod host;
mod host_budget;
mod host_os;
mod mapping_table;
mod metered;
pub mod registry;

#[cfg(any(test, feature = "test-util"))]
mod checked;
#[cfg(test)]
mod cuda_tests;

use std::fmt;

pub use call::{Device, DriverCall};
#[cfg(any(test, feature = "test-util"))]
pub use checked::{CheckedDriver, Leftovers};
pub use cuda::CudaDriver;
pub use cuda_library::CudaLibrary;
pub use cuda_probe::{CudaOptions, DeviceFacts, Rdma};
pub use host::HostDriver;
pub use host_budget::HostBudget;
pub use metered::{CallStats, MeteredDriver};

use crate::error::DriverResult;

/// Physical memory of a device as its driver numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleId(pub u64);

/// What work a call must wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence<'a> {
    /// The fills made through this driver so far.
    Fills,
    /// All work on the device.
    Device,
    /// All work on these streams (`CUstream` values; 0 is the legacy default stream).
    Streams(&'a [u64]),
}

/// Free and total physical memory of a device, in bytes, other processes' use included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that a create call could still get.
    pub free: u64,
    /// Bytes of the device.
    pub total: u64,
}

/// How other processes and network cards may reach memory of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Shareable {
    /// POSIX file descriptor where the device can, else none.
    #[default]
    Auto,
    /// POSIX file descriptor, or an error.
    PosixFd,
    /// Not shareable.
    None,
}

/// Properties that a driver's physical memory has, as chosen when the driver was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocationProperties {
    /// Whether a handle can be exported as a POSIX file descriptor.
    pub posix_fd: bool,
    /// Whether network cards may be given the memory (GPUDirect RDMA).
    pub gpu_direct_rdma: bool,
}

/// Virtual memory management of one device.
///
/// Lengths and addresses are multiples of [`granularity`](Self::granularity). Each call has its
/// whole effect or none. The order of a byte's life is reserve, create, map, set access, use,
/// unmap, release, free address; physical memory returns to the device once it is both unmapped
/// and released. Implementations serialise their own state: any thread may call.
pub trait VmmDriver: fmt::Debug + Send + Sync {
    /// The device whose memory this is.
    fn device(&self) -> Device;

    /// Bytes of the smallest piece of physical memory, a power of two.
    fn granularity(&self) -> u64;

    /// Whether memory that was never written since it was created is sure to read as zero.
    fn fresh_memory_is_zero(&self) -> bool;

    /// The properties that physical memory is created with.
    fn properties(&self) -> AllocationProperties;

    /// Reserves `length` bytes of address space, backed by nothing, and returns its base.
    ///
    /// # Errors
    /// `AddressSpaceExhausted` when no such range is left, else a driver failure.
    fn reserve(&self, length: u64) -> DriverResult<u64>;

    /// Gives back a whole reservation in which nothing is mapped.
    ///
    /// # Errors
    /// A driver failure; the range stays reserved.
    fn free_address(&self, base: u64, length: u64) -> DriverResult<()>;

    /// Creates `length` bytes of physical memory.
    ///
    /// # Errors
    /// `OutOfMemory` when the device is full, else a driver failure.
    fn create(&self, length: u64) -> DriverResult<HandleId>;

    /// Gives up a handle. Its memory returns to the device when it is mapped nowhere.
    ///
    /// # Errors
    /// A driver failure; the handle stays valid.
    fn release(&self, handle: HandleId) -> DriverResult<()>;

    /// Maps a whole handle at `address`, inside one reservation where nothing is mapped.
    ///
    /// # Errors
    /// A driver failure; nothing is mapped.
    fn map(&self, address: u64, length: u64, handle: HandleId) -> DriverResult<()>;

    /// Allows reading and writing of a mapped range. Costs time per handle in the range.
    ///
    /// # Errors
    /// A driver failure; access is as before.
    fn set_access(&self, address: u64, length: u64) -> DriverResult<()>;

    /// Unmaps one or more whole adjacent mappings.
    ///
    /// # Errors
    /// A driver failure; all of them stay mapped.
    fn unmap(&self, address: u64, length: u64) -> DriverResult<()>;

    /// Starts to set `length` accessible bytes (not rounded to granules) to `value`. The bytes
    /// hold it once [`synchronize`](Self::synchronize) with [`Fence::Fills`] returned.
    ///
    /// # Errors
    /// A driver failure.
    fn fill(&self, address: u64, length: u64, value: u8) -> DriverResult<()>;

    /// Waits for the work that the fence names.
    ///
    /// # Errors
    /// A driver failure, which can be one of the work waited for.
    fn synchronize(&self, fence: Fence<'_>) -> DriverResult<()>;

    /// Reads the device's free and total memory.
    ///
    /// # Errors
    /// A driver failure.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;
}
