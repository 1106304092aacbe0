//! One owned address range and the physical memory mapped into it.
//!
//! Invariant: a granule is marked as backed if and only if one extent covers it, and every extent
//! is mapped and accessible. All verbs restore that before they return, or say that they could not.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::granules::{GranuleRange, GranuleSet, merged};
use super::physical::{Chunk, PhysicalMemory};
use crate::driver::{DriverCall, Fence, MeteredDriver, VmmDriver};
use crate::error::{DriverError, DriverResult, Error, Result};
use crate::units::{Bytes, round_up};

/// A failed verb: the call that failed, and the call that could not be undone if there was one.
#[derive(Debug)]
pub(crate) struct VerbError {
    pub(crate) source: DriverError,
    pub(crate) not_undone: Option<DriverCall>,
}

impl From<DriverError> for VerbError {
    fn from(source: DriverError) -> Self {
        Self { source, not_undone: None }
    }
}

/// Owned address range; dropping it unmaps, releases and frees what is left.
#[derive(Debug)]
pub(crate) struct Reservation {
    driver: Arc<MeteredDriver>,
    base: u64,
    length: u64,
    granule: u64,
    is_reserved: bool,
    backed: GranuleSet,
    extents: BTreeMap<u64, Chunk>,
    owner: u32,
}

