//! A driver for tests: refuses illegal sequences and fails the calls a test chooses.
//!
//! It is stricter than any device: a mapped handle may not be released, and a range may not be
//! filled before access was set. A refused or failed call never reaches the driver below.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mapping_table::{MappingTable, Rule};
use super::{AllocationProperties, Device, DriverCall, Fence, HandleId, MemoryInfo, VmmDriver};
use crate::error::{DriverError, DriverResult};
use crate::units::Bytes;

/// What a driver still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leftovers {
    /// Address ranges not given back.
    pub num_reservations: usize,
    /// Physical handles not given back.
    pub num_handles: usize,
    /// Mappings not undone.
    pub num_mappings: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Fail the call of that index, counted over calls of every kind.
    Any(u64),
    /// Fail the call of that index, counted over calls of its own kind.
    Kind(DriverCall, u64),
    /// Fail every call from that index on, counted over calls of every kind.
    AllFrom(u64),
}

#[derive(Debug, Default)]
struct State {
    table: MappingTable,
    faults: Vec<Fault>,
    num_calls: u64,
    num_calls_of: [u64; DriverCall::ALL.len()],
}

/// Legality checker and fault injector over another driver.
#[derive(Debug)]
pub struct CheckedDriver {
    inner: Arc<dyn VmmDriver>,
    state: Mutex<State>,
}

impl CheckedDriver {
    /// Wraps `inner`; nothing fails until a test asks.
    #[must_use]
    pub fn new(inner: Arc<dyn VmmDriver>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Fails the call `index` calls from now (0 is the next), whatever its kind.
    pub fn fail_nth(&self, index: u64) {
        let mut state = self.lock();
        let at = state.num_calls + index;
        state.faults.push(Fault::Any(at));
    }

    /// Fails the call of kind `call` that is `index` such calls from now (0 is the next).
    pub fn fail_nth_of(&self, call: DriverCall, index: u64) {
        let mut state = self.lock();
        let at = state.num_calls_of[call.index()] + index;
        state.faults.push(Fault::Kind(call, at));
    }

    /// Fails every call from `index` calls from now on.
    pub fn fail_all_from(&self, index: u64) {
        let mut state = self.lock();
        let at = state.num_calls + index;
        state.faults.push(Fault::AllFrom(at));
    }

    /// Forgets all faults that were asked for.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Calls made so far, refused and failed ones included.
    #[must_use]
    pub fn num_calls(&self) -> u64 {
        self.lock().num_calls
    }

    /// Calls of one kind made so far.
    #[must_use]
    pub fn num_calls_of(&self, call: DriverCall) -> u64 {
        self.lock().num_calls_of[call.index()]
    }

    /// What has not been given back.
    #[must_use]
    pub fn leftovers(&self) -> Leftovers {
        let (num_reservations, num_handles, num_mappings) = self.lock().table.counts();
        Leftovers { num_reservations, num_handles, num_mappings }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the call and fails it if a test asked so.
    fn enter(&self, call: DriverCall) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let (any, of_kind) = (state.num_calls, state.num_calls_of[call.index()]);
        state.num_calls += 1;
        state.num_calls_of[call.index()] += 1;
        let is_hit = state.faults.iter().any(|fault| match *fault {
            Fault::Any(at) => at == any,
            Fault::Kind(kind, at) => kind == call && at == of_kind,
            Fault::AllFrom(at) => any >= at,
        });
        if is_hit {
            return Err(DriverError::Injected { call, device: self.device(), index: any });
        }
        Ok(state)
    }

    fn illegal(&self, call: DriverCall, rule: Rule, address: u64, length: u64) -> DriverError {
        DriverError::Illegal { call, device: self.device(), rule, address, length: Bytes(length) }
    }

    fn check_granules(&self, call: DriverCall, address: u64, length: u64) -> DriverResult<()> {
        let granule = self.granularity();
        if length == 0 || !length.is_multiple_of(granule) || !address.is_multiple_of(granule) {
            return Err(self.illegal(call, "not a whole number of granules", address, length));
        }
        Ok(())
    }
}

impl VmmDriver for CheckedDriver {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn fresh_memory_is_zero(&self) -> bool {
        self.inner.fresh_memory_is_zero()
    }

    fn properties(&self) -> AllocationProperties {
        self.inner.properties()
    }

    fn reserve(&self, length: u64) -> DriverResult<u64> {
        let mut state = self.enter(DriverCall::Reserve)?;
        self.check_granules(DriverCall::Reserve, 0, length)?;
        let base = self.inner.reserve(length)?;
        state.table.reserve(base, length);
        Ok(base)
    }

    fn free_address(&self, base: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::FreeAddress;
        let mut state = self.enter(call)?;
        state
            .table
            .check_free_address(base, length)
            .map_err(|rule| self.illegal(call, rule, base, length))?;
        self.inner.free_address(base, length)?;
        state.table.free_address(base);
        Ok(())
    }

    fn create(&self, length: u64) -> DriverResult<HandleId> {
        let mut state = self.enter(DriverCall::Create)?;
        self.check_granules(DriverCall::Create, 0, length)?;
        let handle = self.inner.create(length)?;
        state.table.create(handle, length);
        Ok(handle)
    }

    fn release(&self, handle: HandleId) -> DriverResult<()> {
        let call = DriverCall::Release;
        let mut state = self.enter(call)?;
        let illegal = |rule| self.illegal(call, rule, handle.0, 0);
        state.table.check_release(handle).map_err(illegal)?;
        if state.table.is_mapped(handle) {
            return Err(illegal("the handle is still mapped"));
        }
        self.inner.release(handle)?;
        state.table.release(handle);
        Ok(())
    }

    fn map(&self, address: u64, length: u64, handle: HandleId) -> DriverResult<()> {
        let call = DriverCall::Map;
        let mut state = self.enter(call)?;
        self.check_granules(call, address, length)?;
        let illegal = |rule| self.illegal(call, rule, address, length);
        state.table.check_map(address, length, handle).map_err(illegal)?;
        if state.table.is_mapped(handle) {
            return Err(illegal("the handle is mapped already"));
        }
        self.inner.map(address, length, handle)?;
        state.table.map(address, length, handle);
        Ok(())
    }

    fn set_access(&self, address: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::SetAccess;
        let mut state = self.enter(call)?;
        state
            .table
            .check_whole_mappings(address, length)
            .map_err(|rule| self.illegal(call, rule, address, length))?;
        self.inner.set_access(address, length)?;
        state.table.set_access(address, length);
        Ok(())
    }

    fn unmap(&self, address: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::Unmap;
        let mut state = self.enter(call)?;
        state
            .table
            .check_whole_mappings(address, length)
            .map_err(|rule| self.illegal(call, rule, address, length))?;
        self.inner.unmap(address, length)?;
        state.table.unmap(address, length);
        Ok(())
    }

    fn fill(&self, address: u64, length: u64, value: u8) -> DriverResult<()> {
        let call = DriverCall::Fill;
        let state = self.enter(call)?;
        state
            .table
            .check_accessible(address, length)
            .map_err(|rule| self.illegal(call, rule, address, length))?;
        self.inner.fill(address, length, value)
    }

    fn synchronize(&self, fence: Fence<'_>) -> DriverResult<()> {
        drop(self.enter(DriverCall::Synchronize)?);
        self.inner.synchronize(fence)
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        drop(self.enter(DriverCall::MemoryInfo)?);
        self.inner.memory_info()
    }
}
