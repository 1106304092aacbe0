//! How many bytes of host memory the drivers of this process may create together.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use super::MemoryInfo;

/// Bytes of host memory that drivers may create, counted when created (not when touched).
#[derive(Debug)]
pub struct HostBudget {
    limit: AtomicU64,
    used: AtomicU64,
}

impl HostBudget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }

    /// This machine's memory, or the control group's limit where that is smaller.
    #[must_use]
    pub fn machine_memory() -> u64 {
        let total = fs::read_to_string("/proc/meminfo")
            .ok()
            .and_then(|text| {
                let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
                line.split_whitespace().nth(1)?.parse::<u64>().ok()
            })
            .map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        let group = fs::read_to_string("/sys/fs/cgroup/memory.max")
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(u64::MAX);
        total.min(group)
    }

    /// Sets the limit. What is in use stays in use, also above the new limit.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::SeqCst);
    }

    /// Free and total bytes.
    #[must_use]
    pub fn info(&self) -> MemoryInfo {
        let total = self.limit.load(Ordering::SeqCst);
        MemoryInfo { free: total.saturating_sub(self.used.load(Ordering::SeqCst)), total }
    }

    pub(super) fn charge(&self, length: u64) -> bool {
        self.used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
                let next = used.checked_add(length)?;
                (next <= self.limit.load(Ordering::SeqCst)).then_some(next)
            })
            .is_ok()
    }

    pub(super) fn give_back(&self, length: u64) {
        self.used.fetch_sub(length, Ordering::SeqCst);
    }
}
