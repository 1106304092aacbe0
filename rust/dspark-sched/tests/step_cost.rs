//! Cost tables: lookup, tiers, repair, refusals, files, fit, drift.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::step_cost::{
    CostError, CostScale, CostTable, CostTracker, Curve, Drafting, Knot, QualityLimits, StepCost,
    StepLoad, StepSample, fit_step_cost, repaired,
};
use proptest::collection::vec;
use proptest::prelude::*;
use speculation::{Random, flat_cost};

fn table() -> CostTable {
    CostTable {
        bias_us: 100.0,
        request_us: vec![Knot(1, 0.0), Knot(64, 63.0)],
        draft_us: vec![Knot(1, 50.0), Knot(64, 113.0)],
        token_us: vec![Knot(1, 10.0), Knot(8, 12.0), Knot(16, 20.0), Knot(64, 116.0)],
        context_us: vec![Knot(0, 0.0), Knot(1000, 10.0)],
        draft_context_us: vec![Knot(0, 0.0), Knot(1000, 1.0)],
        tiers: vec![1, 8, 16],
        ..CostTable::default()
    }
}

#[test]
fn a_curve_is_linear_between_knots_and_goes_on_past_them() {
    let curve = Curve::new("token_us", vec![Knot(2, 10.0), Knot(4, 14.0), Knot(8, 16.0)]).unwrap();
    let at: Vec<f64> = [0, 2, 3, 4, 6, 8, 12].map(|count| curve.at(count)).to_vec();
    assert_eq!(at, [10.0, 10.0, 12.0, 14.0, 15.0, 16.0, 18.0]);
    assert_eq!(Curve::new("token_us", vec![Knot(5, 3.0)]).unwrap().at(99), 3.0);
    assert_eq!(Curve::default().at(7), 0.0);
}

#[test]
fn tokens_round_up_to_a_tier_and_run_unpadded_past_the_last() {
    let cost = StepCost::new(table()).unwrap();
    let executed = [0, 1, 2, 8, 9, 16, 17, 40].map(|tokens| cost.num_executed_tokens(tokens));
    assert_eq!(executed, [0, 1, 8, 8, 16, 16, 17, 40]);
    assert_eq!(cost.breaks_between(1, 64), [8, 16, 64]);
    assert_eq!(cost.breaks_between(8, 8), [0; 0]);
    let load = StepLoad::of_requests(1);
    let us = |num_drafts| cost.step_us(&load, num_drafts, Drafting::Skipped);
    assert_eq!([us(0), us(1), us(7), us(8), us(16)], [110.0, 112.0, 112.0, 120.0, 122.0]);
    // Past the dense part, and past the last knot: 2 us a token.
    assert_eq!(us(19_999) - us(19_998), 2.0);
}

#[test]
fn parts_add_up() {
    let cost = StepCost::new(table()).unwrap();
    let load = StepLoad { num_requests: 8, num_other_tokens: 3, num_context_tokens: 500 };
    assert_eq!(load.num_base_tokens(), 11);
    assert_eq!(cost.step_us(&load, 5, Drafting::Skipped), 100.0 + 7.0 + 5.0 + 20.0);
    assert_eq!(cost.step_us(&load, 5, Drafting::Paid), 132.0 + 57.0 + 0.5);
}

#[test]
fn the_first_draft_verified_pays_for_windows() {
    let window_context_us = vec![Knot(0, 0.0), Knot(1000, 4.0)];
    let cost = StepCost::new(CostTable { window_context_us, ..table() }).unwrap();
    let load = StepLoad { num_requests: 8, num_other_tokens: 0, num_context_tokens: 500 };
    let us = |cost: &StepCost, num_drafts| cost.step_us(&load, num_drafts, Drafting::Paid);
    let without = StepCost::new(table()).unwrap();
    assert_eq!(us(&cost, 0), us(&without, 0));
    assert_eq!([us(&cost, 1), us(&cost, 9)], [1, 9].map(|num| us(&without, num) + 2.0));
    // They drift with the tokens that are verified.
    let scale = CostScale { verify: 1.5, ..CostScale::default() };
    let scaled = |cost: &StepCost| cost.times(&load, scale, Drafting::Paid).at(1);
    assert_eq!(scaled(&cost), scaled(&without) + 3.0);
    assert_eq!(us(&cost.envelope(), 0), us(&without.envelope(), 0) + 2.0);
}

