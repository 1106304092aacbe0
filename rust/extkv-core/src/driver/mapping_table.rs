//! What is reserved, created and mapped, and which call is legal next.
//!
//! Pure bookkeeping with the rules that CUDA drivers enforce (or punish). The host driver keeps
//! its memory by it, and the checking driver holds every driver to it. `check_*` answers with the
//! rule a call would break and changes nothing; the verb itself is called after the check.

use std::collections::BTreeMap;

use super::HandleId;

/// The rule that a call breaks.
pub(super) type Rule = &'static str;

#[derive(Debug, Clone, Copy)]
struct Handle {
    length: u64,
    num_maps: u32,
    is_released: bool,
}

/// One handle mapped at one address.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapping {
    pub(super) length: u64,
    pub(super) handle: HandleId,
    pub(super) is_accessible: bool,
}

/// Reservations, handles and mappings of one driver.
#[derive(Debug, Default)]
pub(super) struct MappingTable {
    reservations: BTreeMap<u64, u64>,
    handles: BTreeMap<HandleId, Handle>,
    mappings: BTreeMap<u64, Mapping>,
}

impl MappingTable {
    pub(super) fn reserve(&mut self, base: u64, length: u64) {
        self.reservations.insert(base, length);
    }

    pub(super) fn check_free_address(&self, base: u64, length: u64) -> Result<(), Rule> {
        match self.reservations.get(&base) {
            Some(reserved) if *reserved == length => {}
            Some(_) => return Err("only a whole reservation can be freed"),
            None => return Err("the address was not reserved"),
        }
        match self.overlapping(base, length) {
            Some(_) => Err("memory is still mapped in the reservation"),
            None => Ok(()),
        }
    }

    pub(super) fn free_address(&mut self, base: u64) {
        self.reservations.remove(&base);
    }

    pub(super) fn create(&mut self, handle: HandleId, length: u64) {
        self.handles.insert(handle, Handle { length, num_maps: 0, is_released: false });
    }

    pub(super) fn check_release(&self, handle: HandleId) -> Result<(), Rule> {
        match self.handles.get(&handle) {
            Some(state) if !state.is_released => Ok(()),
            _ => Err("the handle was not created or is released already"),
        }
    }

    /// Whether the handle is mapped anywhere.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn is_mapped(&self, handle: HandleId) -> bool {
        self.handles.get(&handle).is_some_and(|state| state.num_maps > 0)
    }

    /// Gives up a handle; true when that ended its memory.
    pub(super) fn release(&mut self, handle: HandleId) -> bool {
        if let Some(state) = self.handles.get_mut(&handle) {
            state.is_released = true;
        }
        self.remove_if_dead(handle)
    }

    pub(super) fn check_map(
        &self,
        address: u64,
        length: u64,
        handle: HandleId,
    ) -> Result<(), Rule> {
        match self.handles.get(&handle) {
            Some(state) if state.is_released => return Err("the handle is released"),
            Some(state) if state.length != length => {
                return Err("only a whole handle can be mapped");
            }
            Some(_) => {}
            None => return Err("the handle was not created"),
        }
        if self.reservation_of(address, length).is_none() {
            return Err("the range is not inside one reservation");
        }
        match self.overlapping(address, length) {
            Some(_) => Err("memory is mapped in the range already"),
            None => Ok(()),
        }
    }

    pub(super) fn map(&mut self, address: u64, length: u64, handle: HandleId) {
        if let Some(state) = self.handles.get_mut(&handle) {
            state.num_maps += 1;
        }
        self.mappings.insert(address, Mapping { length, handle, is_accessible: false });
    }

    /// Whether whole mappings cover the range without a gap.
    pub(super) fn check_whole_mappings(&self, address: u64, length: u64) -> Result<(), Rule> {
        let mut next = address;
        let end = address.saturating_add(length);
        for (start, mapping) in self.mappings.range(address..end) {
            if *start != next {
                return Err("the range is not covered by whole mappings");
            }
            next = start + mapping.length;
        }
        if next == end && length > 0 {
            Ok(())
        } else {
            Err("the range is not covered by whole mappings")
        }
    }

    /// The mappings that start in the range, in address order.
    pub(super) fn mappings_in(
        &self,
        address: u64,
        length: u64,
    ) -> impl Iterator<Item = (u64, Mapping)> + '_ {
        self.mappings
            .range(address..address.saturating_add(length))
            .map(|(start, mapping)| (*start, *mapping))
    }

    /// Number of accessible stretches without a gap that touch the range: what the kernel keeps as
    /// one mapping each. With `as_if_set`, counted as if access were set on the range.
    pub(super) fn num_accessible_runs(&self, address: u64, length: u64, as_if_set: bool) -> u64 {
        let end = address.saturating_add(length);
        let before =
            self.mappings.range(..address).next_back().map_or(address, |(start, _)| *start);
        let mut num_runs = 0;
        let mut run_end = None;
        for (start, mapping) in self.mappings.range(before..=end) {
            let is_set = as_if_set && *start >= address && *start < end;
            if start + mapping.length < address || !(mapping.is_accessible || is_set) {
                continue;
            }
            if run_end != Some(*start) {
                num_runs += 1;
            }
            run_end = Some(start + mapping.length);
        }
        num_runs
    }

    pub(super) fn set_access(&mut self, address: u64, length: u64) {
        for (_, mapping) in self.mappings.range_mut(address..address.saturating_add(length)) {
            mapping.is_accessible = true;
        }
    }

    /// Removes the mappings of a checked range; returns the handles whose memory that ended.
    pub(super) fn unmap(&mut self, address: u64, length: u64) -> Vec<HandleId> {
        let removed: Vec<(u64, HandleId)> =
            self.mappings_in(address, length).map(|(start, m)| (start, m.handle)).collect();
        let mut dead = Vec::new();
        for (start, handle) in removed {
            self.mappings.remove(&start);
            if let Some(state) = self.handles.get_mut(&handle) {
                state.num_maps -= 1;
            }
            if self.remove_if_dead(handle) {
                dead.push(handle);
            }
        }
        dead
    }

    /// Whether every byte of the range (any byte range) is mapped and accessible.
    pub(super) fn check_accessible(&self, address: u64, length: u64) -> Result<(), Rule> {
        let mut next = address;
        let end = address.saturating_add(length);
        while next < end {
            match self.mappings.range(..=next).next_back() {
                Some((start, m)) if start + m.length > next && m.is_accessible => {
                    next = start + m.length;
                }
                Some((start, m)) if start + m.length > next => {
                    return Err("access was not set on the whole range");
                }
                _ => return Err("the range is not mapped"),
            }
        }
        Ok(())
    }

    /// Base of the reservation that contains the whole range.
    pub(super) fn reservation_of(&self, address: u64, length: u64) -> Option<u64> {
        let (base, reserved) = self.reservations.range(..=address).next_back()?;
        let end = address.checked_add(length)?;
        (end <= base + reserved).then_some(*base)
    }

    /// Numbers of reservations, live handles and mappings.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.reservations.len(), self.handles.len(), self.mappings.len())
    }

    fn overlapping(&self, address: u64, length: u64) -> Option<u64> {
        let end = address.saturating_add(length);
        let (start, mapping) = self.mappings.range(..end).next_back()?;
        (start + mapping.length > address).then_some(*start)
    }

    fn remove_if_dead(&mut self, handle: HandleId) -> bool {
        let is_dead =
            self.handles.get(&handle).is_some_and(|state| state.is_released && state.num_maps == 0);
        if is_dead {
            self.handles.remove(&handle);
        }
        is_dead
    }
}
