//! Planners on worked numbers, at their edges, and what they refuse.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::step_cost::{CostTable, Drafting, Knot, StepCost, StepLoad};
use dspark_sched::verify_plan::{
    BudgetRule, DraftBatch, PlanCost, PlanError, VerifyPlanner, exhaustive_plan,
};
use speculation::{cost_of_rates, cost_of_times, flat_cost, survival_of};

const A: [f32; 3] = [0.9, 0.8, 0.5];
const B: [f32; 3] = [0.6, 0.9, 0.9];

fn top(survival: &[f32], num_requests: u32, budget: u32) -> Vec<u32> {
    let num_drafts = survival.len() / num_requests as usize;
    let mut planner = VerifyPlanner::new(num_requests as usize, num_drafts).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    planner.top(&batch, budget, None).unwrap().verify_lens.clone()
}

fn greedy(survival: &[f32], num_requests: u32, cost: &StepCost) -> Vec<u32> {
    let num_drafts = survival.len() / num_requests as usize;
    let mut planner = VerifyPlanner::new(num_requests as usize, num_drafts).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    planner.greedy(&batch, &PlanCost::new(cost), None).unwrap().verify_lens.clone()
}

fn budget(survival: &[f32], num_requests: u32, cost: &StepCost, rule: &BudgetRule) -> u32 {
    let num_drafts = survival.len() / num_requests as usize;
    let mut planner = VerifyPlanner::new(num_requests as usize, num_drafts).unwrap();
    let batch = DraftBatch::new(survival, num_requests);
    planner.budget(&batch, &PlanCost::new(cost), rule).unwrap().num_drafts
}

#[test]
fn worked_budgets_give_worked_lengths() {
    let survival = survival_of(&[&A, &B]);
    let expected = [0.90, 0.72, 0.36, 0.60, 0.54, 0.486];
    assert!(survival.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6));
    assert_eq!(top(&survival, 2, 4), [2, 2]);
    assert_eq!(top(&survival, 2, 5), [2, 3]);
    assert_eq!(top(&survival, 2, 0), [0, 0]);
    assert_eq!(top(&survival, 2, 99), [3, 3]);
}

#[test]
fn the_old_snapshot_sets_the_total_and_current_survival_shares_it() {
    let old = survival_of(&[&A, &[0.1, 0.1, 0.1]]);
    let cost = cost_of_times(&[1.0, 1.05, 1.1, 1.15, 1.2, 9.0, 9.5, 10.0]);
    let total = budget(&old, 2, &cost, &BudgetRule::default());
    assert_eq!(total, 3);
    let now = survival_of(&[&[0.3, 0.3, 0.3], &[0.95, 0.9, 0.9]]);
    assert_eq!(top(&now, 2, total), [0, 3]);
}

#[test]
fn appendix_a_stops_before_the_dip() {
    let cost = cost_of_rates(&[1.0, 0.5, 0.45]);
    for confidence_of_second in [0.9, 0.0] {
        let survival = survival_of(&[&[0.8, confidence_of_second]]);
        assert_eq!(greedy(&survival, 1, &cost), [0]);
    }
    let seen = survival_of(&[&[0.8, 0.9]]);
    let batch = DraftBatch::new(&seen, 1);
    let best = exhaustive_plan(&batch, 2, &PlanCost::new(&cost)).unwrap();
    assert_eq!(best.verify_lens, [2]);
    assert!((best.rate - 1.134).abs() < 1e-6, "{}", best.rate);
}

#[test]
fn appendix_a_rates() {
    let cost = cost_of_rates(&[1.0, 0.5, 0.45]);
    let mut planner = VerifyPlanner::new(1, 2).unwrap();
    for (second, rates) in [(0.9, [1.0, 0.9, 1.134]), (0.0, [1.0, 0.9, 0.81])] {
        let survival = survival_of(&[&[0.8, second]]);
        for (len, rate) in (0..).zip(rates) {
            let batch = DraftBatch::new(&survival, 1);
            let plan = planner.fixed(&batch, len, Some(&PlanCost::new(&cost))).unwrap();
            let prediction = plan.report.prediction.unwrap();
            assert!((prediction.num_tokens / prediction.step_us - rate).abs() < 1e-6);
        }
    }
}

