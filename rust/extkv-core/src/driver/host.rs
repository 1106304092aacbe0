//! Growable memory without a GPU: the driver contract on `mmap` and a sparse memfd (Linux).
//!
//! A reservation is `PROT_NONE` address space. Each reservation owns an equal range of one sparse
//! file, and a handle mapped at offset `x` of a reservation lives at offset `x` of that range, so
//! that neighbouring mappings have neighbouring file offsets and the kernel merges them into one.
//! Mapping is recorded, and made real by one `mmap` per contiguous run when access is set: until
//! then a touch faults, as on a device. A byte budget makes "device full" real.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::host_budget::HostBudget;
use super::host_os::{
    allowed_mappings, call_error, extend_file, fill, map_file, open_memfd, page_size,
    protect_address, punch_hole, reserve_address, unreserve_address,
};
use super::mapping_table::{MappingTable, Rule};
use super::{AllocationProperties, Device, DriverCall, Fence, HandleId, MemoryInfo, VmmDriver};
use crate::error::{DriverError, DriverResult, ProbeError};
use crate::units::Bytes;

/// Where handles live in the file.
#[derive(Debug, Default)]
struct FileSpace {
    /// Reservation base to the start of its file range.
    bases: BTreeMap<u64, u64>,
    /// Handles that have been mapped, to their file range.
    placed: BTreeMap<HandleId, (u64, u64)>,
    /// File ranges in use: start to length.
    used: BTreeMap<u64, u64>,
    /// First byte that no reservation and no handle was ever given.
    end: u64,
}

impl FileSpace {
    fn is_free(&self, start: u64, length: u64) -> bool {
        self.used
            .range(..start.saturating_add(length))
            .next_back()
            .is_none_or(|(used_start, used_length)| used_start + used_length <= start)
    }

    fn place(&mut self, handle: HandleId, start: u64, length: u64) {
        self.placed.insert(handle, (start, length));
        self.used.insert(start, length);
    }
}

/// Accessible stretches of all host drivers of the process.
static NUM_RUNS: AtomicU64 = AtomicU64::new(0);
/// Kernel mappings behind a stretch: its own, and the inaccessible one up to the next.
const MAPPINGS_PER_RUN: u64 = 2;

fn count_runs(before: u64, after: u64) {
    NUM_RUNS.fetch_add(after, Ordering::SeqCst);
    NUM_RUNS.fetch_sub(before, Ordering::SeqCst);
}

#[derive(Debug, Default)]
struct State {
    table: MappingTable,
    file: FileSpace,
    lengths: BTreeMap<HandleId, u64>,
    next_handle: u64,
}

/// Driver of host memory.
#[derive(Debug)]
pub struct HostDriver {
    granularity: u64,
    budget: Arc<HostBudget>,
    memfd: OwnedFd,
    state: Mutex<State>,
}

impl HostDriver {
    /// Granule used where the caller does not care: 64 KiB.
    pub const DEFAULT_GRANULARITY: u64 = 64 << 10;

