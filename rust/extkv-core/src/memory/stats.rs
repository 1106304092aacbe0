//! What a buffer holds, in constant time.

use crate::driver::{AllocationProperties, CallStats, DriverCall};

/// State and costs of one buffer at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferStats {
    /// Bytes of address space.
    pub reserved_bytes: u64,
    /// Bytes of physical memory mapped.
    pub committed_bytes: u64,
    /// Bytes below the committed size, over all segments.
    pub logical_bytes: u64,
    /// Physical bytes past the committed size: rounding to granules and handles, and surplus of
    /// geometric growth.
    pub rounding_bytes: u64,
    /// Physical handles.
    pub num_handles: usize,
    /// Views alive.
    pub num_views: usize,
    /// Whether the buffer was freed.
    pub is_freed: bool,
    /// Whether it was freed and its memory waits for the last view.
    pub has_deferred_free: bool,
    /// Bytes per granule.
    pub granularity: u64,
    /// Properties of the physical memory.
    pub properties: AllocationProperties,
    /// Driver calls so far, in the order of [`DriverCall::ALL`].
    pub driver_calls: [CallStats; DriverCall::ALL.len()],
}