#[test]
fn a_flat_table_verifies_everything() {
    let survival = survival_of(&[&A, &B]);
    assert_eq!(greedy(&survival, 2, &flat_cost()), [3, 3]);
    assert_eq!(budget(&survival, 2, &flat_cost(), &BudgetRule::default()), 6);
}

#[test]
fn a_steep_table_verifies_nothing() {
    // A verified token costs as much as a decoded one, and is accepted less than half the time.
    let times: Vec<f64> = (1..=8).map(f64::from).collect();
    let survival = survival_of(&[&[0.45, 0.9, 0.9], &[0.3, 0.9, 0.9]]);
    assert_eq!(greedy(&survival, 2, &cost_of_times(&times)), [0, 0]);
    assert_eq!(budget(&survival, 2, &cost_of_times(&times), &BudgetRule::default()), 0);
}

#[test]
fn stairs_need_the_global_maximum() {
    // Between 1 and 4 tokens there is a jump that more tokens pay back.
    let cost = cost_of_times(&[1.0, 1.95, 1.95, 1.95]);
    let survival = survival_of(&[&[0.9, 0.95, 0.95]]);
    assert_eq!(greedy(&survival, 1, &cost), [0]);
    assert_eq!(budget(&survival, 1, &cost, &BudgetRule::default()), 3);
    let batch = DraftBatch::new(&survival, 1);
    assert_eq!(exhaustive_plan(&batch, 3, &PlanCost::new(&cost)).unwrap().verify_lens, [3]);
}

#[test]
fn equal_survivals_go_by_position_and_then_by_request() {
    let half = [0.5, 1.0, 1.0];
    let survival = survival_of(&[&half, &half, &half]);
    let lens: Vec<Vec<u32>> = (1..=6).map(|budget| top(&survival, 3, budget)).collect();
    let expected = [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]];
    assert_eq!(lens, expected);
}

#[test]
fn what_is_no_probability_counts_as_zero() {
    let confidences = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5, -0.0];
    for confidence in confidences {
        let survival = survival_of(&[&[0.9, confidence, 0.9]]);
        assert_eq!(top(&survival, 1, 3), [1], "{confidence}");
        assert_eq!(greedy(&survival, 1, &flat_cost()), [1], "{confidence}");
        assert_eq!(top(&[0.9, confidence, 0.9], 1, 3), [1], "as survival: {confidence}");
    }
    assert_eq!(top(&[0.5, 0.9, 0.9], 1, 2), [2], "survival that rises counts as the one before");
    assert_eq!(top(&[7.0, 0.5, 0.5], 1, 3), [3], "above 1 counts as 1");
}

#[test]
fn no_requests_make_an_empty_plan() {
    let mut planner = VerifyPlanner::new(4, 7).unwrap();
    let batch = DraftBatch::new(&[], 0);
    let cost = flat_cost();
    let cost = PlanCost::new(&cost);
    for plan in [
        planner.greedy(&batch, &cost, None).unwrap().clone(),
        planner.top(&batch, 5, Some(&cost)).unwrap().clone(),
        planner.fixed(&batch, 7, Some(&cost)).unwrap().clone(),
    ] {
        assert!(plan.verify_lens.is_empty());
        assert_eq!((plan.report.num_executed_tokens, plan.report.num_admitted), (0, 0));
        assert_eq!(plan.report.prediction.unwrap().gain, 0.0);
    }
    let budget = planner.budget(&batch, &cost, &BudgetRule::default()).unwrap();
    assert_eq!((budget.num_drafts, budget.is_worthwhile), (0, false));
    assert_eq!(exhaustive_plan(&batch, 7, &cost).unwrap().verify_lens, [0; 0]);
}

