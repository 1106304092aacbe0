//! Growth that happens whole or not at all.
//!
//! The order is: create all physical memory (the step that can run out), map all, set access once
//! per contiguous run, zero, publish. A failure at any step undoes the steps before it, so that
//! mappings, access, handles and sizes are what they were.

use super::buffer::{BufferState, SharedBuffer};
use super::chunking::Growth;
use super::granules::{GranuleRange, merged};
use super::physical::Chunk;
use super::reservation::VerbError;
use crate::driver::{Fence, VmmDriver};
use crate::error::{DriverError, Error, Result};
use crate::units::Bytes;

/// One buffer's part in a growth, under its lock.
pub(crate) struct Share<'a> {
    pub(crate) buffer: &'a SharedBuffer,
    pub(crate) state: &'a mut BufferState,
    /// New size in units.
    pub(crate) target: u64,
}

impl Share<'_> {
    /// Refuses a target that is smaller than the size or does not fit.
    pub(crate) fn check(&self) -> Result<()> {
        if self.target < self.state.size {
            return Err(Error::GrowOnly {
                current: self.buffer.first_prefix(self.state.size),
                requested: self.buffer.first_prefix(self.target),
            });
        }
        self.buffer.layout.check_fits(self.target)
    }

    /// Runs of granules that the target needs and that are not backed.
    fn missing(&self, growth: Growth) -> Vec<GranuleRange> {
        let granule = self.buffer.granule;
        let mut policy = self.buffer.policy;
        if growth == Growth::Exact {
            policy.growth = Growth::Exact;
        }
        let wanted = self.buffer.layout.segments().iter().map(|segment| {
            let (old_end, new_end) =
                (segment.committed_end(self.state.size), segment.committed_end(self.target));
            let held = GranuleRange::covering(segment.offset, old_end, granule);
            let mut needed = GranuleRange::covering(old_end, new_end, granule);
            if !needed.is_empty() {
                let limit = (segment.offset + segment.capacity) / granule;
                let is_missing = !self.state.reservation.backed().contains(needed.end - 1);
                if is_missing {
                    needed.end = policy.end_with_surplus(held, needed, limit);
                }
            }
            needed
        });
        let backed = self.state.reservation.backed();
        let ranges = merged(wanted.collect());
        ranges.into_iter().flat_map(|range| backed.missing_runs(range)).collect()
    }

    fn create(
        &self,
        runs: &[GranuleRange],
        num_added: u64,
    ) -> std::result::Result<Vec<Chunk>, DriverError> {
        let granule = self.buffer.granule;
        let segments: Vec<(u64, u64)> = self
            .buffer
            .layout
            .segments()
            .iter()
            .map(|segment| {
                let end = segment.committed_end(self.state.size);
                let held = GranuleRange::covering(segment.offset, end, granule);
                (segment.offset / granule, held.len())
            })
            .collect();
        let chunks = self.buffer.policy.cut(runs, &segments, num_added, granule);
        self.state.reservation.create(&chunks)
    }

    /// Newly committed byte ranges that may hold something else than zero.
    fn dirty_ranges(&self) -> Vec<(u64, u64)> {
        let granule = self.buffer.granule;
        let is_fresh_zero = self.buffer.driver.fresh_memory_is_zero();
        let backed = self.state.reservation.backed();
        let mut dirty = Vec::new();
        for segment in self.buffer.layout.segments() {
            let start = segment.committed_end(self.state.size);
            let end = segment.committed_end(self.target);
            if !is_fresh_zero {
                push_range(&mut dirty, start, end);
                continue;
            }
            for run in backed.backed_runs(GranuleRange::covering(start, end, granule)) {
                push_range(&mut dirty, start.max(run.start * granule), end.min(run.end * granule));
            }
        }
        dirty
    }

    fn missing_bytes(&self) -> u64 {
        let granules: u64 = self.missing(Growth::Exact).iter().map(|run| run.len()).sum();
        granules * self.buffer.granule
    }

    fn unmap(&mut self, chunks: &[Chunk]) {
        if let Err(error) = self.state.reservation.unmap_runs(chunks) {
            self.state.poisoned_by = Some(error.call());
        }
    }
}

