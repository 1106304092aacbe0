//! Names of devices and of driver calls, for errors and statistics.

use std::fmt;

/// A device that memory can be mapped on. Prints as torch names it: `cpu`, `cuda:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// Memory of this machine.
    Host,
    /// A CUDA device.
    Cuda {
        /// Its index among the devices this process sees.
        ordinal: u32,
    },
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The calls of [`VmmDriver`](super::VmmDriver).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DriverCall {
    /// Reserve address space.
    Reserve,
    /// Give address space back.
    FreeAddress,
    /// Create physical memory.
    Create,
    /// Give up physical memory.
    Release,
    /// Map physical memory.
    Map,
    /// Allow access.
    SetAccess,
    /// Unmap physical memory.
    Unmap,
    /// Set bytes.
    Fill,
    /// Read free and total memory.
    MemoryInfo,
    /// Wait for work.
    Synchronize,
}

impl DriverCall {
    /// All calls, in the order of their discriminants.
    pub const ALL: [Self; 10] = [
        Self::Reserve,
        Self::FreeAddress,
        Self::Create,
        Self::Release,
        Self::Map,
        Self::SetAccess,
        Self::Unmap,
        Self::Fill,
        Self::MemoryInfo,
        Self::Synchronize,
    ];

    /// The call's name as statistics and errors show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::FreeAddress => "free_address",
            Self::Create => "create",
            Self::Release => "release",
            Self::Map => "map",
            Self::SetAccess => "set_access",
            Self::Unmap => "unmap",
            Self::Fill => "fill",
            Self::MemoryInfo => "memory_info",
            Self::Synchronize => "synchronize",
        }
    }

    /// Position of the call in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Reserve => 0,
            Self::FreeAddress => 1,
            Self::Create => 2,
            Self::Release => 3,
            Self::Map => 4,
            Self::SetAccess => 5,
            Self::Unmap => 6,
            Self::Fill => 7,
            Self::MemoryInfo => 8,
            Self::Synchronize => 9,
        }
    }
}

impl fmt::Display for DriverCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_follow_the_list() {
        for (index, call) in DriverCall::ALL.into_iter().enumerate() {
            assert_eq!(call.index(), index, "{call}");
        }
    }

    #[test]
    fn devices_print_as_torch_names_them() {
        assert_eq!(Device::Host.to_string(), "cpu");
        assert_eq!(Device::Cuda { ordinal: 3 }.to_string(), "cuda:3");
    }
}
