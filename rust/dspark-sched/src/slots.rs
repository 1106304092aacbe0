//! Slots of the persistent batch: stable while a request runs, told apart by generation.
//!
//! State that a runner keeps per slot belongs to one (slot, generation): when the generation is
//! new, so is the occupant, and nothing of the one before may serve it.

use std::collections::BTreeSet;

use crate::ids::{Generation, SlotId};

/// Free slots, lowest first, and the generation of each.
#[derive(Debug)]
pub(crate) struct SlotTable {
    free: BTreeSet<SlotId>,
    generations: Vec<Generation>,
}

impl SlotTable {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            free: (0..num_slots).map(SlotId).collect(),
            generations: vec![Generation(0); num_slots as usize],
        }
    }

    /// Takes the lowest free slot for a new occupant.
    pub(crate) fn try_assign(&mut self) -> Option<SlotId> {
        let slot = self.free.pop_first()?;
        let generation = &mut self.generations[slot.0 as usize];
        *generation = Generation(generation.0.wrapping_add(1));
        Some(slot)
    }

    pub(crate) fn release(&mut self, slot: SlotId) {
        self.free.insert(slot);
    }

    /// Generation of a slot's occupant.
    pub(crate) fn generation(&self, slot: SlotId) -> Generation {
        self.generations.get(slot.0 as usize).copied().unwrap_or_default()
    }

    pub(crate) fn is_free(&self, slot: SlotId) -> bool {
        self.free.contains(&slot)
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }
}
