//! Survivals of earlier steps, by slot: what a budget may be made of.
//!
//! Invariants: a step reads only what was recorded at least `lag` steps before it, and an occupant
//! of a slot reads only its own records. A request without such a record counts as survival 1, so
//! that it is tried.

use crate::ids::{Generation, SlotId, StepId};
use crate::verify_plan::PlanError;

/// A request's place in the persistent batch, and which occupant of it the request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRow {
    /// The slot.
    pub slot_id: SlotId,
    /// Generation of the slot: a record of another one is another request's.
    pub generation: Generation,
}

/// Survivals per slot, with a delay.
#[derive(Debug, Clone)]
pub struct SurvivalHistory {
    num_drafts: usize,
    lag: u64,
    /// The newest readable record of each slot.
    settled: Frame,
    /// Records too young to be read, oldest first.
    pending: Vec<Frame>,
    num_pending: usize,
    last_recorded: Option<StepId>,
}

#[derive(Debug, Clone)]
struct Frame {
    step_id: StepId,
    occupants: Vec<Option<Generation>>,
    survival: Vec<f32>,
}

impl SurvivalHistory {
    /// A history of `num_slots` slots with γ = `num_drafts`, read `lag` steps later: 2 in the paper's
    /// production form, 1 in engines that plan after the previous step's drafts.
    ///
    /// # Errors
    /// [`PlanError::ZeroLag`]; [`PlanError::Zero`]; [`PlanError::TooMany`] for a lag above 16.
    pub fn new(num_slots: usize, num_drafts: usize, lag: u32) -> Result<Self, PlanError> {
        const MAX_LAG: u32 = 16;
        if lag == 0 {
            return Err(PlanError::ZeroLag);
        }
        if lag > MAX_LAG {
            let (asked, limit) = (lag as usize, MAX_LAG as usize);
            return Err(PlanError::TooMany { name: "lag", asked, limit });
        }
        for (name, size) in [("num_slots", num_slots), ("num_drafts", num_drafts)] {
            if size == 0 {
                return Err(PlanError::Zero { name });
            }
        }
        let frame = Frame {
            step_id: StepId(0),
            occupants: vec![None; num_slots],
            survival: vec![0.0; num_slots * num_drafts],
        };
        Ok(Self {
            num_drafts,
            lag: u64::from(lag),
            pending: vec![frame.clone(); lag as usize],
            settled: frame,
            num_pending: 0,
            last_recorded: None,
        })
    }

    /// Stores the survivals `[R, γ]` of a step's rows.
    ///
    /// # Errors
    /// [`PlanError::StepOrder`], [`PlanError::UnknownSlot`] or [`PlanError::WrongLength`].
    pub fn record(
        &mut self,
        step_id: StepId,
        rows: &[SlotRow],
        survival: &[f32],
    ) -> Result<(), PlanError> {
        self.check(rows, survival.len())?;
        if let Some(last) = self.last_recorded.filter(|&last| step_id <= last) {
            return Err(PlanError::StepOrder { found: step_id, last });
        }
        self.settle(step_id);
        self.last_recorded = Some(step_id);
        let frame = &mut self.pending[self.num_pending];
        self.num_pending += 1;
        frame.step_id = step_id;
        frame.occupants.fill(None);
        for (row, survival) in rows.iter().zip(survival.chunks_exact(self.num_drafts)) {
            let slot = row.slot_id.0 as usize;
            frame.occupants[slot] = Some(row.generation);
            frame.survival[slot * self.num_drafts..][..self.num_drafts].copy_from_slice(survival);
        }
        Ok(())
    }

    /// Writes into `survival` `[R, γ]` what `step_id` may know of each row, and returns the number
    /// of rows without a record, which are 1 throughout.
    ///
    /// # Errors
    /// [`PlanError::UnknownSlot`] or [`PlanError::WrongLength`].
    pub fn read(
        &mut self,
        step_id: StepId,
        rows: &[SlotRow],
        survival: &mut [f32],
    ) -> Result<u32, PlanError> {
        self.check(rows, survival.len())?;
        self.settle(step_id);
        let mut num_unknown = 0;
        for (row, out) in rows.iter().zip(survival.chunks_exact_mut(self.num_drafts)) {
            let slot = row.slot_id.0 as usize;
            if self.settled.occupants[slot] == Some(row.generation) {
                let start = slot * self.num_drafts;
                out.copy_from_slice(&self.settled.survival[start..][..self.num_drafts]);
            } else {
                out.fill(1.0);
                num_unknown += 1;
            }
        }
        Ok(num_unknown)
    }

    /// Moves records that are old enough for `step_id` to where they are read.
    fn settle(&mut self, step_id: StepId) {
        let is_old = |frame: &Frame| frame.step_id.0.saturating_add(self.lag) <= step_id.0;
        let num_old = self.pending[..self.num_pending].iter().filter(|f| is_old(f)).count();
        for frame in &self.pending[..num_old] {
            for (slot, occupant) in frame.occupants.iter().enumerate() {
                if occupant.is_some() {
                    let span = slot * self.num_drafts..(slot + 1) * self.num_drafts;
                    self.settled.occupants[slot] = *occupant;
                    self.settled.survival[span.clone()].copy_from_slice(&frame.survival[span]);
                }
            }
        }
        self.pending[..self.num_pending].rotate_left(num_old);
        self.num_pending -= num_old;
    }

    fn check(&self, rows: &[SlotRow], found: usize) -> Result<(), PlanError> {
        let num_slots = self.settled.occupants.len();
        if let Some(row) = rows.iter().find(|row| row.slot_id.0 as usize >= num_slots) {
            return Err(PlanError::UnknownSlot { slot_id: row.slot_id, num_slots });
        }
        crate::verify_plan::check_length("survival", found, rows.len() * self.num_drafts)
    }
}