#[test]
fn repair_pools_what_falls_and_noise_is_refused() {
    assert_eq!(repaired(&[3.0, 2.0, 1.0]), [2.0, 2.0, 2.0]);
    assert_eq!(repaired(&[]), [0.0; 0]);
    let limits = QualityLimits::default();
    let mut noisy = table();
    noisy.token_us[1].1 = 9.0;
    let cost = StepCost::measured(noisy.clone(), &limits).unwrap();
    assert_eq!(cost.table().token_us[..2], [Knot(1, 9.5), Knot(8, 9.5)]);
    noisy.token_us[2].1 = 80.0;
    noisy.token_us[3].1 = 40.0;
    let error = StepCost::measured(noisy, &limits).unwrap_err();
    let refused = matches!(
        error,
        CostError::NoisyCurve { curve: "token_us", at: 16, ratio, limit: 0.1 } if ratio > 0.1
    );
    assert!(refused, "{error}");
}

#[test]
fn a_flat_table_is_refused_when_measured_and_known_when_loaded() {
    let flat = CostTable {
        token_us: vec![Knot(1, 10.0), Knot(64, 10.1)],
        bias_us: 100.0,
        ..CostTable::default()
    };
    let error = StepCost::measured(flat.clone(), &QualityLimits::default()).unwrap_err();
    assert!(matches!(error, CostError::FlatTable { first: 1, last: 64, .. }), "{error}");
    let loaded = StepCost::new(flat).unwrap();
    assert!(loaded.check_rise(0.02).is_err());
    assert!(StepCost::new(table()).unwrap().check_rise(0.02).is_ok());
    assert!(flat_cost().check_rise(0.02).is_err());
}

fn changed(change: impl FnOnce(&mut CostTable)) -> CostError {
    let mut changed = table();
    change(&mut changed);
    StepCost::new(changed).unwrap_err()
}

#[test]
fn tables_that_cannot_be_are_refused() {
    let error = changed(|table| table.token_us.clear());
    assert_eq!(error, CostError::EmptyCurve { curve: "token_us" });
    let error = changed(|table| table.draft_us[1].0 = 1);
    assert_eq!(error, CostError::UnorderedKnots { curve: "draft_us", found: 1, before: 1 });
    let error = changed(|table| table.request_us[1].1 = f64::INFINITY);
    assert_eq!(error, CostError::BadTime { name: "request_us", found: f64::INFINITY });
    let error = changed(|table| table.bias_us = -1.0);
    assert_eq!(error, CostError::BadTime { name: "bias_us", found: -1.0 });
    let error = changed(|table| table.token_us[1].1 = 9.0);
    let falls =
        CostError::FallingCurve { curve: "token_us", at: 8, before_us: 10.0, found_us: 9.0 };
    assert_eq!(error, falls);
    let error = changed(|table| table.tiers = vec![8, 8]);
    assert_eq!(error, CostError::UnorderedTiers { found: 8, before: 8 });
    let error = changed(|table| table.tiers = vec![0]);
    assert_eq!(error, CostError::UnorderedTiers { found: 0, before: 0 });
    let free = CostTable { token_us: vec![Knot(1, 0.0)], ..CostTable::default() };
    assert_eq!(StepCost::new(free).unwrap_err(), CostError::FreeStep { found_us: 0.0 });
}

#[test]
fn a_file_comes_back_as_it_was() {
    let mut table = table();
    table.source.insert("device".to_owned(), "a card".to_owned());
    let cost = StepCost::new(table).unwrap();
    let text = cost.to_json().unwrap();
    assert_eq!(StepCost::from_json(&text).unwrap(), cost);
    assert!(text.contains("\"format\": \"extkv.step_cost.v1\""));
}

#[test]
fn a_short_file_is_enough_and_a_wrong_one_is_refused() {
    let text = r#"{"format": "extkv.step_cost.v1", "token_us": [[1, 5.0], [2, 6.0]], "new": 1}"#;
    let cost = StepCost::from_json(text).unwrap();
    assert_eq!(cost.step_us(&StepLoad::of_requests(1), 1, Drafting::Paid), 6.0);
    let error = StepCost::from_json(&text.replace(".v1", ".v9")).unwrap_err();
    assert!(matches!(&error, CostError::Format { found, .. } if found == "extkv.step_cost.v9"));
    let error = StepCost::from_json("{").unwrap_err();
    assert!(matches!(error, CostError::Json { .. }), "{error}");
}

