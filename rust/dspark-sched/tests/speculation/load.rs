//! A full load that benches and allocation tests plan for: 512 requests of 7 drafts.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use dspark_sched::StepId;
use dspark_sched::controller::{ControllerSettings, SpeculationController};
use dspark_sched::step_cost::{CostTable, Drafting, Knot, StepCost, StepLoad};
use dspark_sched::survival_history::SlotRow;

use super::{Random, slot_rows, survival_of};

pub(crate) const NUM_REQUESTS: u32 = 512;
pub(crate) const NUM_DRAFTS: usize = 7;

/// Confidences of mean 0.8.
fn random_confidences(seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    let num_cells = NUM_REQUESTS as usize * NUM_DRAFTS;
    (0..num_cells).map(|_| random.uniform().powf(0.25) as f32).collect()
}

/// Survival of random confidences.
pub(crate) fn random_survival(seed: u64) -> Vec<f32> {
    let confidences = random_confidences(seed);
    survival_of(&confidences.chunks_exact(NUM_DRAFTS).collect::<Vec<_>>())
}

/// A table with graph tiers and a knee at 1024 tokens, up to which drafts pay.
pub(crate) fn stairs() -> StepCost {
    let table = CostTable {
        token_us: vec![Knot(1, 4000.0), Knot(1024, 9000.0), Knot(4096, 110_000.0)],
        draft_us: vec![Knot(1, 900.0), Knot(512, 1600.0)],
        tiers: (1..=128).map(|tier| tier * 8).collect(),
        ..CostTable::default()
    };
    StepCost::new(table).unwrap()
}

/// The controller's loop over one load whose confidences change from step to step.
pub(crate) struct SteadyLoop {
    controller: SpeculationController,
    cost: StepCost,
    rows: Vec<SlotRow>,
    confidences: [Vec<f32>; 4],
    accepted: Vec<u32>,
    step: u64,
}

impl SteadyLoop {
    pub(crate) fn new() -> Self {
        let settings = ControllerSettings::new(NUM_REQUESTS as usize, NUM_DRAFTS);
        let cost = stairs();
        Self {
            controller: SpeculationController::new(settings, Some(cost.clone())).unwrap(),
            cost,
            rows: slot_rows(NUM_REQUESTS, 1),
            confidences: [1, 2, 3, 4].map(random_confidences),
            accepted: Vec::with_capacity(NUM_REQUESTS as usize),
            step: 0,
        }
    }

    /// One step; returns the drafts that it verified.
    pub(crate) fn step(&mut self) -> u32 {
        self.step += 1;
        let load = StepLoad::of_requests(NUM_REQUESTS);
        let decision =
            self.controller.decide(StepId(self.step), &self.rows, load, None, None).unwrap();
        self.accepted.clear();
        let (mut num_drafts, mut drafting) = (0, Drafting::Skipped);
        if decision.drafts {
            let confidences = &self.confidences[self.step as usize % self.confidences.len()];
            let plan = self.controller.plan(confidences).unwrap();
            (num_drafts, drafting) = (plan.report.num_admitted, Drafting::Paid);
            self.accepted.extend(plan.verify_lens.iter().map(|len| len.div_ceil(2)));
        }
        let us = self.cost.step_us(&load, num_drafts, drafting);
        self.controller.observe(&self.accepted, Some(us)).unwrap();
        num_drafts
    }
}
