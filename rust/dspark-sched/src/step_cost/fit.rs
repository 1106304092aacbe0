//! A cost table from measured steps of many shapes.
//!
//! Least squares among tables that never fall: every rise of a curve from one knot to the next is a
//! coefficient of at least 0, and so are the level and the slopes over the context. All are found at
//! once. A fit that may fall and is repaired afterwards is worse: where steps tell two parts badly
//! apart, it sends one up and the other down, and the repair of one alone undoes half of that.
//!
//! Every step counts by its error relative to its time, a large batch varies by more microseconds
//! than a small one takes, and less where its repeats spread. The parts are told apart because
//! different numbers of requests reach the same number of tokens, and because some steps draft and
//! some do not. Measure a cross product of requests and verify lengths, with acceptance pinned, and
//! use medians of warm repeats.

use std::collections::BTreeSet;

use super::curve::Knot;
use super::error::CostError;
use super::least_squares::{NormalEquations, dot};
use super::step::{Drafting, StepCost, StepLoad};
use super::table::{CostTable, QualityLimits};

/// What an additive table leaves open of a step, of its time.
const MODEL_ERROR: f64 = 0.02;
/// Standard error of a median of a dozen repeats, of their spread: 1.25 σ / √12, and p90 - p10 is
/// 2.56 σ.
const MEDIAN_ERROR: f64 = 0.14;
/// Draws parts that the steps cannot tell apart to 0.
const RIDGE: f64 = 1e-10;
/// The same of a slope: contexts that hardly differ say nothing about it.
const SLOPE_RIDGE: f64 = 1e-4;

/// Share of the shortest step that is fixed, whatever contexts that rise with the steps suggest: no
/// step is free.
const LEAST_FIXED: f64 = 0.1;

/// One shape of step and how long it took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSample {
    /// Requests that decode.
    pub num_requests: u32,
    /// All tokens of the step, padding included. A drafting step with more than requests verifies.
    pub num_tokens: u32,
    /// Context tokens of all requests together.
    pub num_context_tokens: u64,
    /// Whether the draft pass ran.
    pub drafting: Drafting,
    /// Median of its repeats.
    pub step_us: f64,
    /// p90 - p10 of its repeats.
    pub spread_us: f64,
}

/// How well a table describes the steps it comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FitReport {
    /// Steps fitted.
    pub num_samples: usize,
    /// Largest distance of a step from the table, over its time.
    pub worst_residual_ratio: f64,
    /// Mean of the same.
    pub mean_residual_ratio: f64,
}

/// Fits `T = bias + α(requests) + θ(tokens) + draft(requests)` with slopes over context tokens, of
/// every step, of the draft pass and of verification, to measured steps.
///
/// # Errors
/// [`CostError::BadSample`], [`CostError::BadTime`], [`CostError::NoisySample`],
/// [`CostError::DraftNotSeparable`], [`CostError::FallingSteps`], [`CostError::PoorFit`], or as
/// [`StepCost::measured`].
pub fn fit_step_cost(
    samples: &[StepSample],
    tiers: Vec<u32>,
    limits: &QualityLimits,
) -> Result<(StepCost, FitReport), CostError> {
    samples.iter().try_for_each(|sample| check_sample(sample, limits))?;
    let num_drafting = samples.iter().filter(|sample| sample.drafts()).count();
    if num_drafting == 0 || num_drafting == samples.len() {
        return Err(CostError::DraftNotSeparable { num_drafting, num_samples: samples.len() });
    }
    let parts = Parts::of(samples);
    let rows: Vec<Vec<f64>> = samples.iter().map(|sample| parts.row(sample)).collect();
    let shortest = samples.iter().map(|sample| sample.step_us).fold(f64::INFINITY, f64::min);
    let fixed_us = LEAST_FIXED * shortest;
    let values: Vec<f64> = samples.iter().map(|sample| sample.step_us - fixed_us).collect();
    let weights: Vec<f64> = samples.iter().map(StepSample::weight).collect();
    let equations = NormalEquations::new(&rows, &values, &weights, &parts.ridge());
    let mut rises = equations.non_negative_solution();
    check_falls(samples, &rows, &equations.solution(), &rises, limits)?;
    if let Some(bias_us) = rises.first_mut() {
        *bias_us += fixed_us;
    }
    let cost = StepCost::measured(parts.table(samples, &rises, tiers), limits)?;
    let report = check_residuals(&cost, samples, limits)?;
    Ok((cost, report))
}

impl StepSample {
    fn drafts(&self) -> bool {
        self.drafting == Drafting::Paid
    }

    /// Whether some request has more than one row; more tokens of a step without drafts are padding.
    fn verifies(&self) -> bool {
        self.drafts() && self.num_tokens > self.num_requests
    }

    /// What its squared error counts.
    fn weight(&self) -> f64 {
        let model_us = MODEL_ERROR * self.step_us;
        let median_us = MEDIAN_ERROR * self.spread_us;
        (model_us * model_us + median_us * median_us).recip()
    }
}

fn check_sample(sample: &StepSample, limits: &QualityLimits) -> Result<(), CostError> {
    let &StepSample { num_requests, num_tokens, step_us, spread_us, .. } = sample;
    if num_requests == 0 || num_tokens < num_requests {
        return Err(CostError::BadSample { num_requests, num_tokens });
    }
    for (name, us) in [("step_us", step_us), ("spread_us", spread_us)] {
        super::curve::check_time(name, us)?;
    }
    let (ratio, limit) = (spread_us / step_us, limits.max_spread_ratio);
    if ratio > limit || step_us == 0.0 {
        return Err(CostError::NoisySample { num_requests, num_tokens, ratio, limit });
    }
    Ok(())
}

