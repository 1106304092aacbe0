//! Fits of measured steps: known costs come back, tables never fall, noise is refused.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::step_cost::{
    CostError, CostTable, Drafting, FitReport, Knot, QualityLimits, StepCost, StepLoad, StepSample,
    fit_step_cost,
};
use proptest::collection::vec;
use proptest::prelude::*;
use speculation::Random;

const REQUESTS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const LENS: [Option<u32>; 5] = [None, Some(0), Some(1), Some(3), Some(7)];
const CONTEXTS: [u64; 2] = [200, 2000];

/// Costs that never fall, with the knots that the samples have.
fn truths() -> impl Strategy<Value = CostTable> {
    let rises = || vec(prop_oneof![Just(0.0), 0.0..300.0_f64], 9);
    (500.0..2000.0_f64, rises(), rises(), rises(), vec(0.0..0.02_f64, 3)).prop_map(
        |(bias_us, tokens, requests, draft, slopes)| {
            let curve = |rises: &[f64], num: usize, first: f64| {
                let mut us = first;
                let risen = rises.iter().map(|rise| {
                    us += rise;
                    us
                });
                (0..num).map(|power| 1 << power).zip(risen).map(|(at, us)| Knot(at, us)).collect()
            };
            let line = |slope: f64| vec![Knot(0, 0.0), Knot(64_000, slope * 64_000.0)];
            let mut token_us: Vec<Knot> = curve(&tokens, 9, 0.0);
            // Tokens cost something, whatever else was drawn.
            token_us.iter_mut().for_each(|knot| knot.1 += 4.0 * knot.0 as f64);
            CostTable {
                bias_us,
                token_us,
                request_us: curve(&requests, 6, 0.0),
                draft_us: curve(&draft, 6, 50.0),
                context_us: line(slopes[0]),
                draft_context_us: line(slopes[1]),
                window_context_us: line(slopes[2]),
                ..CostTable::default()
            }
        },
    )
}

fn load_of(sample: &StepSample) -> (StepLoad, u32) {
    let load = StepLoad {
        num_requests: sample.num_requests,
        num_other_tokens: 0,
        num_context_tokens: sample.num_context_tokens,
    };
    (load, sample.num_tokens - sample.num_requests)
}

/// A cross product of steps; repeats of each spread by `spread` of its time, and medians are off
/// accordingly.
fn measured(truth: &CostTable, spread: f64, seed: u64) -> Vec<StepSample> {
    let cost = StepCost::new(truth.clone()).unwrap();
    let mut random = Random(seed);
    let mut samples = Vec::new();
    for num_requests in REQUESTS {
        for (len, context) in LENS.iter().flat_map(|&len| CONTEXTS.map(|context| (len, context))) {
            let mut sample = StepSample {
                num_requests,
                num_tokens: num_requests * (1 + len.unwrap_or(0)),
                num_context_tokens: context * u64::from(num_requests),
                drafting: if len.is_some() { Drafting::Paid } else { Drafting::Skipped },
                step_us: 0.0,
                spread_us: 0.0,
            };
            let (load, num_drafts) = load_of(&sample);
            let us = cost.step_us(&load, num_drafts, sample.drafting);
            sample.step_us = us * (1.0 + 0.14 * spread * random.normal());
            sample.spread_us = us * spread;
            samples.push(sample);
        }
    }
    samples
}

fn fitted(samples: &[StepSample]) -> Result<(StepCost, FitReport), CostError> {
    fit_step_cost(samples, Vec::new(), &QualityLimits::default())
}

/// Largest distance of the fitted time of a measured shape from the true one, over that.
fn worst_error(samples: &[StepSample], truth: &CostTable, found: &StepCost) -> f64 {
    let truth = StepCost::new(truth.clone()).unwrap();
    let errors = samples.iter().map(|sample| {
        let (load, num_drafts) = load_of(sample);
        let true_us = truth.step_us(&load, num_drafts, sample.drafting);
        (found.step_us(&load, num_drafts, sample.drafting) / true_us - 1.0).abs()
    });
    errors.fold(0.0, f64::max)
}

fn is_monotone(cost: &StepCost) -> bool {
    let table = cost.table();
    let curves = [
        &table.token_us,
        &table.request_us,
        &table.draft_us,
        &table.context_us,
        &table.draft_context_us,
        &table.window_context_us,
    ];
    curves.iter().all(|knots| knots.is_sorted_by(|low, high| low.1 <= high.1))
}

proptest! {
    #[test]
    fn exact_steps_give_their_costs_back(truth in truths()) {
        let samples = measured(&truth, 0.0, 1);
        let (cost, report) = fitted(&samples).unwrap();
        prop_assert!(is_monotone(&cost));
        prop_assert!(report.worst_residual_ratio < 0.003, "{:?}", report);
        prop_assert!(worst_error(&samples, &truth, &cost) < 0.003);
    }

    #[test]
    fn noisy_steps_give_their_costs_back_within_their_noise(
        truth in truths(),
        spread in 0.0..0.18_f64,
        seed in any::<u64>(),
    ) {
        let samples = measured(&truth, spread, seed);
        let (cost, _) = fitted(&samples).unwrap();
        prop_assert!(is_monotone(&cost));
        // A median is off by 0.14 of its spread; the fit has two steps per coefficient.
        let error = worst_error(&samples, &truth, &cost);
        prop_assert!(error < 0.003 + 4.0 * 0.14 * spread, "{} {}", error, spread);
    }

    /// Larger steps that really take less are no noise, however quiet their repeats.
    #[test]
    fn a_fall_past_the_limit_is_refused(truth in truths(), share in 0.3..0.6_f64) {
        let mut samples = measured(&truth, 0.001, 1);
        let larger = samples.iter_mut().filter(|sample| sample.num_tokens >= 32);
        larger.for_each(|sample| sample.step_us = share * 500.0);
        let error = fitted(&samples).unwrap_err();
        let is_named = matches!(
            error,
            CostError::FallingSteps { .. } | CostError::PoorFit { .. } | CostError::FlatTable { .. }
        );
        prop_assert!(is_named, "{}", error);
    }

    #[test]
    fn tokens_that_cost_nothing_are_refused(truth in truths(), spread in 0.0..0.02_f64) {
        let flat = CostTable {
            token_us: vec![Knot(1, 10.0)],
            window_context_us: Vec::new(),
            ..truth
        };
        match fitted(&measured(&flat, spread, 1)) {
            Err(error) => prop_assert!(matches!(error, CostError::FlatTable { .. }), "{}", error),
            // Noise may look like a rise of θ, which the same noise bounds.
            Ok((cost, _)) => {
                let rise = cost.table().token_us.last().unwrap().1;
                prop_assert!(rise < 4.0 * 0.14 * spread * 12_000.0 && spread > 0.005);
            }
        }
    }
}