impl Reservation {
    /// Reserves at least `length` bytes, rounded up to granules.
    pub(crate) fn new(driver: Arc<MeteredDriver>, length: u64) -> Result<Self> {
        let granule = driver.granularity();
        let overflow = Error::SizeOverflow { what: "the reservation rounded up to granules" };
        let length = round_up(length, granule).ok_or_else(|| overflow.clone())?;
        let num_granules = usize::try_from(length / granule).map_err(|_| overflow)?;
        let base = driver.reserve(length).map_err(|source| match source {
            DriverError::AddressSpaceExhausted { device, .. } => {
                Error::AddressSpaceExhausted { device, requested: Bytes(length), source }
            }
            other => Error::Driver(other),
        })?;
        Ok(Self {
            driver,
            base,
            length,
            granule,
            is_reserved: true,
            backed: GranuleSet::new(num_granules),
            extents: BTreeMap::new(),
            owner: std::process::id(),
        })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    pub(crate) fn granule(&self) -> u64 {
        self.granule
    }

    pub(crate) fn num_handles(&self) -> usize {
        self.extents.len()
    }

    pub(crate) fn committed_bytes(&self) -> u64 {
        self.backed.num_backed() * self.granule
    }

    pub(crate) fn backed(&self) -> &GranuleSet {
        &self.backed
    }

    /// Number of handles that back any granule of a range.
    pub(crate) fn num_handles_in(&self, range: GranuleRange) -> usize {
        let before = self.extents.range(..range.start).next_back();
        let is_first_inside = before.is_some_and(|(_, chunk)| chunk.granules.overlaps(range));
        usize::from(is_first_inside) + self.extents.range(range.start..range.end).count()
    }

    fn address(&self, granule: u64) -> u64 {
        self.base + granule * self.granule
    }

    fn bytes(&self, range: GranuleRange) -> u64 {
        range.len() * self.granule
    }

    /// Creates physical memory for ranges that are not backed. On failure what was created is
    /// released again.
    pub(crate) fn create(&self, ranges: &[GranuleRange]) -> DriverResult<Vec<Chunk>> {
        let mut chunks = Vec::with_capacity(ranges.len());
        for granules in ranges.iter().copied() {
            let memory = PhysicalMemory::create(&self.driver, self.bytes(granules))?;
            chunks.push(Chunk { granules, memory });
        }
        Ok(chunks)
    }

    /// Maps chunks and sets access, one call per contiguous run. On failure nothing is mapped.
    pub(crate) fn map(&self, chunks: &[Chunk]) -> std::result::Result<(), VerbError> {
        for (done, chunk) in chunks.iter().enumerate() {
            if let Err(source) = self.map_chunk(chunk) {
                return Err(self.undo_map(&chunks[..done], source));
            }
        }
        for run in runs_of(chunks) {
            if let Err(source) = self.driver.set_access(self.address(run.start), self.bytes(run)) {
                return Err(self.undo_map(chunks, source));
            }
        }
        Ok(())
    }

    fn map_chunk(&self, chunk: &Chunk) -> DriverResult<()> {
        let range = chunk.granules;
        self.driver.map(self.address(range.start), self.bytes(range), chunk.memory.handle())
    }

    fn undo_map(&self, chunks: &[Chunk], source: DriverError) -> VerbError {
        let not_undone = self.unmap_runs(chunks).err().map(|_| DriverCall::Map);
        VerbError { source, not_undone }
    }

    /// Unmaps chunks that are mapped but not installed.
    pub(crate) fn unmap_runs(&self, chunks: &[Chunk]) -> DriverResult<()> {
        let mut result = Ok(());
        for run in runs_of(chunks) {
            let unmapped = self.driver.unmap(self.address(run.start), self.bytes(run));
            result = result.and(unmapped);
        }
        result
    }

    /// Takes mapped chunks into the books.
    pub(crate) fn install(&mut self, chunks: Vec<Chunk>) {
        for chunk in chunks {
            self.backed.insert(chunk.granules);
            self.extents.insert(chunk.granules.start, chunk);
        }
    }

    /// The extents that hold no granule of `keep` (merged ranges).
    pub(crate) fn extents_outside(&self, keep: &[GranuleRange]) -> Vec<GranuleRange> {
        let is_outside = |range: &GranuleRange| {
            let next = keep.partition_point(|kept| kept.end <= range.start);
            keep.get(next).is_none_or(|kept| kept.start >= range.end)
        };
        self.extents.values().map(|chunk| chunk.granules).filter(is_outside).collect()
    }

    /// Unmaps whole extents; their memory stays held by the returned chunks. On failure all of
    /// them are mapped and accessible as before.
    pub(crate) fn detach(
        &mut self,
        extents: &[GranuleRange],
    ) -> std::result::Result<Vec<Chunk>, VerbError> {
        let runs = merged(extents.to_vec());
        for (done, run) in runs.iter().copied().enumerate() {
            if let Err(source) = self.driver.unmap(self.address(run.start), self.bytes(run)) {
                let not_undone = self.remap(&runs[..done]).err().map(|_| DriverCall::Unmap);
                return Err(VerbError { source, not_undone });
            }
        }
        let mut chunks = Vec::with_capacity(extents.len());
        for range in extents {
            self.backed.remove(*range);
            chunks.extend(self.extents.remove(&range.start));
        }
        Ok(chunks)
    }

    /// Maps detached chunks again and takes them back into the books.
    pub(crate) fn reattach(&mut self, chunks: Vec<Chunk>) -> std::result::Result<(), VerbError> {
        let result = self.map(&chunks);
        self.install(chunks);
        result
    }

    /// Maps the extents of unmapped runs again.
    fn remap(&self, runs: &[GranuleRange]) -> DriverResult<()> {
        for run in runs {
            for (_, chunk) in self.extents.range(run.start..run.end) {
                self.map_chunk(chunk)?;
            }
            self.driver.set_access(self.address(run.start), self.bytes(*run))?;
        }
        Ok(())
    }

    /// Starts to set byte ranges of the reservation to zero; a fence on fills tells the end.
    pub(crate) fn start_zeroing(&self, ranges: &[(u64, u64)]) -> DriverResult<()> {
        ranges
            .iter()
            .try_for_each(|(start, end)| self.driver.fill(self.base + start, end - start, 0))
    }

    /// Gives everything back: waits for the device, unmaps, releases, frees the address range.
    /// After a failure the call can be made again and goes on where it stopped.
    pub(crate) fn tear_down(&mut self) -> DriverResult<()> {
        if !self.is_reserved {
            return Ok(());
        }
        if !self.extents.is_empty() {
            self.driver.synchronize(Fence::Device)?;
        }
        let extents: Vec<GranuleRange> = self.extents.values().map(|c| c.granules).collect();
        for run in merged(extents) {
            self.driver.unmap(self.address(run.start), self.bytes(run))?;
            self.backed.remove(run);
            self.extents.retain(|_, chunk| !chunk.granules.overlaps(run));
        }
        self.driver.free_address(self.base, self.length)?;
        self.is_reserved = false;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        // As for physical memory: one more try, then the driver is gone and its memory with it.
        if self.tear_down().is_err() {
            let _ = self.tear_down();
        }
    }
}

/// The contiguous runs of chunks that stand in address order.
fn runs_of(chunks: &[Chunk]) -> Vec<GranuleRange> {
    merged(chunks.iter().map(|chunk| chunk.granules).collect())
}