fn push_range(ranges: &mut Vec<(u64, u64)>, start: u64, end: u64) {
    if start >= end {
        return;
    }
    match ranges.last_mut() {
        Some((_, last_end)) if *last_end == start => *last_end = end,
        _ => ranges.push((start, end)),
    }
}

/// Creates all physical memory that the shares need, or none.
pub(crate) fn create(shares: &[Share<'_>]) -> Result<Vec<Vec<Chunk>>> {
    let attempt = |growth: Growth| {
        let missing: Vec<_> = shares.iter().map(|share| share.missing(growth)).collect();
        let num_added = missing.iter().flatten().map(|run| run.len()).sum();
        let mut chunks = Vec::with_capacity(shares.len());
        for (index, (share, runs)) in shares.iter().zip(&missing).enumerate() {
            chunks.push(share.create(runs, num_added).map_err(|error| (index, error))?);
        }
        Ok(chunks)
    };
    let result = attempt(Growth::Geometric).or_else(|failure| match failure {
        // Too little for the surplus is no reason to fail.
        (_, DriverError::OutOfMemory { .. }) if has_surplus(shares) => attempt(Growth::Exact),
        other => Err(other),
    });
    result.map_err(|(index, source)| failure(shares, index, source))
}

fn has_surplus(shares: &[Share<'_>]) -> bool {
    shares.iter().any(|share| share.missing(Growth::Geometric) != share.missing(Growth::Exact))
}

/// Maps, zeroes and publishes memory that [`create`] made for the same shares and sizes.
pub(crate) fn finish(
    shares: &mut [Share<'_>],
    chunks: Vec<Vec<Chunk>>,
    zero_new: bool,
) -> Result<()> {
    for index in 0..shares.len() {
        let mapped = shares[index].state.reservation.map(&chunks[index]);
        if let Err(VerbError { source, not_undone }) = mapped {
            shares[index].state.poisoned_by = not_undone;
            return Err(undo(shares, index, chunks, source));
        }
    }
    if zero_new && let Err(source) = zero(shares) {
        return Err(undo(shares, shares.len(), chunks, source));
    }
    for (share, chunks) in shares.iter_mut().zip(chunks) {
        share.state.reservation.install(chunks);
        if share.target != share.state.size {
            share.state.size = share.target;
            share.state.version += 1;
        }
    }
    Ok(())
}

/// Zeroes the new bytes of all shares: starts every fill, then waits for them.
fn zero(shares: &[Share<'_>]) -> std::result::Result<(), DriverError> {
    let mut started = Vec::with_capacity(shares.len());
    let mut result = Ok(());
    for share in shares {
        let dirty = share.dirty_ranges();
        if dirty.is_empty() {
            continue;
        }
        started.push(share);
        result = share.state.reservation.start_zeroing(&dirty);
        if result.is_err() {
            break;
        }
    }
    // Also after a failure: memory is not unmapped under a fill that runs.
    for share in started {
        let done = share.buffer.driver.synchronize(Fence::Fills);
        result = result.and(done);
    }
    result
}

/// Unmaps the chunks of the first `num_mapped` shares, releases all chunks, and makes the error.
fn undo(
    shares: &mut [Share<'_>],
    num_mapped: usize,
    chunks: Vec<Vec<Chunk>>,
    source: DriverError,
) -> Error {
    for (share, chunks) in shares.iter_mut().zip(&chunks).take(num_mapped) {
        share.unmap(chunks);
    }
    drop(chunks);
    failure(shares, num_mapped.min(shares.len().saturating_sub(1)), source)
}

/// The error of a failed growth: out of memory tells what the whole growth needed.
fn failure(shares: &[Share<'_>], index: usize, source: DriverError) -> Error {
    if !matches!(source, DriverError::OutOfMemory { .. }) {
        return Error::Driver(source);
    }
    let driver = &shares[index].buffer.driver;
    Error::OutOfMemory {
        device: driver.device(),
        requested: Bytes(shares.iter().map(Share::missing_bytes).sum()),
        available: driver.memory_info().ok().map(|info| Bytes(info.free)),
        source,
    }
}
