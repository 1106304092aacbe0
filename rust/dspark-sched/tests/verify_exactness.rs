//! The law of the output with each planner in the loop, by enumeration of a small world.
//!
//! Two tokens, two drafts, up to two requests. Confidences of the second draft depend on the first,
//! as the head's do. Planning is exact when the output has the target's law; a planner that looks
//! ahead must fail, or the test proves nothing.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::step_cost::{CostTable, StepCost};
use dspark_sched::verify_plan::{DraftBatch, PlanCost, VerifyPlanner, exhaustive_plan};
use proptest::collection::vec;
use proptest::prelude::*;
use speculation::{cost_of_rates, cost_of_times};

type Law = [f64; 2];

/// One request: laws of the first token, and of the second after each first.
#[derive(Debug, Clone)]
struct World {
    target: Law,
    target_next: [Law; 2],
    draft: Law,
    draft_next: [Law; 2],
    first_confidence: f32,
    second_confidence: [f32; 2],
}

impl World {
    fn confidences(&self, drafts: [usize; 2]) -> [f32; 2] {
        [self.first_confidence, self.second_confidence[drafts[0]]]
    }

    fn probability_of_drafts(&self, drafts: [usize; 2]) -> f64 {
        self.draft[drafts[0]] * self.draft_next[drafts[0]][drafts[1]]
    }

    /// Law of the first two output tokens, given drafts and how many are verified.
    fn output(&self, drafts: [usize; 2], verify_len: u32) -> [Law; 2] {
        let mut law = [[0.0; 2]; 2];
        let first = match verify_len {
            0 => self.target.map(|p| (p, false)),
            _ => verified(&self.target, &self.draft, drafts[0]),
        };
        for (token, (probability, is_draft)) in first.into_iter().enumerate() {
            let next = &self.target_next[token];
            // Without an accepted first draft the second token comes from a later step: law p.
            let second = if is_draft && verify_len == 2 {
                let kept = verified(next, &self.draft_next[token], drafts[1]);
                kept.map(|(probability, _)| probability)
            } else {
                *next
            };
            for (other, share) in second.into_iter().enumerate() {
                law[token][other] += probability * share;
            }
        }
        if verify_len > 0 {
            let rejected = residual_law(&self.target, &self.draft, drafts[0]);
            for (token, probability) in rejected.into_iter().enumerate() {
                for (mass, next) in law[token].iter_mut().zip(self.target_next[token]) {
                    *mass += probability * next;
                }
            }
        }
        law
    }

    fn exact(&self) -> [Law; 2] {
        std::array::from_fn(|i| std::array::from_fn(|j| self.target[i] * self.target_next[i][j]))
    }
}

/// Probability of each token by way of accepting `drafted`, and whether that is the way.
fn verified(target: &Law, draft: &Law, drafted: usize) -> [(f64, bool); 2] {
    let accept = (target[drafted] / draft[drafted]).min(1.0);
    let mut law = [(0.0, false); 2];
    law[drafted] = (accept, true);
    law
}

/// Probability of each token by way of rejecting `drafted`.
fn residual_law(target: &Law, draft: &Law, drafted: usize) -> Law {
    let reject = 1.0 - (target[drafted] / draft[drafted]).min(1.0);
    let residual: Law = std::array::from_fn(|token| (target[token] - draft[token]).max(0.0));
    let total: f64 = residual.iter().sum();
    if total == 0.0 { [0.0; 2] } else { residual.map(|mass| reject * mass / total) }
}

const DRAFTS: [[usize; 2]; 4] = [[0, 0], [0, 1], [1, 0], [1, 1]];

