//! Several buffers grown or shrunk as one.
//!
//! Locks are taken in the order of the buffers' ids, so that two groups that share buffers cannot
//! wait for each other. A growth can also be prepared (all physical memory created) and committed
//! later, so that several ranks can agree between the two.

use std::sync::{Arc, MutexGuard};

use super::buffer::{BufferState, GrowableBuffer, SharedBuffer};
use super::granules::{GranuleRange, merged};
use super::physical::Chunk;
use super::reservation::VerbError;
use super::transaction::{self, Share};
use crate::driver::{Fence, VmmDriver};
use crate::error::{Error, Result};

type Guard<'a> = MutexGuard<'a, BufferState>;

/// Grows each buffer to its size (in units of its segments), all of them or none.
///
/// New bytes below the size read as zero if `zero_new`, before the call returns and for every
/// stream; else their content is undefined. Bytes below the old size keep their content. Work
/// running on the device is not waited for.
///
/// # Errors
/// `OutOfMemory`, `CapacityExceeded`, `GrowOnly`, `DuplicateBuffer`, `Freed`, `Forked`,
/// `Poisoned`, or a driver failure. The buffers are as before.
pub fn grow_together(targets: &[(&GrowableBuffer, u64)], zero_new: bool) -> Result<()> {
    let buffers: Vec<&SharedBuffer> = targets.iter().map(|(b, _)| b.shared().as_ref()).collect();
    let mut guards = lock_all(&buffers, "grow")?;
    let sizes: Vec<u64> = targets.iter().map(|(_, size)| *size).collect();
    let mut shares = shares_of(&buffers, &mut guards, &sizes)?;
    let chunks = transaction::create(&shares)?;
    transaction::finish(&mut shares, chunks, zero_new)
}

/// Grows one buffer by a number of units and returns its new size.
pub(crate) fn grow_by(buffer: &Arc<SharedBuffer>, units: u64, zero_new: bool) -> Result<u64> {
    let buffers = [buffer.as_ref()];
    let mut guards = lock_all(&buffers, "grow")?;
    let current = guards.first().map_or(0, |state| state.size);
    let overflow = Error::CapacityExceeded {
        requested: u64::MAX,
        capacity: buffer.first_prefix(buffer.layout.max_size()),
    };
    let size = current.checked_add(units).ok_or(overflow)?;
    let mut shares = shares_of(&buffers, &mut guards, &[size])?;
    let chunks = transaction::create(&shares)?;
    transaction::finish(&mut shares, chunks, zero_new)?;
    Ok(size)
}

/// Physical memory created for a growth that is not committed yet. Dropping it releases all.
#[derive(Debug)]
pub struct PreparedGrowth {
    buffers: Vec<Arc<SharedBuffer>>,
    sizes: Vec<u64>,
    versions: Vec<u64>,
    chunks: Vec<Vec<Chunk>>,
}

/// Creates all physical memory that a growth needs, and maps none of it.
///
/// # Errors
/// As [`grow_together`]; nothing is held then.
pub fn prepare_together(targets: &[(&GrowableBuffer, u64)]) -> Result<PreparedGrowth> {
    let buffers: Vec<Arc<SharedBuffer>> =
        targets.iter().map(|(buffer, _)| Arc::clone(buffer.shared())).collect();
    let sizes: Vec<u64> = targets.iter().map(|(_, size)| *size).collect();
    let locked: Vec<&SharedBuffer> = buffers.iter().map(Arc::as_ref).collect();
    let mut guards = lock_all(&locked, "prepare")?;
    let versions = guards.iter().map(|state| state.version).collect();
    let shares = shares_of(&locked, &mut guards, &sizes)?;
    let chunks = transaction::create(&shares)?;
    drop(guards);
    Ok(PreparedGrowth { buffers, sizes, versions, chunks })
}

impl PreparedGrowth {
    /// Maps, zeroes (if `zero_new`) and publishes the growth.
    ///
    /// # Errors
    /// `StalePrepared` if a buffer changed since; else as [`grow_together`] but for
    /// `OutOfMemory` of a create call. Everything is released and the buffers are as before.
    pub fn commit(self, zero_new: bool) -> Result<()> {
        let locked: Vec<&SharedBuffer> = self.buffers.iter().map(Arc::as_ref).collect();
        let mut guards = lock_all(&locked, "commit")?;
        if !guards.iter().map(|state| state.version).eq(self.versions.iter().copied()) {
            return Err(Error::StalePrepared);
        }
        let mut shares = shares_of(&locked, &mut guards, &self.sizes)?;
        transaction::finish(&mut shares, self.chunks, zero_new)
    }
}

