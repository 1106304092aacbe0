//! What the memory tests share: a checked host device and a shadow of a buffer's bytes.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use extkv_core::driver::{CheckedDriver, HostBudget, HostDriver, Leftovers, VmmDriver};
use extkv_core::memory::{
    BufferOptions, ChunkPolicy, ChunkSize, GrowableBuffer, Growth, SegmentLayout,
};

pub(crate) const GRANULE: u64 = 64 << 10;

/// A host device of a given size behind the checking driver.
pub(crate) struct TestDevice {
    pub(crate) host: Arc<HostDriver>,
    pub(crate) budget: Arc<HostBudget>,
    pub(crate) checked: Arc<CheckedDriver>,
}

impl TestDevice {
    pub(crate) fn new(num_bytes: u64) -> Self {
        let budget = Arc::new(HostBudget::new(num_bytes));
        let host = Arc::new(HostDriver::new(GRANULE, Arc::clone(&budget)).expect("host driver"));
        let checked = Arc::new(CheckedDriver::new(Arc::clone(&host) as Arc<dyn VmmDriver>));
        Self { host, budget, checked }
    }

    pub(crate) fn driver(&self) -> Arc<dyn VmmDriver> {
        Arc::clone(&self.checked) as Arc<dyn VmmDriver>
    }

    pub(crate) fn buffer(&self, layout: SegmentLayout, policy: ChunkPolicy) -> GrowableBuffer {
        GrowableBuffer::new(self.driver(), layout, BufferOptions { policy }).expect("reserve")
    }

    /// A buffer of equal segments that commits exactly what is asked.
    pub(crate) fn exact(&self, num_bytes: u64, num_segments: u64) -> GrowableBuffer {
        let layout = SegmentLayout::equal(num_bytes, num_segments).expect("layout");
        self.buffer(layout, exact_policy())
    }

    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.checked.leftovers(), Leftovers::default());
        assert_eq!(self.budget.info().free, self.budget.info().total, "host memory leaked");
    }

    pub(crate) fn read(&self, buffer: &GrowableBuffer, offset: u64, length: u64) -> Vec<u8> {
        let length = usize::try_from(length).expect("length");
        self.host.read(buffer.base() + offset, length).expect("read committed bytes")
    }

    pub(crate) fn write(&self, buffer: &GrowableBuffer, offset: u64, bytes: &[u8]) {
        self.host.write(buffer.base() + offset, bytes).expect("write committed bytes");
    }
}

pub(crate) fn exact_policy() -> ChunkPolicy {
    ChunkPolicy { size: ChunkSize::WholeRun, growth: Growth::Exact }
}
