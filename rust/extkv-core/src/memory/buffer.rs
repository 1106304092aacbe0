//! A growable buffer: one reservation, its segments, and the one size they share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::chunking::ChunkPolicy;
use super::group::{grow_together, shrink_together};
use super::lifetime::{BufferView, Freeing};
use super::reservation::Reservation;
use super::segments::SegmentLayout;
use super::stats::BufferStats;
use crate::driver::{Device, DriverCall, Fence, MeteredDriver, VmmDriver};
use crate::error::{Error, Result};

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Options of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BufferOptions {
    /// Sizes of physical handles.
    pub policy: ChunkPolicy,
}

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct BufferState {
    pub(crate) reservation: Reservation,
    /// Committed size in units of the segments.
    pub(crate) size: u64,
    /// Counts published changes.
    pub(crate) version: u64,
    pub(crate) num_views: usize,
    pub(crate) is_freed: bool,
    pub(crate) is_torn_down: bool,
    /// The call that failed and could not be undone, if any.
    pub(crate) poisoned_by: Option<DriverCall>,
}

/// A buffer with its lock. Shared by the handle, its views and prepared growths.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    /// Order in which several buffers are locked.
    pub(crate) id: u64,
    pub(crate) owner: u32,
    pub(crate) driver: Arc<MeteredDriver>,
    pub(crate) layout: SegmentLayout,
    pub(crate) policy: ChunkPolicy,
    pub(crate) base: u64,
    pub(crate) reserved: u64,
    pub(crate) granule: u64,
    pub(crate) state: Mutex<BufferState>,
}

impl SharedBuffer {
    /// Refuses a child of the process that made the buffer. Comes before any lock: in a child the
    /// lock may be held by a thread that does not exist there.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<()> {
        let child = std::process::id();
        if child == self.owner {
            return Ok(());
        }
        Err(Error::Forked { operation, owner: self.owner, child })
    }

    /// Locks the state whatever it is.
    pub(crate) fn lock_any(&self) -> MutexGuard<'_, BufferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state of a buffer that was not freed.
    pub(crate) fn lock_open(&self, operation: &'static str) -> Result<MutexGuard<'_, BufferState>> {
        self.check_process(operation)?;
        let state = self.lock_any();
        if state.is_freed { Err(Error::Freed { operation }) } else { Ok(state) }
    }

    /// Locks the state of a buffer whose size may change.
    pub(crate) fn lock_mutable(
        &self,
        operation: &'static str,
    ) -> Result<MutexGuard<'_, BufferState>> {
        let state = self.lock_open(operation)?;
        match state.poisoned_by {
            Some(call) => Err(Error::Poisoned { call }),
            None => Ok(state),
        }
    }

    /// Bytes of the first segment at a size: how sizes are told to people.
    pub(crate) fn first_prefix(&self, size: u64) -> u64 {
        self.layout.segments().first().map_or(size, |segment| size.saturating_mul(segment.unit))
    }
}

/// A device buffer that grows and shrinks in place. Its address never changes.
///
/// Any thread may call. Dropping it is [`free`](Self::free).
#[derive(Debug)]
pub struct GrowableBuffer {
    shared: Arc<SharedBuffer>,
}

impl GrowableBuffer {
    /// Reserves address space for `layout` on the driver's device. Commits nothing.
    ///
    /// # Errors
    /// `AddressSpaceExhausted`, `SizeOverflow`, or a driver failure.
    pub fn new(
        driver: Arc<dyn VmmDriver>,
        layout: SegmentLayout,
        options: BufferOptions,
    ) -> Result<Self> {
        let driver = Arc::new(MeteredDriver::new(driver));
        let reservation = Reservation::new(Arc::clone(&driver), layout.total())?;
        let granule = reservation.granule();
        let shared = SharedBuffer {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            owner: std::process::id(),
            driver,
            layout,
            policy: options.policy,
            base: reservation.base(),
            reserved: reservation.length(),
            granule,
            state: Mutex::new(BufferState {
                reservation,
                size: 0,
                version: 0,
                num_views: 0,
                is_freed: false,
                is_torn_down: false,
                poisoned_by: None,
            }),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn shared(&self) -> &Arc<SharedBuffer> {
        &self.shared
    }

    /// The device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.shared.driver.device()
    }

    /// First byte of the reservation. Never changes, also not by freeing.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.shared.base
    }

