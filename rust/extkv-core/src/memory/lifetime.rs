//! Who keeps memory alive: the buffer's handle until it is freed, and every view until it drops.

use std::sync::Arc;

use super::buffer::{BufferState, SharedBuffer};
use crate::driver::Device;
use crate::driver::VmmDriver;
use crate::error::{Error, Result};

/// What became of a freed buffer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freeing {
    /// The memory went back.
    Done,
    /// The memory goes back when the last view drops.
    Deferred {
        /// Views alive.
        num_views: usize,
    },
}

/// Bytes of a buffer that stay mapped as they are while this value lives.
#[derive(Debug)]
pub struct BufferView {
    shared: Arc<SharedBuffer>,
    address: u64,
    length: u64,
}

impl BufferView {
    pub(crate) fn committed(shared: &Arc<SharedBuffer>, offset: u64, length: u64) -> Result<Self> {
        let mut state = shared.lock_open("view")?;
        let segments = shared.layout.segments();
        let index = segments.partition_point(|s| s.offset <= offset).saturating_sub(1);
        let (start, end) = segments
            .get(index)
            .map_or((0, 0), |segment| (segment.offset, segment.committed_end(state.size)));
        let limit = end - start;
        let fits = offset.checked_add(length).is_some_and(|view_end| view_end <= end);
        if !fits {
            let limit_of = "committed in its segment";
            return Err(Error::ViewOutOfRange { offset, length, limit, limit_of });
        }
        Ok(Self::counted(shared, &mut state, offset, length))
    }

    pub(crate) fn capacity(shared: &Arc<SharedBuffer>, offset: u64, length: u64) -> Result<Self> {
        let mut state = shared.lock_open("view")?;
        let limit = shared.layout.total();
        let fits = offset.checked_add(length).is_some_and(|view_end| view_end <= limit);
        if !fits {
            let limit_of = "reserved";
            return Err(Error::ViewOutOfRange { offset, length, limit, limit_of });
        }
        Ok(Self::counted(shared, &mut state, offset, length))
    }

    fn counted(
        shared: &Arc<SharedBuffer>,
        state: &mut BufferState,
        offset: u64,
        length: u64,
    ) -> Self {
        state.num_views += 1;
        Self { shared: Arc::clone(shared), address: shared.base + offset, length }
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the view.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.shared.driver.device()
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        if self.shared.check_process("drop").is_err() {
            return;
        }
        let mut state = self.shared.lock_any();
        state.num_views -= 1;
        if state.is_freed && state.num_views == 0 {
            // A failure leaves the rest to the drop of the reservation, which tries again.
            let _ = tear_down(&mut state);
        }
    }
}

pub(crate) fn free(shared: &Arc<SharedBuffer>) -> Result<Freeing> {
    shared.check_process("free")?;
    let mut state = shared.lock_any();
    if !state.is_freed {
        state.is_freed = true;
        state.size = 0;
        state.version += 1;
    }
    match state.num_views {
        0 => tear_down(&mut state).map(|()| Freeing::Done),
        num_views => Ok(Freeing::Deferred { num_views }),
    }
}

pub(crate) fn free_strict(shared: &Arc<SharedBuffer>) -> Result<()> {
    shared.check_process("free")?;
    let num_views = shared.lock_any().num_views;
    if num_views > 0 {
        return Err(Error::LiveViews { num_views });
    }
    free(shared).map(|_| ())
}

fn tear_down(state: &mut BufferState) -> Result<()> {
    state.reservation.tear_down()?;
    state.is_torn_down = true;
    Ok(())
}