#[test]
fn limits_hold_for_every_planner() {
    let survival = survival_of(&[&[0.9; 3], &[0.9; 3]]);
    let limits = [0, 2];
    let batch = DraftBatch { limits: Some(&limits), ..DraftBatch::new(&survival, 2) };
    let cost = flat_cost();
    let cost = PlanCost::new(&cost);
    let mut planner = VerifyPlanner::new(2, 3).unwrap();
    assert_eq!(planner.greedy(&batch, &cost, None).unwrap().verify_lens, [0, 2]);
    assert_eq!(planner.top(&batch, 6, None).unwrap().verify_lens, [0, 2]);
    let plan = planner.fixed(&batch, 3, None).unwrap();
    assert_eq!((plan.verify_lens.as_slice(), plan.report.num_available), ([0, 2].as_slice(), 2));
    assert_eq!(planner.budget(&batch, &cost, &BudgetRule::default()).unwrap().num_drafts, 2);
    assert_eq!(exhaustive_plan(&batch, 3, &cost).unwrap().verify_lens, [0, 2]);
}

#[test]
fn a_cap_bounds_greedy_and_budget() {
    let survival = survival_of(&[&[0.9; 3], &[0.8; 3]]);
    let cost = flat_cost();
    let cost = PlanCost::new(&cost);
    let mut planner = VerifyPlanner::new(2, 3).unwrap();
    let batch = DraftBatch::new(&survival, 2);
    assert_eq!(planner.greedy(&batch, &cost, Some(2)).unwrap().verify_lens, [2, 0]);
    assert_eq!(planner.greedy(&batch, &cost, Some(0)).unwrap().verify_lens, [0, 0]);
    let rule = BudgetRule { max_num_drafts: Some(4), fill_tier: true, ..BudgetRule::default() };
    assert_eq!(planner.budget(&batch, &cost, &rule).unwrap().num_drafts, 4);
}

#[test]
fn the_gate_refuses_small_gains() {
    let survival = survival_of(&[&[0.5, 0.1, 0.1]]);
    let cost = cost_of_times(&[10.0, 14.6, 20.0, 30.0]);
    let rule = |min_predicted_gain| BudgetRule { min_predicted_gain, ..BudgetRule::default() };
    assert_eq!(budget(&survival, 1, &cost, &rule(0.02)), 1);
    assert_eq!(budget(&survival, 1, &cost, &rule(0.04)), 0);
}

fn tiered() -> StepCost {
    let token_us = vec![Knot(4, 10.0), Knot(8, 11.0), Knot(16, 20.0), Knot(32, 40.0)];
    let draft_us = vec![Knot(1, 1.0)];
    let tiers = vec![4, 8, 16];
    StepCost::new(CostTable { token_us, draft_us, tiers, ..CostTable::default() }).unwrap()
}

#[test]
fn a_budget_fills_the_tier_it_pays_for() {
    // The old survivals end after one draft each; the tier of 8 has room for 5 drafts of 3 requests.
    let survival = survival_of(&[&[0.9, 0.0, 0.0], &[0.9, 0.0, 0.0], &[0.9, 0.0, 0.0]]);
    let rule = BudgetRule { fill_tier: true, ..BudgetRule::default() };
    assert_eq!(budget(&survival, 3, &tiered(), &BudgetRule::default()), 3);
    assert_eq!(budget(&survival, 3, &tiered(), &rule), 5);
}

#[test]
fn a_report_tells_requested_from_landed_trim() {
    let survival = survival_of(&[&[0.9; 3], &[0.9; 3], &[0.9; 3]]);
    let cost = tiered();
    let cost = PlanCost::new(&cost);
    let mut planner = VerifyPlanner::new(3, 3).unwrap();
    let batch = DraftBatch::new(&survival, 3);
    let report = planner.top(&batch, 7, Some(&cost)).unwrap().report;
    // 12 tokens run as 16; 10 tokens too.
    assert_eq!((report.num_available, report.num_admitted), (9, 7));
    assert_eq!((report.requested_trim, report.landed_trim), (2, 0));
    assert_eq!((report.num_executed_tokens, report.num_padding_tokens), (16, 6));
    let report = planner.top(&batch, 5, Some(&cost)).unwrap().report;
    assert_eq!((report.requested_trim, report.landed_trim), (4, 8));
    assert_eq!((report.num_executed_tokens, report.num_padding_tokens), (8, 0));
    let prediction = report.prediction.unwrap();
    let tokens = 3.0 + 3.0 * 0.9 + 2.0 * 0.81;
    assert!((prediction.num_tokens - tokens).abs() < 1e-5);
    assert_eq!(prediction.step_us, 12.0);
    assert!((prediction.gain - (tokens / 12.0 / (3.0 / 10.0) - 1.0)).abs() < 1e-6);
}