/// Shrinks each buffer to its size, all of them or none, and returns the bytes of physical memory
/// given back.
///
/// Waits for the fence first: work that may use the bytes must be covered by it, and none may be
/// started until the call returns. Handles that also back bytes below the new size stay. Content
/// below the new size is untouched.
///
/// # Errors
/// `ShrinkOnly`, `DuplicateBuffer`, `Freed`, `Forked`, `Poisoned`, or a driver failure. The
/// buffers are as before.
pub fn shrink_together(targets: &[(&GrowableBuffer, u64)], fence: Fence<'_>) -> Result<u64> {
    let buffers: Vec<&SharedBuffer> = targets.iter().map(|(b, _)| b.shared().as_ref()).collect();
    let sizes: Vec<u64> = targets.iter().map(|(_, size)| *size).collect();
    drop(lock_shrinkable(&buffers, &sizes)?);
    for buffer in &buffers {
        buffer.driver.synchronize(fence)?;
    }
    let mut guards = lock_shrinkable(&buffers, &sizes)?;
    let detached = detach_all(&buffers, &mut guards, &sizes)?;
    for (state, size) in guards.iter_mut().zip(&sizes) {
        if state.size != *size {
            state.size = *size;
            state.version += 1;
        }
    }
    let given_back = buffers.iter().zip(&detached).map(|(buffer, chunks)| {
        chunks.iter().map(|chunk| chunk.granules.len()).sum::<u64>() * buffer.granule
    });
    Ok(given_back.sum())
}

fn lock_shrinkable<'a>(buffers: &[&'a SharedBuffer], sizes: &[u64]) -> Result<Vec<Guard<'a>>> {
    let guards = lock_all(buffers, "shrink")?;
    for ((buffer, state), size) in buffers.iter().zip(&guards).zip(sizes) {
        if *size > state.size {
            return Err(Error::ShrinkOnly {
                current: buffer.first_prefix(state.size),
                requested: buffer.first_prefix(*size),
            });
        }
    }
    Ok(guards)
}

/// Unmaps every extent that no size needs, in all buffers or in none.
fn detach_all(
    buffers: &[&SharedBuffer],
    guards: &mut [Guard<'_>],
    sizes: &[u64],
) -> Result<Vec<Vec<Chunk>>> {
    let mut detached: Vec<Vec<Chunk>> = Vec::with_capacity(buffers.len());
    for index in 0..buffers.len() {
        let keep = kept_granules(buffers[index], sizes[index]);
        let reservation = &mut guards[index].reservation;
        let extents = reservation.extents_outside(&keep);
        match reservation.detach(&extents) {
            Ok(chunks) => detached.push(chunks),
            Err(VerbError { source, not_undone }) => {
                guards[index].poisoned_by = not_undone;
                for (state, chunks) in guards.iter_mut().zip(detached) {
                    if let Err(error) = state.reservation.reattach(chunks) {
                        state.poisoned_by = Some(error.source.call());
                    }
                }
                return Err(Error::Driver(source));
            }
        }
    }
    Ok(detached)
}

/// Granules that hold committed bytes at a size.
fn kept_granules(buffer: &SharedBuffer, size: u64) -> Vec<GranuleRange> {
    let ranges = buffer.layout.segments().iter().map(|segment| {
        GranuleRange::covering(segment.offset, segment.committed_end(size), buffer.granule)
    });
    merged(ranges.collect())
}

/// Locks buffers in the order of their ids; the guards stand in the order given.
fn lock_all<'a>(buffers: &[&'a SharedBuffer], operation: &'static str) -> Result<Vec<Guard<'a>>> {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|index| buffers[*index].id);
    if let Some(pair) = order.windows(2).find(|pair| buffers[pair[0]].id == buffers[pair[1]].id) {
        return Err(Error::DuplicateBuffer { index: pair[1] });
    }
    let mut guards: Vec<(usize, Guard<'a>)> = Vec::with_capacity(buffers.len());
    for index in order {
        guards.push((index, buffers[index].lock_mutable(operation)?));
    }
    guards.sort_by_key(|(index, _)| *index);
    Ok(guards.into_iter().map(|(_, guard)| guard).collect())
}

fn shares_of<'a>(
    buffers: &[&'a SharedBuffer],
    guards: &'a mut [Guard<'_>],
    sizes: &[u64],
) -> Result<Vec<Share<'a>>> {
    let shares: Vec<Share<'a>> = buffers
        .iter()
        .zip(guards)
        .zip(sizes)
        .map(|((buffer, guard), target)| Share { buffer, state: &mut *guard, target: *target })
        .collect();
    shares.iter().try_for_each(Share::check)?;
    Ok(shares)
}