fn truth() -> CostTable {
    CostTable {
        bias_us: 1000.0,
        token_us: vec![Knot(1, 0.0), Knot(256, 2550.0)],
        draft_us: vec![Knot(1, 300.0), Knot(32, 600.0)],
        context_us: vec![Knot(0, 0.0), Knot(64_000, 1500.0)],
        ..CostTable::default()
    }
}

#[test]
fn windows_that_read_their_context_slower_are_told_apart() {
    let with_windows =
        CostTable { window_context_us: vec![Knot(0, 0.0), Knot(64_000, 800.0)], ..truth() };
    let (cost, report) = fitted(&measured(&with_windows, 0.0, 1)).unwrap();
    assert!(report.worst_residual_ratio < 0.002, "{report:?}");
    let found = cost.table().window_context_us.last().unwrap().1;
    assert!((found / 800.0 - 1.0).abs() < 0.02, "{found}");
    let (cost, _) = fitted(&measured(&truth(), 0.0, 1)).unwrap();
    assert!(cost.table().window_context_us.last().unwrap().1 < 5.0);
}

#[test]
fn a_loud_step_counts_less_than_a_quiet_one() {
    let error_of = |spread: f64| {
        let mut samples = measured(&truth(), 0.002, 1);
        let outlier = samples.iter_mut().find(|sample| sample.num_tokens == 256).unwrap();
        outlier.step_us *= 1.14;
        outlier.spread_us = spread * outlier.step_us;
        let quiet: Vec<StepSample> = samples
            .iter()
            .copied()
            .filter(|sample| sample.spread_us < 0.01 * sample.step_us)
            .collect();
        let (cost, _) = fitted(&samples).unwrap();
        worst_error(&quiet, &truth(), &cost)
    };
    let (quiet, loud) = (error_of(0.0), error_of(0.19));
    assert!(loud < 0.6 * quiet, "{loud} {quiet}");
}

#[test]
fn parts_that_steps_cannot_tell_apart_do_no_harm() {
    // One verify length: tokens are twice the requests wherever anything is drafted.
    let samples: Vec<StepSample> = measured(&truth(), 0.001, 1)
        .into_iter()
        .filter(|sample| [1, 2].contains(&(sample.num_tokens / sample.num_requests)))
        .collect();
    let (cost, report) = fitted(&samples).unwrap();
    assert!(is_monotone(&cost));
    assert!(report.worst_residual_ratio < 0.01, "{report:?}");
}

#[test]
fn padding_of_a_plain_step_is_no_window() {
    let mut samples = measured(&truth(), 0.0, 1);
    // 3 requests run as 4 tokens: as long as a step of 4 tokens with the context of 3 requests.
    let plain = StepCost::new(truth()).unwrap();
    let padded = |context: u64| {
        let load = StepLoad { num_requests: 3, num_other_tokens: 1, num_context_tokens: context };
        StepSample {
            num_requests: 3,
            num_tokens: 4,
            num_context_tokens: context,
            drafting: Drafting::Skipped,
            step_us: plain.step_us(&load, 0, Drafting::Skipped),
            spread_us: 0.0,
        }
    };
    samples.extend([padded(600), padded(60_000)]);
    let (_, report) = fitted(&samples).unwrap();
    assert!(report.worst_residual_ratio < 0.002, "{report:?}");
}

#[test]
fn no_step_is_free_though_contexts_explain_all_of_it() {
    let limits = QualityLimits {
        min_rise_ratio: -1e9,
        max_repair_ratio: 1e9,
        max_spread_ratio: 1e9,
        max_residual_ratio: 1e9,
    };
    let mut samples = Vec::new();
    for (place, (num_requests, len)) in
        [(2, None), (2, Some(0)), (2, Some(1)), (1, None), (1, Some(0)), (1, Some(1))]
            .into_iter()
            .enumerate()
    {
        let num_context_tokens = 20 + 10 * place as u64;
        samples.push(StepSample {
            num_requests,
            num_tokens: num_requests * (1 + len.unwrap_or(0)),
            num_context_tokens,
            drafting: if len.is_some() { Drafting::Paid } else { Drafting::Skipped },
            step_us: 100.0 * num_context_tokens as f64,
            spread_us: 10.0,
        });
    }
    let (cost, _) = fit_step_cost(&samples, Vec::new(), &limits).unwrap();
    let alone = StepLoad { num_requests: 1, num_other_tokens: 0, num_context_tokens: 0 };
    // A tenth of the shortest step.
    assert!(cost.step_us(&alone, 0, Drafting::Skipped) >= 0.1 * 2000.0 - 1e-6);
}