/// Steps of a known cost, with noise of a ratio.
fn samples(noise: f64) -> (StepCost, Vec<StepSample>) {
    let truth = StepCost::new(CostTable { tiers: Vec::new(), ..table() }).unwrap();
    let mut random = Random(7);
    let mut samples = Vec::new();
    for num_requests in [1, 2, 4, 8, 16, 32, 64] {
        for len in 0..=7 {
            for drafting in [Drafting::Paid, Drafting::Skipped] {
                for context in [100, 900] {
                    let num_context_tokens = context * u64::from(num_requests);
                    let load = StepLoad { num_requests, num_other_tokens: 0, num_context_tokens };
                    let us = truth.step_us(&load, num_requests * len, drafting);
                    samples.push(StepSample {
                        num_requests,
                        num_tokens: num_requests * (1 + len),
                        num_context_tokens,
                        drafting,
                        step_us: us * (1.0 + noise * random.normal()),
                        spread_us: 0.01 * us,
                    });
                }
            }
        }
    }
    (truth, samples)
}

#[test]
fn a_fit_recovers_a_known_cost() {
    let (_, exact) = samples(0.0);
    let limits = QualityLimits::default();
    let (cost, report) = fit_step_cost(&exact, Vec::new(), &limits).unwrap();
    assert!(report.worst_residual_ratio < 0.02, "{report:?}");
    let (truth, noisy) = samples(0.01);
    let (fitted, report) = fit_step_cost(&noisy, Vec::new(), &limits).unwrap();
    assert!(report.mean_residual_ratio < 0.02, "{report:?}");
    // A shape between the measured ones.
    let load = StepLoad { num_requests: 24, num_other_tokens: 0, num_context_tokens: 12_000 };
    for (drafting, cost) in [(Drafting::Paid, &cost), (Drafting::Skipped, &fitted)] {
        let (found, expected) =
            (cost.step_us(&load, 48, drafting), truth.step_us(&load, 48, drafting));
        assert!((found / expected - 1.0).abs() < 0.05, "{found} {expected}");
    }
}

#[test]
fn a_fit_comes_to_an_end_where_contexts_hardly_differ() {
    let step = |requests: u32, len: Option<u32>, context: u64| {
        let (tokens, drafting) = match len {
            Some(len) => (requests * (1 + len), Drafting::Paid),
            None => (requests, Drafting::Skipped),
        };
        let draft_us = if len.is_some() { 300.0 } else { 0.0 };
        StepSample {
            num_requests: requests,
            num_tokens: tokens,
            num_context_tokens: context,
            drafting,
            step_us: 1000.0 + 20.0 * f64::from(requests) + 30.0 * f64::from(tokens) + draft_us,
            spread_us: 0.0,
        }
    };
    let shapes = [4, 2, 1]
        .into_iter()
        .flat_map(|requests| [None, Some(0), Some(1), Some(3)].map(|len| (requests, len)));
    let samples: Vec<_> =
        shapes.zip(5000..).map(|((requests, len), context)| step(requests, len, context)).collect();
    let (_, report) = fit_step_cost(&samples, Vec::new(), &QualityLimits::default()).unwrap();
    // Before contexts were taken less their mean, the sweeps grew without bound.
    assert!(report.worst_residual_ratio < 0.05, "{report:?}");
}

#[test]
fn measured_steps_that_tell_nothing_are_refused() {
    let (_, samples) = samples(0.0);
    let limits = QualityLimits::default();
    let fit = |samples: &[StepSample]| fit_step_cost(samples, Vec::new(), &limits).unwrap_err();
    let mut bad = samples.clone();
    bad[0].spread_us = bad[0].step_us;
    let noisy = CostError::NoisySample { num_requests: 1, num_tokens: 1, ratio: 1.0, limit: 0.2 };
    assert_eq!(fit(&bad), noisy);
    let mut bad = samples.clone();
    bad[0].num_requests = 2;
    assert_eq!(fit(&bad), CostError::BadSample { num_requests: 2, num_tokens: 1 });
    let mut bad = samples.clone();
    bad[0].step_us = f64::NAN;
    assert!(matches!(fit(&bad), CostError::BadTime { name: "step_us", .. }));
    let drafting: Vec<_> =
        samples.iter().copied().filter(|s| s.drafting == Drafting::Paid).collect();
    let num = drafting.len();
    assert_eq!(
        fit(&drafting),
        CostError::DraftNotSeparable { num_drafting: num, num_samples: num }
    );
    let mut bad = samples.clone();
    bad[5].step_us *= 3.0;
    let error = fit(&bad);
    assert!(matches!(error, CostError::PoorFit { .. } | CostError::NoisyCurve { .. }), "{error}");
}

