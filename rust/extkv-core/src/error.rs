//! Every way the crate can fail, as data: what was asked, what was found, and the limit.
//!
//! [`DriverError`] is one driver call gone wrong, [`ProbeError`] a driver that cannot be used at
//! all, and [`Error`] what the public functions return.

use thiserror::Error as ThisError;

use crate::driver::{Device, DriverCall};
use crate::units::Bytes;

/// Result of the crate's public functions.
pub type Result<T> = std::result::Result<T, Error>;
/// Result of a single driver call.
pub type DriverResult<T> = std::result::Result<T, DriverError>;

/// One driver call that failed. The call had no effect.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum DriverError {
    /// The device has no physical memory left for a create call.
    #[error("{call} of {requested} on {device} failed: out of memory (code {code})")]
    OutOfMemory {
        /// The failing call.
        call: DriverCall,
        /// The device it was made on.
        device: Device,
        /// Bytes asked of that one call.
        requested: Bytes,
        /// The driver's own error number.
        code: i64,
    },
    /// No address range of that length is left in the process.
    #[error("no address range of {requested} is left on {device} (code {code})")]
    AddressSpaceExhausted {
        /// The device it was asked of.
        device: Device,
        /// Length asked.
        requested: Bytes,
        /// The driver's own error number.
        code: i64,
    },
    /// Too many separate memory mappings (host driver; `vm.max_map_count`).
    #[error(
        "{call} on {device} would make more than {allowed} separate memory mappings; the kernel \
         allows the process {limit} in all (vm.max_map_count): raise it, or use a larger \
         granularity, fewer segments or larger chunks"
    )]
    MappingLimit {
        /// The refused call.
        call: DriverCall,
        /// The device it was made on.
        device: Device,
        /// Mappings that host memory may make.
        allowed: u64,
        /// The kernel's limit.
        limit: u64,
    },
    /// A call that the contract of [`crate::driver::VmmDriver`] forbids.
    #[error("{call} on {device} is illegal: {rule} (address {address:#x}, {length})")]
    Illegal {
        /// The refused call.
        call: DriverCall,
        /// The device it was made on.
        device: Device,
        /// The rule it breaks.
        rule: &'static str,
        /// Address or handle number of the call.
        address: u64,
        /// Length of the call.
        length: Bytes,
    },
    /// A failure that a test asked for.
    #[error("{call} number {index} on {device} failed as the test asked")]
    Injected {
        /// The failing call.
        call: DriverCall,
        /// The device it was made on.
        device: Device,
        /// Index of the call, from 0, in the order the calls were made.
        index: u64,
    },
    /// Any other error number of the driver.
    #[error("{call} on {device} failed: {name} (code {code})")]
    Call {
        /// The failing call.
        call: DriverCall,
        /// The device it was made on.
        device: Device,
        /// The driver's own error number.
        code: i64,
        /// The driver's name of that number.
        name: String,
    },
}

impl DriverError {
    /// The call that failed.
    #[must_use]
    pub fn call(&self) -> DriverCall {
        match self {
            Self::AddressSpaceExhausted { .. } => DriverCall::Reserve,
            Self::OutOfMemory { call, .. }
            | Self::MappingLimit { call, .. }
            | Self::Illegal { call, .. }
            | Self::Injected { call, .. }
            | Self::Call { call, .. } => *call,
        }
    }

    /// The driver's error number, where the driver gave one.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::OutOfMemory { code, .. }
            | Self::AddressSpaceExhausted { code, .. }
            | Self::Call { code, .. } => Some(*code),
            Self::MappingLimit { .. } | Self::Illegal { .. } | Self::Injected { .. } => None,
        }
    }
}

