//! Steps that were decided and not yet observed, oldest first.
//!
//! An engine that works ahead decides a step before the one before it is planned. At most `lag` steps
//! are in flight: a further one could not know anything that is not in flight. Buffers are reused.

use std::collections::VecDeque;

use super::report::Decision;
use crate::ids::StepId;
use crate::step_cost::StepLoad;
use crate::survival_history::SlotRow;
use crate::verify_plan::{PlanError, PlanReport};

/// A step in flight.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) step_id: StepId,
    pub(super) load: StepLoad,
    pub(super) decision: Decision,
    /// Whether it is a probe that begins a row of them.
    pub(super) begins_row: bool,
    pub(super) is_planned: bool,
    pub(super) rows: Vec<SlotRow>,
    /// `[R]` most drafts of each row.
    pub(super) limits: Vec<u32>,
    /// `[R, γ]`, once planned.
    pub(super) survival: Vec<f32>,
    /// `[R]`, once planned.
    pub(super) verify_lens: Vec<u32>,
    /// What the plan asks for, once planned.
    pub(super) plan: PlanReport,
}

impl Step {
    fn with_capacity(num_slots: usize, num_drafts: usize) -> Self {
        Self {
            step_id: StepId(0),
            load: StepLoad::default(),
            decision: Decision::default(),
            begins_row: false,
            is_planned: false,
            rows: Vec::with_capacity(num_slots),
            limits: Vec::with_capacity(num_slots),
            survival: Vec::with_capacity(num_slots.saturating_mul(num_drafts)),
            verify_lens: Vec::with_capacity(num_slots),
            plan: PlanReport::default(),
        }
    }
}

/// The steps in flight.
#[derive(Debug, Clone)]
pub(super) struct StepsInFlight {
    steps: VecDeque<Step>,
    spare: Vec<Step>,
    limit: usize,
}

impl StepsInFlight {
    pub(super) fn new(limit: usize, num_slots: usize, num_drafts: usize) -> Self {
        let spare = vec![Step::with_capacity(num_slots, num_drafts); limit];
        // A clone keeps no capacity; the first steps grow the buffers once.
        Self { steps: VecDeque::with_capacity(limit), spare, limit }
    }

    /// A step to fill, taken out of use.
    pub(super) fn take_spare(&mut self) -> Result<Step, PlanError> {
        let asked = self.limit + 1;
        let refused = PlanError::TooMany { name: "steps in flight", asked, limit: self.limit };
        self.spare.pop().ok_or(refused)
    }

    /// Puts a step at the end.
    pub(super) fn push(&mut self, step: Step) {
        self.steps.push_back(step);
    }

    /// Gives a step's buffers back.
    pub(super) fn recycle(&mut self, step: Step) {
        self.spare.push(step);
    }

    /// The oldest step.
    pub(super) fn oldest(&self) -> Option<&Step> {
        self.steps.front()
    }

    /// The oldest step that drafts and has no plan yet.
    pub(super) fn oldest_unplanned(&mut self) -> Option<&mut Step> {
        self.steps.iter_mut().find(|step| step.decision.drafts && !step.is_planned)
    }

    /// Ends the oldest step.
    pub(super) fn finish_oldest(&mut self) {
        self.spare.extend(self.steps.pop_front());
    }

    /// Gives the newest step up; its number, if there was one.
    pub(super) fn cancel_newest(&mut self) -> Option<StepId> {
        let step = self.steps.pop_back()?;
        let step_id = step.step_id;
        self.spare.push(step);
        Some(step_id)
    }
}
