//! A driver that counts and times the calls of another. One per buffer, so that each buffer's
//! statistics are its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::{AllocationProperties, Device, DriverCall, Fence, HandleId, MemoryInfo, VmmDriver};
use crate::error::DriverResult;

/// Number and duration of one kind of driver call, failed calls included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallStats {
    /// Calls made.
    pub count: u64,
    /// Their total duration in nanoseconds.
    pub total_ns: u64,
    /// The longest of them in nanoseconds.
    pub max_ns: u64,
}

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    total_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// Counts and times every call of the driver it wraps.
#[derive(Debug)]
pub struct MeteredDriver {
    inner: Arc<dyn VmmDriver>,
    counters: [Counter; DriverCall::ALL.len()],
}

impl MeteredDriver {
    /// Wraps `inner` with all counters at zero.
    #[must_use]
    pub fn new(inner: Arc<dyn VmmDriver>) -> Self {
        Self { inner, counters: Default::default() }
    }

    /// Statistics of one kind of call so far.
    #[must_use]
    pub fn call_stats(&self, call: DriverCall) -> CallStats {
        let counter = &self.counters[call.index()];
        CallStats {
            count: counter.count.load(Ordering::Relaxed),
            total_ns: counter.total_ns.load(Ordering::Relaxed),
            max_ns: counter.max_ns.load(Ordering::Relaxed),
        }
    }

    fn timed<T>(&self, call: DriverCall, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let elapsed_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let counter = &self.counters[call.index()];
        counter.count.fetch_add(1, Ordering::Relaxed);
        counter.total_ns.fetch_add(elapsed_ns, Ordering::Relaxed);
        counter.max_ns.fetch_max(elapsed_ns, Ordering::Relaxed);
        result
    }
}

impl VmmDriver for MeteredDriver {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn fresh_memory_is_zero(&self) -> bool {
        self.inner.fresh_memory_is_zero()
    }

    fn properties(&self) -> AllocationProperties {
        self.inner.properties()
    }

    fn reserve(&self, length: u64) -> DriverResult<u64> {
        self.timed(DriverCall::Reserve, || self.inner.reserve(length))
    }

    fn free_address(&self, base: u64, length: u64) -> DriverResult<()> {
        self.timed(DriverCall::FreeAddress, || self.inner.free_address(base, length))
    }

    fn create(&self, length: u64) -> DriverResult<HandleId> {
        self.timed(DriverCall::Create, || self.inner.create(length))
    }

    fn release(&self, handle: HandleId) -> DriverResult<()> {
        self.timed(DriverCall::Release, || self.inner.release(handle))
    }

    fn map(&self, address: u64, length: u64, handle: HandleId) -> DriverResult<()> {
        self.timed(DriverCall::Map, || self.inner.map(address, length, handle))
    }

    fn set_access(&self, address: u64, length: u64) -> DriverResult<()> {
        self.timed(DriverCall::SetAccess, || self.inner.set_access(address, length))
    }

    fn unmap(&self, address: u64, length: u64) -> DriverResult<()> {
        self.timed(DriverCall::Unmap, || self.inner.unmap(address, length))
    }

    fn fill(&self, address: u64, length: u64, value: u8) -> DriverResult<()> {
        self.timed(DriverCall::Fill, || self.inner.fill(address, length, value))
    }

    fn synchronize(&self, fence: Fence<'_>) -> DriverResult<()> {
        self.timed(DriverCall::Synchronize, || self.inner.synchronize(fence))
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.timed(DriverCall::MemoryInfo, || self.inner.memory_info())
    }
}