/// A driver that cannot be used on this machine, and why.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum ProbeError {
    /// No CUDA driver library could be loaded.
    #[error("no CUDA driver on this machine: cannot load {tried} ({detail})")]
    LibraryMissing {
        /// The names tried, in order.
        tried: String,
        /// The loader's message for the last of them.
        detail: String,
    },
    /// The library is the link-time stub of a CUDA toolkit, not a driver.
    #[error(
        "{library} is a CUDA toolkit stub, not a driver; remove the toolkit's stubs folder from \
         the library search path"
    )]
    StubLibrary {
        /// The library that was loaded.
        library: String,
    },
    /// The driver lacks a function that growable memory needs.
    #[error("{library} has no function {symbol}: the driver is too old")]
    SymbolMissing {
        /// The library that was loaded.
        library: String,
        /// The function that is missing.
        symbol: String,
    },
    /// The driver is older than the oldest one supported.
    #[error("CUDA driver version {found} is too old: at least {minimum} is needed")]
    DriverTooOld {
        /// The driver's version, as `major.minor`.
        found: String,
        /// The oldest version supported.
        minimum: String,
    },
    /// The driver loads but does not start.
    #[error("the CUDA driver does not start: {name} (code {code})")]
    InitFailed {
        /// The driver's error number.
        code: i64,
        /// The driver's name of that number.
        name: String,
    },
    /// The driver was started by a parent process and this process is its fork.
    #[error(
        "CUDA was started in process {parent} before this process ({child}) was forked from it; \
         CUDA cannot be used in a forked child: start children with the spawn method"
    )]
    Forked {
        /// Process that started CUDA.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// There is no device of that index.
    #[error("device index {ordinal} does not exist: {count} CUDA device(s) found")]
    NoSuchDevice {
        /// The index asked for.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
    /// The device cannot map physical memory at chosen addresses.
    #[error("device cuda:{ordinal} ({name}) has no virtual memory management")]
    VmmUnsupported {
        /// The device.
        ordinal: u32,
        /// Its name.
        name: String,
    },
    /// An allocation property that was asked for by name is not to be had.
    #[error("device {device} cannot give memory with {property}; leave it on auto to do without")]
    PropertyUnsupported {
        /// The device.
        device: Device,
        /// The property.
        property: &'static str,
    },
    /// The thread's current context is neither none nor a primary context.
    #[error(
        "the current CUDA context {context:#x} is not the primary context of device \
         cuda:{ordinal}; memory mapped here would belong to the primary context: pop yours first"
    )]
    ForeignContext {
        /// The device of the context.
        ordinal: u32,
        /// The context's address.
        context: u64,
    },
    /// A two-granule trial growth on the device failed.
    #[error("a trial growth of two granules on {device} failed")]
    TrialFailed {
        /// The device.
        device: Device,
        /// The call that failed.
        source: DriverError,
    },
    /// The host driver could not be set up.
    #[error("host memory driver cannot start: {detail}")]
    HostUnavailable {
        /// What failed.
        detail: String,
    },
    /// A granularity that the device does not have.
    #[error(
        "granularity {found} is invalid on {device}: it must be a power of two and a multiple of \
         {page}"
    )]
    InvalidGranularity {
        /// The device.
        device: Device,
        /// The granularity asked for.
        found: Bytes,
        /// The device's smallest granularity.
        page: Bytes,
    },
}

