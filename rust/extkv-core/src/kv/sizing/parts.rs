//! Where every byte of the device goes, and what bounds the cache.

use serde::Serialize;

use crate::units::Bytes;

/// What bounds the number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Free memory of the device.
    FreeMemory,
    /// `gpu_memory_utilization`.
    Utilization,
    /// The reserved address range.
    Reservation,
    /// `kv_cache_memory_bytes`.
    ManualSize,
    /// A rank that has fewer blocks.
    OtherRank,
}

impl Limit {
    /// What to change so that `missing` more bytes are there.
    #[must_use]
    pub fn remedy(self, missing: Bytes) -> String {
        match self {
            Self::FreeMemory => format!(
                "free {missing} on the device (fewer sequences or captured graphs, smaller \
                 batches, fewer other processes)"
            ),
            Self::Utilization => {
                format!("raise gpu_memory_utilization so that {missing} more may be used")
            }
            Self::Reservation => format!("reserve {missing} more"),
            Self::ManualSize => format!("raise kv_cache_memory_bytes by {missing}"),
            Self::OtherRank => format!("free {missing} on the rank that has the fewest blocks"),
        }
    }
}

/// Every byte of the device, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Parts {
    /// Other processes.
    pub foreign_bytes: u64,
    /// Weights.
    pub weights_bytes: u64,
    /// Captured graphs and their pools; 0 if capture freed memory.
    pub graphs_bytes: u64,
    /// Encoder caches.
    pub encoder_cache_bytes: u64,
    /// All else that this process holds: context, libraries, workspaces, the allocator's cache.
    pub workspace_bytes: u64,
    /// What the worst step will still take from free memory.
    pub transient_bytes: u64,
    /// Left free on purpose.
    pub reserve_bytes: u64,
    /// What rounding to granules may waste: one granule per segment.
    pub rounding_bytes: u64,
    /// The KV cache.
    pub kv_bytes: u64,
    /// Left over: less than a block, or more than a limit lets the cache take.
    pub unused_bytes: u64,
}

impl Parts {
    /// The parts with their names, in the order of the table.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 10] {
        [
            ("other processes", self.foreign_bytes),
            ("weights", self.weights_bytes),
            ("graphs", self.graphs_bytes),
            ("encoder cache", self.encoder_cache_bytes),
            ("workspace", self.workspace_bytes),
            ("transient peak", self.transient_bytes),
            ("reserve", self.reserve_bytes),
            ("rounding", self.rounding_bytes),
            ("KV cache", self.kv_bytes),
            ("unused", self.unused_bytes),
        ]
    }

    /// Their sum: the memory of the device.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.named().into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// Transient peak and reserve together.
    #[must_use]
    pub fn margin_bytes(&self) -> u64 {
        self.transient_bytes + self.reserve_bytes
    }
}
