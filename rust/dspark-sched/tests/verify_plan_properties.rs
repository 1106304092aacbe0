//! What holds for every plan: optimality against every plan tried, prefixes, causality.

#![allow(clippy::unwrap_used)]

mod speculation;

use std::ops::RangeInclusive;

use dspark_sched::step_cost::{CostTable, StepCost};
use dspark_sched::verify_plan::{BudgetRule, DraftBatch, PlanCost, VerifyPlanner, exhaustive_plan};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use speculation::cost_of_times;

/// Confidences, with ties and what is no probability among them.
fn confidence() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => 0.0_f32..=1.0,
        3 => prop_oneof![Just(0.5_f32), Just(1.0), Just(0.0)],
        1 => prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(-1.0)],
    ]
}

/// Requests, drafts, confidences `[R, γ]`.
fn confidences() -> impl Strategy<Value = (u32, usize, Vec<f32>)> {
    confidences_of(0..=4)
}

fn confidences_of(requests: RangeInclusive<u32>) -> impl Strategy<Value = (u32, usize, Vec<f32>)> {
    (requests, 1_usize..=4).prop_flat_map(|(num_requests, num_drafts)| {
        let cells = num_requests as usize * num_drafts;
        (Just(num_requests), Just(num_drafts), vec(confidence(), cells))
    })
}

/// A table that rises by steps given.
fn rising(steps: &[f64]) -> StepCost {
    let mut total = 1.0;
    let times: Vec<f64> = steps
        .iter()
        .map(|step| {
            total += step;
            total
        })
        .collect();
    cost_of_times(&times)
}

/// Stairs: many steps of 0, some large.
fn stairs() -> impl Strategy<Value = StepCost> {
    vec(prop_oneof![3 => Just(0.0), 1 => 0.0..0.6_f64], 21).prop_map(|steps| rising(&steps))
}

/// Ever steeper, so that Θ has one maximum.
fn convex() -> impl Strategy<Value = StepCost> {
    vec(0.0..0.3_f64, 21).prop_map(|mut steps| {
        steps.sort_by(f64::total_cmp);
        rising(&steps)
    })
}

fn survival(confidences: &[f32], num_drafts: usize) -> Vec<f32> {
    confidences.chunks_exact(num_drafts).flat_map(dspark_sched::survival).collect()
}

fn rate_of(lens: &[u32], survival: &[f32], num_drafts: usize, cost: &StepCost) -> f64 {
    let mut planner = VerifyPlanner::new(lens.len().max(1), num_drafts).unwrap();
    let requests = u32::try_from(lens.len()).unwrap();
    let batch = DraftBatch { limits: Some(lens), ..DraftBatch::new(survival, requests) };
    let cost = PlanCost::new(cost);
    let plan = planner.fixed(&batch, u32::MAX, Some(&cost)).unwrap();
    let prediction = plan.report.prediction.unwrap();
    prediction.num_tokens / prediction.step_us
}