/// Second tokens that were verified as drafts need their residual too.
fn output_law(world: &World, drafts: [usize; 2], verify_len: u32) -> [Law; 2] {
    let mut law = world.output(drafts, verify_len);
    if verify_len == 2 {
        let token = drafts[0];
        let accepted = (world.target[token] / world.draft[token]).min(1.0);
        let (next, draft) = (&world.target_next[token], &world.draft_next[token]);
        let rejected = residual_law(next, draft, drafts[1]);
        for (mass, rejected) in law[token].iter_mut().zip(rejected) {
            *mass += accepted * rejected;
        }
    }
    law
}

/// Largest distance of the joint law of all outputs from the target's.
fn error_of(worlds: &[World], mut plan: impl FnMut(&[f32]) -> Vec<u32>) -> f64 {
    let num_outcomes = 4_usize.pow(u32::try_from(worlds.len()).unwrap());
    let digits = |mut index: usize| -> Vec<usize> {
        let digit = |_| {
            let digit = index % 4;
            index /= 4;
            digit
        };
        worlds.iter().map(digit).collect()
    };
    let mut joint = vec![0.0; num_outcomes];
    for index in 0..num_outcomes {
        let drafts: Vec<[usize; 2]> = digits(index).iter().map(|&digit| DRAFTS[digit]).collect();
        let rows = worlds.iter().zip(&drafts);
        let confidences: Vec<f32> = rows.clone().flat_map(|(w, &d)| w.confidences(d)).collect();
        let survival: Vec<f32> =
            confidences.chunks_exact(2).flat_map(dspark_sched::survival).collect();
        let lens = plan(&survival);
        let weight: f64 = rows.clone().map(|(w, &d)| w.probability_of_drafts(d)).product();
        let laws: Vec<[Law; 2]> =
            rows.zip(&lens).map(|((w, &d), &len)| output_law(w, d, len)).collect();
        for (outcome, mass) in joint.iter_mut().enumerate() {
            let tokens = digits(outcome);
            let parts = laws.iter().zip(&tokens);
            *mass += weight * parts.map(|(law, &t)| law[t / 2][t % 2]).product::<f64>();
        }
    }
    let exact = (0..num_outcomes).map(|outcome| {
        let parts = worlds.iter().zip(digits(outcome));
        parts.map(|(world, t)| world.exact()[t / 2][t % 2]).product::<f64>()
    });
    joint.iter().zip(exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn greedy_lens(survival: &[f32], cost: &StepCost) -> Vec<u32> {
    let num_requests = u32::try_from(survival.len() / 2).unwrap();
    let mut planner = VerifyPlanner::new(2, 2).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    planner.greedy(&batch, &PlanCost::new(cost), None).unwrap().verify_lens.clone()
}

fn tiered_lens(survival: &[f32], cost: &StepCost, envelope: &StepCost) -> Vec<u32> {
    let num_requests = u32::try_from(survival.len() / 2).unwrap();
    let mut planner = VerifyPlanner::new(2, 2).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    let (cost, envelope) = (PlanCost::new(cost), PlanCost::new(envelope));
    planner.greedy_on_tiers(&batch, &cost, &envelope, None).unwrap().verify_lens.clone()
}

fn top_lens(survival: &[f32], budget: u32) -> Vec<u32> {
    let num_requests = u32::try_from(survival.len() / 2).unwrap();
    let mut planner = VerifyPlanner::new(2, 2).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    planner.top(&batch, budget, None).unwrap().verify_lens.clone()
}

fn look_ahead_lens(survival: &[f32], cost: &StepCost) -> Vec<u32> {
    let num_requests = u32::try_from(survival.len() / 2).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    exhaustive_plan(&batch, 2, &PlanCost::new(cost)).unwrap().verify_lens
}

fn appendix_a() -> World {
    World {
        target: [0.7, 0.3],
        target_next: [[0.5, 0.5]; 2],
        draft: [0.5, 0.5],
        draft_next: [[0.5, 0.5]; 2],
        first_confidence: 0.8,
        second_confidence: [0.9, 0.0],
    }
}

#[test]
fn looking_ahead_outputs_another_law_in_appendix_a() {
    let world = appendix_a();
    let cost = cost_of_rates(&[1.0, 0.5, 0.45]);
    let mut first = [0.0; 2];
    for drafts in DRAFTS {
        let survival: Vec<f32> = dspark_sched::survival(&world.confidences(drafts)).collect();
        let lens = look_ahead_lens(&survival, &cost);
        assert_eq!(lens, [if drafts[0] == 0 { 2 } else { 0 }]);
        let law = output_law(&world, drafts, lens[0]);
        let weight = world.probability_of_drafts(drafts);
        (0..2).for_each(|token| first[token] += weight * law[token].iter().sum::<f64>());
    }
    assert!((first[0] - 0.85).abs() < 1e-12 && (first[1] - 0.15).abs() < 1e-12, "{first:?}");
}

#[test]
fn ours_output_the_targets_law_in_appendix_a() {
    let world = [appendix_a()];
    let cost = cost_of_rates(&[1.0, 0.5, 0.45]);
    assert!(error_of(&world, |survival| greedy_lens(survival, &cost)) < 1e-12);
    for budget in 0..=2 {
        assert!(error_of(&world, |survival| top_lens(survival, budget)) < 1e-12);
    }
}

#[test]
fn a_least_gain_of_the_finished_plan_looks_ahead() {
    // Drafts are admitted while Θ rises, but the whole plan is dropped below a gain of 90 %.
    let world = [World { first_confidence: 0.9, ..appendix_a() }];
    let cost = cost_of_times(&[1.0, 1.1, 1.2]);
    let gated = |survival: &[f32]| {
        let mut planner = VerifyPlanner::new(1, 2).unwrap();
        let batch = DraftBatch::new(survival, 1);
        let plan = planner.greedy(&batch, &PlanCost::new(&cost), None).unwrap();
        let gain = plan.report.prediction.unwrap().gain;
        if gain < 0.9 { vec![0] } else { plan.verify_lens.clone() }
    };
    assert!(error_of(&world, gated) > 0.05);
    assert!(error_of(&world, |survival| greedy_lens(survival, &cost)) < 1e-12);
}

fn law() -> impl Strategy<Value = Law> {
    (0.05..0.95_f64).prop_map(|p| [p, 1.0 - p])
}

fn world() -> impl Strategy<Value = World> {
    let laws = (law(), [law(), law()], law(), [law(), law()]);
    let confidence = || prop_oneof![3 => 0.0_f32..=1.0, 1 => Just(0.5_f32)];
    (laws, confidence(), [confidence(), confidence()]).prop_map(
        |((target, target_next, draft, draft_next), first_confidence, second_confidence)| World {
            target,
            target_next,
            draft,
            draft_next,
            first_confidence,
            second_confidence,
        },
    )
}

proptest! {
    #[test]
    fn every_planner_keeps_the_joint_law(
        worlds in vec(world(), 1..=2),
        steps in vec(prop_oneof![Just(0.0), 0.0..0.8_f64], 6),
        budget in 0_u32..=4,
        verify_len in 0_u32..=2,
    ) {
        let mut total = 1.0;
        let times: Vec<f64> = steps.iter().map(|step| { total += step; total }).collect();
        let cost = cost_of_times(&times);
        let table = CostTable { tiers: vec![2, 4, 5], ..cost.table() };
        let tiers = StepCost::new(table).unwrap();
        let envelope = tiers.envelope();
        let on_tiers = |survival: &[f32]| tiered_lens(survival, &tiers, &envelope);
        prop_assert!(error_of(&worlds, on_tiers) < 1e-12);
        prop_assert!(error_of(&worlds, |survival| greedy_lens(survival, &cost)) < 1e-12);
        prop_assert!(error_of(&worlds, |survival| top_lens(survival, budget)) < 1e-12);
        let fixed = |survival: &[f32]| vec![verify_len; survival.len() / 2];
        prop_assert!(error_of(&worlds, fixed) < 1e-12);
    }
}
