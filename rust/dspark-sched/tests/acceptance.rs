//! What drafts were worth lately: the density of survivals and the acceptance ratio.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::controller::{AcceptanceRatio, SurvivalDensity};
use dspark_sched::step_cost::{CostTable, StepCost, StepLoad};
use dspark_sched::verify_plan::{BudgetRule, DraftBatch, PlanCost, VerifyPlanner};
use proptest::collection::vec;
use proptest::prelude::*;
use speculation::{cost_of_times, flat_cost};

#[test]
fn before_any_data_all_drafts_are_sure() {
    let density = SurvivalDensity::new(3);
    let cost = flat_cost();
    let (num_drafts, prediction) =
        density.best(&StepLoad::of_requests(4), &PlanCost::new(&cost), u32::MAX);
    assert_eq!((num_drafts, prediction.num_tokens), (12, 16.0));
    let (num_drafts, _) = density.best(&StepLoad::of_requests(4), &PlanCost::new(&cost), 5);
    assert_eq!(num_drafts, 5);
}

#[test]
fn a_step_counts_for_a_tenth_unless_it_starts_afresh() {
    let cost = flat_cost();
    let load = StepLoad::of_requests(2);
    let tokens = |density: &SurvivalDensity| {
        density.best(&load, &PlanCost::new(&cost), u32::MAX).1.num_tokens
    };
    let mut density = SurvivalDensity::new(2);
    density.observe(&[0.5, 0.25, 0.5, 0.25], 2, false);
    assert!((tokens(&density) - (2.0 + 0.9 * 4.0 + 0.1 * 1.5)).abs() < 1e-9);
    density.observe(&[0.5, 0.25, 0.5, 0.25], 2, true);
    assert!((tokens(&density) - 3.5).abs() < 1e-9);
    density.observe(&[], 0, true);
    assert!((tokens(&density) - 3.5).abs() < 1e-9, "a step of nobody says nothing");
}

#[test]
fn the_ratio_follows_a_change_at_once_and_what_was_usual_slowly() {
    let mut ratio = AcceptanceRatio::default();
    (0..200).for_each(|_| ratio.observe(50.0, 50.0));
    (0..20).for_each(|_| ratio.observe(50.0, 25.0));
    assert!(ratio.value() < 0.55, "{}", ratio.value());
    assert!(ratio.usual() > 0.85, "{}", ratio.usual());
    (0..400).for_each(|_| ratio.observe(50.0, 25.0));
    assert!((ratio.usual() - 0.5).abs() < 0.02, "{}", ratio.usual());
}

#[test]
fn the_ratio_forgets_and_ignores_what_cannot_be() {
    let mut ratio = AcceptanceRatio::default();
    assert_eq!(ratio.value(), 1.0);
    for (predicted, accepted) in [(f64::NAN, 1.0), (1.0, f64::INFINITY), (0.0, 0.0)] {
        ratio.observe(predicted, accepted);
        assert_eq!(ratio.value(), 1.0);
    }
    (0..500).for_each(|_| ratio.observe(100.0, 50.0));
    assert!((ratio.value() - 0.5).abs() < 0.01, "{}", ratio.value());
    (0..500).for_each(|_| ratio.observe(100.0, 100.0));
    assert!((ratio.value() - 1.0).abs() < 0.01, "{}", ratio.value());
    ratio.weaken(1e9);
    assert!((ratio.value() - 1.0).abs() < 0.01, "{}", ratio.value());
    ratio.observe(64.0, 0.0);
    assert!((ratio.value() - 0.5).abs() < 0.01, "{}", ratio.value());
    (0..500).for_each(|_| ratio.observe(1.0, 100.0));
    assert_eq!(ratio.value(), 8.0);
}

#[test]
fn a_probe_weighs_about_as_much_as_what_was_known_before() {
    for predicted in [10.0, 60.0] {
        let mut ratio = AcceptanceRatio::default();
        (0..200).for_each(|_| ratio.observe(100.0, 100.0));
        ratio.weaken(predicted);
        ratio.observe(predicted, 3.0 * predicted);
        assert!((ratio.value() - 2.0).abs() < 0.1, "{predicted} {}", ratio.value());
    }
    // One that predicts next to nothing says next to nothing: chance would count most.
    let mut ratio = AcceptanceRatio::default();
    ratio.weaken(0.1);
    ratio.observe(0.1, 1.0);
    assert!(ratio.value() < 1.2, "{}", ratio.value());
}

proptest! {
    /// Of one step the density says what the budget says, up to the width of its bins.
    #[test]
    fn of_one_step_it_agrees_with_the_budget(
        confidences in vec(0.0_f32..=1.0, 4 * 3),
        steps in vec(prop_oneof![2 => Just(0.0), 1 => 0.0..0.5_f64], 16),
        tiers in proptest::bool::ANY,
    ) {
        let mut total = 1.0;
        let times: Vec<f64> = steps.iter().map(|step| { total += step; total }).collect();
        let tiers = if tiers { vec![4, 6, 9, 12, 16] } else { Vec::new() };
        let table = CostTable { tiers, ..cost_of_times(&times).table() };
        let cost = StepCost::new(table).unwrap();
        let cost = PlanCost::new(&cost);
        let survival: Vec<f32> = confidences.chunks_exact(3).flat_map(dspark_sched::survival).collect();
        let mut density = SurvivalDensity::new(3);
        density.observe(&survival, 4, true);
        let (_, pooled) = density.best(&StepLoad::of_requests(4), &cost, u32::MAX);
        let batch = DraftBatch::new(&survival, 4);
        let mut planner = VerifyPlanner::new(4, 3).unwrap();
        let exact = planner.budget(&batch, &cost, &BudgetRule::default()).unwrap().prediction;
        let [pooled, exact] = [pooled, exact].map(|p| p.num_tokens / p.step_us);
        prop_assert!(pooled <= exact * 1.02 + 1e-9 && pooled >= exact * 0.98, "{pooled} {exact}");
    }
}