    /// Bytes of address space, rounded up to granules.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.shared.reserved
    }

    /// Bytes per granule.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        self.shared.granule
    }

    /// The segments.
    #[must_use]
    pub fn layout(&self) -> &SegmentLayout {
        &self.shared.layout
    }

    /// Committed size in units of the segments; 0 once freed.
    ///
    /// # Errors
    /// `Forked`.
    pub fn size(&self) -> Result<u64> {
        self.shared.check_process("size")?;
        Ok(self.shared.lock_any().size)
    }

    /// Grows every segment to `size` units, all or nothing. See [`grow_together`].
    ///
    /// # Errors
    /// As [`grow_together`].
    pub fn grow_to(&self, size: u64, zero_new: bool) -> Result<()> {
        grow_together(&[(self, size)], zero_new)
    }

    /// Grows every segment by `units` and returns the new size. Atomic among threads.
    ///
    /// # Errors
    /// As [`grow_together`].
    pub fn grow_by(&self, units: u64, zero_new: bool) -> Result<u64> {
        super::group::grow_by(&self.shared, units, zero_new)
    }

    /// Shrinks every segment to `size` units after the fence has passed, and returns the bytes of
    /// physical memory given back. See [`shrink_together`].
    ///
    /// # Errors
    /// As [`shrink_together`].
    pub fn shrink_to(&self, size: u64, fence: Fence<'_>) -> Result<u64> {
        shrink_together(&[(self, size)], fence)
    }

    /// A view of `length` bytes from byte `offset`, inside one segment's committed prefix.
    ///
    /// # Errors
    /// `ViewOutOfRange`, `Freed`, `Forked`.
    pub fn view_committed(&self, offset: u64, length: u64) -> Result<BufferView> {
        BufferView::committed(&self.shared, offset, length)
    }

    /// A view of `length` bytes from byte `offset`, committed or not.
    ///
    /// # Errors
    /// `ViewOutOfRange`, `Freed`, `Forked`.
    pub fn view_capacity(&self, offset: u64, length: u64) -> Result<BufferView> {
        BufferView::capacity(&self.shared, offset, length)
    }

    /// Gives the memory back: now if no view lives, else when the last one dies. Calls on the
    /// buffer fail with `Freed` from then on. Freeing twice does nothing.
    ///
    /// # Errors
    /// A driver failure: the buffer is freed, and another call goes on giving memory back.
    pub fn free(&self) -> Result<Freeing> {
        super::lifetime::free(&self.shared)
    }

    /// Like [`free`](Self::free), but refuses while views live.
    ///
    /// # Errors
    /// `LiveViews` with their number, nothing changed; else as [`free`](Self::free).
    pub fn free_strict(&self) -> Result<()> {
        super::lifetime::free_strict(&self.shared)
    }

    /// Whether the buffer was freed.
    ///
    /// # Errors
    /// `Forked`.
    pub fn is_freed(&self) -> Result<bool> {
        self.shared.check_process("is_freed")?;
        Ok(self.shared.lock_any().is_freed)
    }

    /// Number of physical handles that back bytes `[offset, offset + length)`.
    ///
    /// # Errors
    /// `Freed`, `Forked`.
    pub fn num_handles_in(&self, offset: u64, length: u64) -> Result<usize> {
        let state = self.shared.lock_open("num_handles_in")?;
        let end = offset.saturating_add(length);
        let range = super::granules::GranuleRange::covering(offset, end, self.shared.granule);
        Ok(state.reservation.num_handles_in(range))
    }

    /// State and costs. Constant time.
    ///
    /// # Errors
    /// `Forked`.
    pub fn stats(&self) -> Result<BufferStats> {
        let shared = &self.shared;
        shared.check_process("stats")?;
        let state = shared.lock_any();
        let committed_bytes = state.reservation.committed_bytes();
        let logical_bytes = shared.layout.logical_bytes(state.size);
        Ok(BufferStats {
            reserved_bytes: if state.is_torn_down { 0 } else { shared.reserved },
            committed_bytes,
            logical_bytes,
            rounding_bytes: committed_bytes.saturating_sub(logical_bytes),
            num_handles: state.reservation.num_handles(),
            num_views: state.num_views,
            is_freed: state.is_freed,
            has_deferred_free: state.is_freed && !state.is_torn_down,
            granularity: shared.granule,
            properties: shared.driver.properties(),
            driver_calls: DriverCall::ALL.map(|call| shared.driver.call_stats(call)),
        })
    }
}

impl Drop for GrowableBuffer {
    fn drop(&mut self) {
        if self.shared.check_process("drop").is_err() {
            return;
        }
        // A failure leaves the rest to the drop of the reservation, which tries again.
        let _ = super::lifetime::free(&self.shared);
    }
}