/// Knots of the curves, and the order of the coefficients: bias; rises of θ, of α; level and rises
/// of the draft pass; slopes over the context of all steps, of drafting ones, of verifying ones.
struct Parts {
    tokens: Vec<u32>,
    requests: Vec<u32>,
    drafting: Vec<u32>,
}

impl Parts {
    fn of(samples: &[StepSample]) -> Self {
        let drafting = samples.iter().filter(|sample| sample.drafts());
        Self {
            tokens: distinct(samples.iter().map(|sample| sample.num_tokens)),
            requests: distinct(samples.iter().map(|sample| sample.num_requests)),
            drafting: distinct(drafting.map(|sample| sample.num_requests)),
        }
    }

    /// What a sample counts of each coefficient.
    fn row(&self, sample: &StepSample) -> Vec<f64> {
        let rises = |knots: &[u32], at: u32| {
            knots[1..].iter().map(|&knot| f64::from(at >= knot)).collect::<Vec<f64>>()
        };
        let drafts = f64::from(sample.drafts());
        let mut row = vec![1.0];
        row.extend(rises(&self.tokens, sample.num_tokens));
        row.extend(rises(&self.requests, sample.num_requests));
        row.push(drafts);
        row.extend(rises(&self.drafting, sample.num_requests).iter().map(|rise| drafts * rise));
        let context = sample.num_context_tokens as f64;
        row.extend([context, drafts * context, f64::from(sample.verifies()) * context]);
        row
    }

    fn ridge(&self) -> Vec<f64> {
        let num_rises = self.tokens.len() + self.requests.len() + self.drafting.len() - 1;
        let mut ridge = vec![RIDGE; num_rises];
        ridge.extend([SLOPE_RIDGE; 3]);
        ridge
    }

    fn table(&self, samples: &[StepSample], rises: &[f64], tiers: Vec<u32>) -> CostTable {
        let (bias_us, rest) =
            rises.split_first().map_or((0.0, rises), |(&bias, rest)| (bias, rest));
        let (token_rises, rest) = rest.split_at(self.tokens.len() - 1);
        let (request_rises, rest) = rest.split_at(self.requests.len() - 1);
        let (draft_rises, slopes) = rest.split_at(self.drafting.len());
        let most = samples.iter().map(|sample| sample.num_context_tokens).max().unwrap_or(0);
        let line = |slope: &f64| match most {
            0 => Vec::new(),
            most => vec![Knot(0, 0.0), Knot(most, slope * most as f64)],
        };
        let mut lines = slopes.iter().map(line);
        let mut next_line = || lines.next().unwrap_or_default();
        CostTable {
            bias_us,
            token_us: knots(&self.tokens, &[&[0.0], token_rises].concat()),
            request_us: knots(&self.requests, &[&[0.0], request_rises].concat()),
            draft_us: knots(&self.drafting, draft_rises),
            context_us: next_line(),
            draft_context_us: next_line(),
            window_context_us: next_line(),
            tiers,
            ..CostTable::default()
        }
    }
}

fn distinct(counts: impl Iterator<Item = u32>) -> Vec<u32> {
    counts.collect::<BTreeSet<u32>>().into_iter().collect()
}

/// A curve from its rises.
fn knots(at: &[u32], rises: &[f64]) -> Vec<Knot> {
    let mut us = 0.0;
    let risen = rises.iter().map(|rise| {
        us += rise;
        us
    });
    at.iter().map(|&at| u64::from(at)).zip(risen).map(|(at, us)| Knot(at, us)).collect()
}

/// Refuses steps that fall where a table may not, by more than noise explains: then a table that may
/// fall says something else about them.
fn check_falls(
    samples: &[StepSample],
    rows: &[Vec<f64>],
    free: &[f64],
    rises: &[f64],
    limits: &QualityLimits,
) -> Result<(), CostError> {
    for (sample, row) in samples.iter().zip(rows) {
        let ratio = (dot(row, free) - dot(row, rises)).abs() / sample.step_us;
        if ratio > limits.max_repair_ratio {
            return Err(CostError::FallingSteps {
                num_requests: sample.num_requests,
                num_tokens: sample.num_tokens,
                ratio,
                limit: limits.max_repair_ratio,
            });
        }
    }
    Ok(())
}

fn check_residuals(
    cost: &StepCost,
    samples: &[StepSample],
    limits: &QualityLimits,
) -> Result<FitReport, CostError> {
    let mut report = FitReport {
        num_samples: samples.len(),
        worst_residual_ratio: 0.0,
        mean_residual_ratio: 0.0,
    };
    for sample in samples {
        let past_one = sample.num_tokens - sample.num_requests;
        let num_drafts = if sample.verifies() { past_one } else { 0 };
        let load = StepLoad {
            num_requests: sample.num_requests,
            num_other_tokens: past_one - num_drafts,
            num_context_tokens: sample.num_context_tokens,
        };
        let fitted_us = cost.step_us(&load, num_drafts, sample.drafting);
        let ratio = (fitted_us - sample.step_us).abs() / sample.step_us;
        if ratio > limits.max_residual_ratio {
            return Err(CostError::PoorFit {
                num_requests: sample.num_requests,
                num_tokens: sample.num_tokens,
                step_us: sample.step_us,
                fitted_us,
                limit: limits.max_residual_ratio,
            });
        }
        report.worst_residual_ratio = report.worst_residual_ratio.max(ratio);
        report.mean_residual_ratio += ratio / samples.len() as f64;
    }
    Ok(report)
}
