//! Physical memory that gives itself back.

use std::sync::Arc;

use super::granules::GranuleRange;
use crate::driver::{HandleId, MeteredDriver, VmmDriver};
use crate::error::DriverResult;

/// One physical handle. Dropping it releases it, in the process that created it.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    driver: Arc<MeteredDriver>,
    handle: HandleId,
    owner: u32,
}

impl PhysicalMemory {
    pub(crate) fn create(driver: &Arc<MeteredDriver>, length: u64) -> DriverResult<Self> {
        let handle = driver.create(length)?;
        Ok(Self { driver: Arc::clone(driver), handle, owner: std::process::id() })
    }

    pub(crate) fn handle(&self) -> HandleId {
        self.handle
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        // A second try covers a failure in passing; a driver that refuses twice is gone, and the
        // handle with it. The failed calls stand in the statistics.
        if self.driver.release(self.handle).is_err() {
            let _ = self.driver.release(self.handle);
        }
    }
}

/// Physical memory and the granules it backs or will back.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) granules: GranuleRange,
    pub(crate) memory: PhysicalMemory,
}