#[test]
fn an_envelope_is_convex_and_below() {
    let (cost, envelope) = (tiered(), tiered().envelope());
    let load = StepLoad::of_requests(1);
    let us = |cost: &StepCost| -> Vec<f64> {
        (0..60).map(|drafts| cost.step_us(&load, drafts, Drafting::Skipped)).collect()
    };
    let (real, below) = (us(&cost), us(&envelope));
    assert!(real.iter().zip(&below).all(|(real, below)| below <= real));
    let rises: Vec<f64> = below.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(rises[3..].windows(2).all(|pair| pair[0] <= pair[1] + 1e-9), "{rises:?}");
    assert_eq!([below[3], below[7], below[31]], [10.0, 11.0, 40.0]);
}

#[test]
fn on_tiers_the_greedy_planner_passes_the_first_stair_and_fills_the_last() {
    // 4 requests fill their tier; the next holds 4 drafts for 10 % more time.
    let survival = survival_of(&[&[0.9, 0.5, 0.1]; 4].map(|row| row.as_slice()));
    let (cost, envelope) = (tiered(), tiered().envelope());
    let (cost, envelope) = (PlanCost::new(&cost), PlanCost::new(&envelope));
    let batch = DraftBatch::new(&survival, 4);
    let mut planner = VerifyPlanner::new(4, 3).unwrap();
    let plan = planner.greedy_on_tiers(&batch, &cost, &envelope, None).unwrap();
    assert_eq!(
        (plan.verify_lens.as_slice(), plan.report.num_padding_tokens),
        ([1; 4].as_slice(), 0)
    );
    let plan = planner.greedy_on_tiers(&batch, &cost, &envelope, Some(3)).unwrap();
    assert_eq!(plan.verify_lens, [1, 1, 1, 0]);
    let hopeless = survival_of(&[[0.01, 0.01, 0.01].as_slice(); 4]);
    let batch = DraftBatch::new(&hopeless, 4);
    let plan = planner.greedy_on_tiers(&batch, &cost, &envelope, None).unwrap();
    assert_eq!(plan.verify_lens, [0; 4]);
}

#[test]
fn on_tiers_the_greedy_planner_passes_the_stair_of_windows() {
    // Verifying anything reads the context slower, which no draft alone is worth.
    let window_context_us = vec![Knot(0, 0.0), Knot(100, 6.0)];
    let table = CostTable { window_context_us, ..tiered().table() };
    let cost = StepCost::new(table).unwrap();
    let envelope = cost.envelope();
    let survival = survival_of(&[&[0.9, 0.5, 0.1]; 4].map(|row| row.as_slice()));
    let load = StepLoad { num_requests: 4, num_other_tokens: 0, num_context_tokens: 50 };
    let batch = DraftBatch { survival: &survival, limits: None, load };
    let mut planner = VerifyPlanner::new(4, 3).unwrap();
    let (cost, envelope) = (PlanCost::new(&cost), PlanCost::new(&envelope));
    assert_eq!(planner.greedy(&batch, &cost, None).unwrap().verify_lens, [0; 4]);
    let plan = planner.greedy_on_tiers(&batch, &cost, &envelope, None).unwrap();
    assert_eq!(plan.verify_lens, [1; 4]);
    // A budget from history knows the stair, and that it pays.
    let rule = BudgetRule::default();
    assert_eq!(planner.budget(&batch, &cost, &rule).unwrap().num_drafts, 4);
}