    /// Opens a driver whose memory counts against `budget`.
    ///
    /// # Errors
    /// `InvalidGranularity` unless `granularity` is a power of two of at least one page;
    /// `HostUnavailable` when the kernel gives no memfd.
    pub fn new(granularity: u64, budget: Arc<HostBudget>) -> Result<Self, ProbeError> {
        let page = page_size();
        if !granularity.is_power_of_two() || granularity < page {
            return Err(ProbeError::InvalidGranularity {
                device: Device::Host,
                found: Bytes(granularity),
                page: Bytes(page),
            });
        }
        let memfd = open_memfd().map_err(|detail| ProbeError::HostUnavailable { detail })?;
        Ok(Self { granularity, budget, memfd, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn illegal(call: DriverCall, rule: Rule, address: u64, length: u64) -> DriverError {
        let (device, length) = (Device::Host, Bytes(length));
        DriverError::Illegal { call, device, rule, address, length }
    }

    fn check_granules(&self, call: DriverCall, address: u64, length: u64) -> DriverResult<()> {
        if length == 0
            || !length.is_multiple_of(self.granularity)
            || !address.is_multiple_of(self.granularity)
        {
            return Err(Self::illegal(call, "not a whole number of granules", address, length));
        }
        Ok(())
    }

    /// Gives the memory of ended handles back to the kernel and to the budget.
    fn bury(&self, state: &mut State, dead: &[HandleId]) {
        for handle in dead {
            if let Some((start, length)) = state.file.placed.remove(handle) {
                state.file.used.remove(&start);
                punch_hole(&self.memfd, start, length);
            }
            if let Some(length) = state.lengths.remove(handle) {
                self.budget.give_back(length);
            }
        }
    }

    /// The contiguous runs, in memory and in the file, of the mappings in a range.
    fn file_runs(state: &State, address: u64, length: u64) -> Vec<(u64, u64, u64)> {
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        for (start, mapping) in state.table.mappings_in(address, length) {
            let Some((offset, _)) = state.file.placed.get(&mapping.handle).copied() else {
                continue;
            };
            match runs.last_mut() {
                Some((_, run_length, run_offset)) if *run_offset + *run_length == offset => {
                    *run_length += mapping.length;
                }
                _ => runs.push((start, mapping.length, offset)),
            }
        }
        runs
    }
}

#[cfg(any(test, feature = "test-util"))]
impl HostDriver {
    /// Reads accessible bytes, for tests.
    ///
    /// # Errors
    /// `Illegal` unless the whole range is mapped and accessible.
    pub fn read(&self, address: u64, length: usize) -> DriverResult<Vec<u8>> {
        let mut bytes = vec![0; length];
        let state = self.lock();
        Self::check_bytes(&state, address, length)?;
        super::host_os::copy_out(address, &mut bytes);
        Ok(bytes)
    }

    /// Writes accessible bytes, for tests.
    ///
    /// # Errors
    /// `Illegal` unless the whole range is mapped and accessible.
    pub fn write(&self, address: u64, bytes: &[u8]) -> DriverResult<()> {
        let state = self.lock();
        Self::check_bytes(&state, address, bytes.len())?;
        super::host_os::copy_in(address, bytes);
        Ok(())
    }

    fn check_bytes(state: &State, address: u64, length: usize) -> DriverResult<()> {
        let length = length as u64;
        state
            .table
            .check_accessible(address, length)
            .map_err(|rule| Self::illegal(DriverCall::Fill, rule, address, length))
    }
}

impl VmmDriver for HostDriver {
    fn device(&self) -> Device {
        Device::Host
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn fresh_memory_is_zero(&self) -> bool {
        true
    }

    fn properties(&self) -> AllocationProperties {
        AllocationProperties { posix_fd: false, gpu_direct_rdma: false }
    }

    fn reserve(&self, length: u64) -> DriverResult<u64> {
        self.check_granules(DriverCall::Reserve, 0, length)?;
        let mut state = self.lock();
        let file_base = state.file.end;
        let exhausted = |code: i32| DriverError::AddressSpaceExhausted {
            device: Device::Host,
            requested: Bytes(length),
            code: code.into(),
        };
        let end = file_base.checked_add(length).ok_or_else(|| exhausted(libc::ENOMEM))?;
        let base = reserve_address(length, self.granularity).map_err(exhausted)?;
        if let Err(code) = extend_file(&self.memfd, end) {
            unreserve_address(base, length);
            return Err(exhausted(code));
        }
        state.file.end = end;
        state.file.bases.insert(base, file_base);
        state.table.reserve(base, length);
        Ok(base)
    }

    fn free_address(&self, base: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::FreeAddress;
        let mut state = self.lock();
        state
            .table
            .check_free_address(base, length)
            .map_err(|rule| Self::illegal(call, rule, base, length))?;
        match unreserve_address(base, length) {
            0 => {}
            code => return Err(call_error(call, code)),
        }
        state.table.free_address(base);
        state.file.bases.remove(&base);
        Ok(())
    }

    fn create(&self, length: u64) -> DriverResult<HandleId> {
        self.check_granules(DriverCall::Create, 0, length)?;
        if !self.budget.charge(length) {
            return Err(DriverError::OutOfMemory {
                call: DriverCall::Create,
                device: Device::Host,
                requested: Bytes(length),
                code: libc::ENOMEM.into(),
            });
        }
        let mut state = self.lock();
        let handle = HandleId(state.next_handle);
        state.next_handle += 1;
        state.lengths.insert(handle, length);
        state.table.create(handle, length);
        Ok(handle)
    }

    fn release(&self, handle: HandleId) -> DriverResult<()> {
        let mut state = self.lock();
        state
            .table
            .check_release(handle)
            .map_err(|rule| Self::illegal(DriverCall::Release, rule, handle.0, 0))?;
        if state.table.release(handle) {
            self.bury(&mut state, &[handle]);
        }
        Ok(())
    }

    fn map(&self, address: u64, length: u64, handle: HandleId) -> DriverResult<()> {
        let call = DriverCall::Map;
        self.check_granules(call, address, length)?;
        let mut state = self.lock();
        state
            .table
            .check_map(address, length, handle)
            .map_err(|rule| Self::illegal(call, rule, address, length))?;
        if !state.file.placed.contains_key(&handle) {
            let base = state.table.reservation_of(address, length);
            let file_base = base.and_then(|base| state.file.bases.get(&base).map(|f| (base, *f)));
            let own_place = file_base.map(|(base, file_base)| file_base + (address - base));
            let start = match own_place {
                Some(start) if state.file.is_free(start, length) => start,
                _ => {
                    let start = state.file.end;
                    let end = start.saturating_add(length);
                    extend_file(&self.memfd, end).map_err(|code| call_error(call, code))?;
                    state.file.end = end;
                    start
                }
            };
            state.file.place(handle, start, length);
        }
        state.table.map(address, length, handle);
        Ok(())
    }

    fn set_access(&self, address: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::SetAccess;
        let mut state = self.lock();
        state
            .table
            .check_whole_mappings(address, length)
            .map_err(|rule| Self::illegal(call, rule, address, length))?;
        let before = state.table.num_accessible_runs(address, length, false);
        let after = state.table.num_accessible_runs(address, length, true);
        let num_runs = NUM_RUNS.load(Ordering::SeqCst).saturating_sub(before) + after;
        let (allowed, limit) = allowed_mappings();
        if after > before && num_runs * MAPPINGS_PER_RUN > allowed {
            return Err(DriverError::MappingLimit { call, device: Device::Host, allowed, limit });
        }
        let runs = Self::file_runs(&state, address, length);
        for (done, (start, run_length, offset)) in runs.iter().enumerate() {
            let Err(code) = map_file(&self.memfd, *start, *run_length, *offset) else {
                continue;
            };
            for (start, run_length, _) in &runs[..done] {
                let was_accessible = state.table.check_accessible(*start, *run_length).is_ok();
                if !was_accessible {
                    // A failure leaves the run accessible though the table says it is not; the
                    // caller unmaps it next, which replaces the mapping either way.
                    let _ = protect_address(*start, *run_length);
                }
            }
            return Err(call_error(call, code));
        }
        state.table.set_access(address, length);
        count_runs(before, after);
        Ok(())
    }

    fn unmap(&self, address: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::Unmap;
        let mut state = self.lock();
        state
            .table
            .check_whole_mappings(address, length)
            .map_err(|rule| Self::illegal(call, rule, address, length))?;
        let before = state.table.num_accessible_runs(address, length, false);
        if let Err(code) = protect_address(address, length) {
            return Err(call_error(call, code));
        }
        let dead = state.table.unmap(address, length);
        count_runs(before, state.table.num_accessible_runs(address, length, false));
        self.bury(&mut state, &dead);
        Ok(())
    }

    fn fill(&self, address: u64, length: u64, value: u8) -> DriverResult<()> {
        let state = self.lock();
        state
            .table
            .check_accessible(address, length)
            .map_err(|rule| Self::illegal(DriverCall::Fill, rule, address, length))?;
        fill(address, length, value).map_err(|code| call_error(DriverCall::Fill, code))
    }

    fn synchronize(&self, _fence: Fence<'_>) -> DriverResult<()> {
        Ok(())
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        Ok(self.budget.info())
    }
}