proptest! {
    #[test]
    fn greedy_equals_the_oracle_where_the_rate_has_one_maximum(
        (num_requests, num_drafts, confidences) in confidences(), cost in convex()
    ) {
        let survival = survival(&confidences, num_drafts);
        let batch = DraftBatch::new(&survival, num_requests);
        let mut planner = VerifyPlanner::new(4, num_drafts).unwrap();
        let plan = planner.greedy(&batch, &PlanCost::new(&cost), None).unwrap();
        let best = exhaustive_plan(&batch, num_drafts, &PlanCost::new(&cost)).unwrap();
        let rate = rate_of(&plan.verify_lens, &survival, num_drafts, &cost);
        prop_assert!((rate - best.rate).abs() <= 1e-9 * best.rate.max(1.0), "{rate} {best:?}");
    }

    #[test]
    fn budget_and_top_equal_the_oracle_on_stairs(
        (num_requests, num_drafts, confidences) in confidences(), cost in stairs()
    ) {
        let survival = survival(&confidences, num_drafts);
        let batch = DraftBatch::new(&survival, num_requests);
        let mut planner = VerifyPlanner::new(4, num_drafts).unwrap();
        let rule = BudgetRule::default();
        let budget = planner.budget(&batch, &PlanCost::new(&cost), &rule).unwrap();
        prop_assert!(budget.prediction.gain >= 0.0);
        let best = exhaustive_plan(&batch, num_drafts, &PlanCost::new(&cost)).unwrap();
        let plan = planner.top(&batch, budget.num_drafts, None).unwrap();
        prop_assert_eq!(plan.report.num_admitted, budget.num_drafts);
        let rate = rate_of(&plan.verify_lens, &survival, num_drafts, &cost);
        prop_assert!((rate - best.rate).abs() <= 1e-9 * best.rate.max(1.0), "{rate} {best:?}");
    }

    #[test]
    fn top_takes_the_largest_survivals(
        (num_requests, num_drafts, confidences) in confidences(), budget in 0_u32..20
    ) {
        let survival = survival(&confidences, num_drafts);
        let batch = DraftBatch::new(&survival, num_requests);
        let mut planner = VerifyPlanner::new(4, num_drafts).unwrap();
        let lens = planner.top(&batch, budget, None).unwrap().verify_lens.clone();
        let rows: Vec<&[f32]> = survival.chunks_exact(num_drafts).collect();
        // The order written out: survival falling, position rising, request rising.
        let mut drafts: Vec<(f32, usize, usize)> = rows.iter().enumerate()
            .flat_map(|(r, row)| row.iter().enumerate().map(move |(j, &a)| (a, j, r)))
            .filter(|draft| draft.0 > 0.0)
            .collect();
        drafts.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)).then(x.2.cmp(&y.2)));
        let mut expected = vec![0; rows.len()];
        for &(_, position, row) in drafts.iter().take(budget as usize) {
            prop_assert_eq!(expected[row] as usize, position, "not a prefix");
            expected[row] += 1;
        }
        prop_assert_eq!(lens, expected);
    }

    /// Whatever is changed from draft `j` of a row on (its own confidence depends on the drafts
    /// before it only, so `j`'s stays), drafts up to `j` of that row are admitted all the same.
    #[test]
    fn later_confidences_never_change_an_earlier_admission(
        (num_requests, num_drafts, confidences) in confidences_of(1..=4),
        cost in stairs(),
        budget in 0_u32..20,
        row in any::<Index>(),
        position in any::<Index>(),
        others in vec(confidence(), 4),
    ) {
        let (row, position) = (row.index(num_requests as usize), position.index(num_drafts));
        let mut changed = confidences.clone();
        for later in position + 1..num_drafts {
            changed[row * num_drafts + later] = others[later];
        }
        let mut planner = VerifyPlanner::new(4, num_drafts).unwrap();
        let mut lens = |confidences: &[f32]| {
            let survival = survival(confidences, num_drafts);
            let batch = DraftBatch::new(&survival, num_requests);
            let top = planner.top(&batch, budget, None).unwrap().verify_lens[row];
            let cost = PlanCost::new(&cost);
            let greedy = planner.greedy(&batch, &cost, None).unwrap().verify_lens[row];
            let tiers = CostTable { tiers: vec![3, 6, 7, 12], ..cost.cost.table() };
            let tiers = StepCost::new(tiers).unwrap();
            let envelope = tiers.envelope();
            let costs = (PlanCost::new(&tiers), PlanCost::new(&envelope));
            let plan = planner.greedy_on_tiers(&batch, &costs.0, &costs.1, None).unwrap();
            let on_tiers = plan.verify_lens[row];
            let capped = planner.greedy(&batch, &cost, Some(budget)).unwrap().verify_lens[row];
            [top, greedy, on_tiers, capped]
        };
        let (before, after) = (lens(&confidences), lens(&changed));
        let seen = u32::try_from(position).unwrap() + 1;
        for (before, after) in before.into_iter().zip(after) {
            prop_assert_eq!(before.min(seen), after.min(seen));
        }
    }

    #[test]
    fn trims_add_up(
        (num_requests, num_drafts, confidences) in confidences(), budget in 0_u32..20
    ) {
        let survival = survival(&confidences, num_drafts);
        let batch = DraftBatch::new(&survival, num_requests);
        let mut planner = VerifyPlanner::new(4, num_drafts).unwrap();
        let plan = planner.top(&batch, budget, None).unwrap();
        let report = plan.report;
        prop_assert_eq!(report.num_admitted, plan.verify_lens.iter().sum::<u32>());
        prop_assert!(report.num_admitted <= budget);
        prop_assert_eq!(report.requested_trim + report.num_admitted, report.num_available);
        let used = num_requests + report.num_admitted + report.num_padding_tokens;
        prop_assert_eq!(report.num_executed_tokens, used);
    }
}