/// What the crate's public functions return when they cannot do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// The device has too little free memory. Nothing changed.
    #[error("cannot commit {requested} on {device}: {} free", available_text(*.available))]
    OutOfMemory {
        /// The device.
        device: Device,
        /// Physical bytes that the whole operation needed.
        requested: Bytes,
        /// Physical bytes free once the operation was undone; `None` if the device did not say.
        available: Option<Bytes>,
        /// The call that failed.
        source: DriverError,
    },
    /// The process has no address range of that length.
    #[error("cannot reserve {requested} of address space on {device}")]
    AddressSpaceExhausted {
        /// The device.
        device: Device,
        /// Length asked.
        requested: Bytes,
        /// The call that failed.
        source: DriverError,
    },
    /// More bytes than a segment can ever hold.
    #[error("requested {requested} bytes per segment exceeds the segment capacity {capacity}")]
    CapacityExceeded {
        /// Bytes asked for in a segment.
        requested: u64,
        /// Bytes reserved for it.
        capacity: u64,
    },
    /// A growing call was asked for a smaller size.
    #[error(
        "resize is grow-only: cannot go from {current} to {requested} bytes per segment; use \
         shrink_per_segment_ to give memory back"
    )]
    GrowOnly {
        /// Bytes per segment now.
        current: u64,
        /// Bytes per segment asked for.
        requested: u64,
    },
    /// A shrinking call was asked for a larger size.
    #[error("shrink cannot go from {current} up to {requested} bytes per segment; use resize")]
    ShrinkOnly {
        /// Bytes per segment now.
        current: u64,
        /// Bytes per segment asked for.
        requested: u64,
    },
    /// A reservation of no bytes, or a segment of none.
    #[error("cannot reserve 0 bytes")]
    ZeroCapacity,
    /// A buffer without segments.
    #[error("num_segments must be at least 1, got 0")]
    ZeroSegments,
    /// A total size that does not divide into equal segments.
    #[error("{total} bytes are not divisible by num_segments = {num_segments}")]
    Indivisible {
        /// Total size.
        total: u64,
        /// Number of equal segments.
        num_segments: u64,
    },
    /// A size that no address range can have.
    #[error("{what} overflows 64 bits")]
    SizeOverflow {
        /// What was computed.
        what: &'static str,
    },
    /// A whole-buffer call on a buffer of several segments.
    #[error(
        "{operation} needs a single committed prefix and is only valid for num_segments=1, this \
         buffer has {num_segments}; use the per-segment calls"
    )]
    SeveralSegments {
        /// The call.
        operation: &'static str,
        /// Segments of the buffer.
        num_segments: usize,
    },
    /// A segment index past the last.
    #[error("segment {index} does not exist: the buffer has {num_segments}")]
    NoSuchSegment {
        /// The index asked for.
        index: usize,
        /// Segments of the buffer.
        num_segments: usize,
    },
    /// A view that reaches outside what it may show.
    #[error("a view of {length} bytes at byte {offset} does not fit the {limit} bytes {limit_of}")]
    ViewOutOfRange {
        /// First byte of the view.
        offset: u64,
        /// Bytes the view spans.
        length: u64,
        /// Bytes there are.
        limit: u64,
        /// What the limit is a size of.
        limit_of: &'static str,
    },
    /// The same buffer twice in one growth.
    #[error("buffer {index} of the group stands in it twice")]
    DuplicateBuffer {
        /// Second position of the buffer in the group.
        index: usize,
    },
    /// The buffer was freed.
    #[error("{operation} on a buffer that was freed")]
    Freed {
        /// The call.
        operation: &'static str,
    },
    /// A strict free while views live.
    #[error("cannot free strictly: {num_views} view(s) of the buffer are alive")]
    LiveViews {
        /// Number of live views.
        num_views: usize,
    },
    /// The buffer belongs to a parent process.
    #[error(
        "{operation}: the buffer was made in process {owner} and this is its forked child {child}; \
         growable memory cannot be used after fork: start children with the spawn method"
    )]
    Forked {
        /// The call.
        operation: &'static str,
        /// Process that made the buffer.
        owner: u32,
        /// This process.
        child: u32,
    },
    /// An earlier failure could not be undone; only `free` works.
    #[error("the buffer can only be freed: an earlier {call} failed and could not be undone")]
    Poisoned {
        /// The call whose undoing failed.
        call: DriverCall,
    },
    /// A prepared growth whose buffer changed in between.
    #[error("the prepared growth is stale: the buffer changed after it was prepared")]
    StalePrepared,
    /// The device cannot be used.
    #[error(transparent)]
    Unavailable(#[from] ProbeError),
    /// A driver call failed for another reason than memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn available_text(available: Option<Bytes>) -> String {
    available.map_or_else(|| "an unknown amount".to_owned(), |bytes| bytes.to_string())
}