#[test]
fn other_tokens_of_the_step_count() {
    let survival = survival_of(&[&[0.9; 3]]);
    let cost = tiered();
    let cost = PlanCost::new(&cost);
    let load = StepLoad { num_requests: 1, num_other_tokens: 5, num_context_tokens: 0 };
    let batch = DraftBatch { survival: &survival, limits: None, load };
    let mut planner = VerifyPlanner::new(1, 3).unwrap();
    let plan = planner.greedy(&batch, &cost, None).unwrap();
    assert_eq!((plan.verify_lens.as_slice(), plan.report.num_executed_tokens), ([2].as_slice(), 8));
    assert_eq!(plan.report.num_padding_tokens, 0);
}

#[test]
fn measured_acceptance_scales_what_drafts_are_worth() {
    let survival = survival_of(&[&[0.9, 0.9, 0.9]]);
    let cost = cost_of_times(&[1.0, 1.5, 2.0, 2.5]);
    let mut planner = VerifyPlanner::new(1, 3).unwrap();
    let batch = DraftBatch::new(&survival, 1);
    for (acceptance_ratio, expected) in [(1.0, 3), (0.6, 1), (0.4, 0)] {
        let cost = PlanCost { acceptance_ratio, ..PlanCost::new(&cost) };
        let budget = planner.budget(&batch, &cost, &BudgetRule::default()).unwrap();
        assert_eq!(budget.num_drafts, expected, "{acceptance_ratio}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut planner = VerifyPlanner::new(2, 3).unwrap();
    let wrong = |name, found, expected| PlanError::WrongLength { name, found, expected };
    let batch = DraftBatch::new(&[0.5; 5], 2);
    assert_eq!(planner.top(&batch, 1, None), Err(wrong("survival", 5, 6)));
    let batch = DraftBatch { limits: Some(&[1]), ..DraftBatch::new(&[0.5; 6], 2) };
    assert_eq!(planner.fixed(&batch, 1, None), Err(wrong("limits", 1, 2)));
    let batch = DraftBatch::new(&[0.5; 9], 3);
    let error = PlanError::TooMany { name: "num_requests", asked: 3, limit: 2 };
    assert_eq!(planner.top(&batch, 1, None), Err(error));
    let zero = |name| PlanError::Zero { name };
    assert_eq!(VerifyPlanner::new(0, 3).err(), Some(zero("max_num_requests")));
    assert_eq!(VerifyPlanner::new(3, 0).err(), Some(zero("num_drafts")));
    let error = PlanError::TooMany { name: "num_drafts", asked: 5000, limit: 4096 };
    assert_eq!(VerifyPlanner::new(3, 5000).err(), Some(error));
    let error = VerifyPlanner::new(1 << 20, 8).unwrap_err().to_string();
    assert_eq!(error, "max_num_requests * num_drafts is 8388608: at most 4194304");
}

#[test]
fn an_endless_search_is_refused() {
    let survival = vec![0.5; 70];
    let batch = DraftBatch::new(&survival, 10);
    let cost = flat_cost();
    let error = exhaustive_plan(&batch, 7, &PlanCost::new(&cost)).unwrap_err();
    let limit = dspark_sched::verify_plan::MAX_NUM_PLANS;
    assert_eq!(error, PlanError::TooManyPlans { num_requests: 10, num_drafts: 7, limit });
}

#[test]
fn steady_state_reuses_its_buffers() {
    let mut planner = VerifyPlanner::new(8, 3).unwrap();
    let survival = survival_of(&[A.as_slice(); 8]);
    let cost = tiered();
    let cost = PlanCost::new(&cost);
    let batch = DraftBatch::new(&survival, 8);
    let before = planner.top(&batch, 24, Some(&cost)).unwrap().verify_lens.as_ptr();
    for _ in 0..3 {
        planner.budget(&batch, &cost, &BudgetRule::default()).unwrap();
        assert_eq!(planner.greedy(&batch, &cost, None).unwrap().verify_lens.as_ptr(), before);
        assert_eq!(planner.top(&batch, 5, None).unwrap().verify_lens.as_ptr(), before);
    }
}