/// Steps of changing shapes with costs scaled by `factors` of fixed, verify and draft.
fn drift(tracker: &mut CostTracker, cost: &StepCost, factors: [f64; 3], num_steps: u32) {
    let mut random = Random(3);
    for step in 0..num_steps {
        let load = StepLoad::of_requests([4, 16, 48][step as usize % 3]);
        let drafting = if step % 5 == 0 { Drafting::Skipped } else { Drafting::Paid };
        let num_drafts =
            if drafting == Drafting::Paid { load.num_requests * (step % 4) } else { 0 };
        let plain = cost.step_us(&load, num_drafts, Drafting::Skipped);
        let draft_us = cost.step_us(&load, num_drafts, drafting) - plain;
        let fixed_us = 100.0 + f64::from(load.num_requests) - 1.0;
        let us = factors[0] * fixed_us + factors[1] * (plain - fixed_us) + factors[2] * draft_us;
        let noisy = us * (1.0 + 0.01 * random.normal());
        tracker.observe(cost, &load, num_drafts, drafting, noisy);
    }
}

#[test]
fn a_tracker_follows_each_part() {
    let cost = StepCost::new(table()).unwrap();
    for factors in [[1.0, 1.0, 1.0], [1.5, 1.5, 1.5], [1.0, 1.5, 1.0], [1.0, 0.5, 1.5]] {
        let mut tracker = CostTracker::default();
        drift(&mut tracker, &cost, factors, 300);
        let scale = tracker.scale();
        for (found, expected) in [scale.fixed, scale.verify, scale.draft].into_iter().zip(factors) {
            assert!((found - expected).abs() < 0.12, "{scale:?} {factors:?}");
        }
    }
}

#[test]
fn a_tracker_ignores_times_that_cannot_be_and_survives_outliers() {
    let cost = StepCost::new(table()).unwrap();
    let mut tracker = CostTracker::default();
    let load = StepLoad::of_requests(4);
    for us in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        tracker.observe(&cost, &load, 0, Drafting::Skipped, us);
    }
    assert_eq!(tracker, CostTracker::default());
    drift(&mut tracker, &cost, [1.0; 3], 200);
    tracker.observe(&cost, &load, 0, Drafting::Skipped, 1e9);
    let scale = tracker.scale();
    assert!(scale.fixed < 1.3 && scale.verify < 1.3, "{scale:?}");
}

proptest! {
    #[test]
    fn repair_never_falls_and_keeps_the_sum(values in vec(0.0..100.0_f64, 0..12)) {
        let fixed = repaired(&values);
        prop_assert!(fixed.is_sorted());
        prop_assert!((fixed.iter().sum::<f64>() - values.iter().sum::<f64>()).abs() < 1e-9);
        if values.is_sorted() {
            prop_assert_eq!(fixed, values);
        }
    }

    #[test]
    fn more_drafts_never_take_less_time(
        steps in vec((1_u64..40, 0.0..9.0_f64), 1..8),
        tiers in vec(1_u32..60, 0..5),
        num_requests in 1_u32..40,
    ) {
        let (mut at, mut us) = (0, 1.0);
        let token_us = steps.iter().map(|step| {
            (at, us) = (at + step.0, us + step.1);
            Knot(at, us)
        }).collect();
        let mut total = 0;
        let tiers = tiers.iter().map(|step| { total += step; total }).collect();
        let table = CostTable { token_us, tiers, ..CostTable::default() };
        let cost = StepCost::new(table).unwrap();
        let load = StepLoad::of_requests(num_requests);
        let times: Vec<f64> =
            (0..200).map(|drafts| cost.step_us(&load, drafts, Drafting::Paid)).collect();
        prop_assert!(times.is_sorted());
        for tokens in 0..200 {
            prop_assert!(cost.num_executed_tokens(tokens) >= tokens);
        }
    }
}
