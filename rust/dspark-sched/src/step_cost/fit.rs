//! A cost table from measured steps of many shapes.
//!
//! Backfitting: each part in turn takes the mean of what the others leave unexplained, until
//! nothing moves. Every step counts by its relative error: a large batch varies by more microseconds
//! than a small one takes. The parts are told apart because different numbers of requests reach the same
//! number of tokens, and because some steps draft and some do not. Measure a cross product of
//! requests and verify lengths, with acceptance pinned, and use medians of warm repeats.

use std::collections::BTreeMap;

use super::curve::Knot;
use super::error::CostError;
use super::step::{Drafting, StepCost, StepLoad};
use super::table::{CostTable, QualityLimits};

const MAX_NUM_SWEEPS: usize = 2000;
/// Sweeps end when no part moves by more than this share of the mean step.
const TOLERANCE: f64 = 1e-6;

/// One shape of step and how long it took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSample {
    /// Requests that decode.
    pub num_requests: u32,
    /// All tokens of the step, padding included.
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

/// Fits `T = bias + α(requests) + θ(tokens) + draft(requests)` with a slope over context tokens, and
/// another one of the draft pass, to measured steps.
///
/// # Errors
/// [`CostError::BadSample`], [`CostError::BadTime`], [`CostError::NoisySample`],
/// [`CostError::DraftNotSeparable`], [`CostError::PoorFit`], or as [`StepCost::measured`].
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
    let mut parts = Parts {
        context_mean: mean_context(samples.iter()),
        draft_context_mean: mean_context(samples.iter().filter(|sample| sample.drafts())),
        ..Parts::default()
    };
    let mean_us = samples.iter().map(|sample| sample.step_us).sum::<f64>() / samples.len() as f64;
    for _ in 0..MAX_NUM_SWEEPS {
        if parts.sweep(samples) <= TOLERANCE * mean_us {
            break;
        }
    }
    let cost = StepCost::measured(parts.table(samples, tiers), limits)?;
    let report = check_residuals(&cost, samples, limits)?;
    Ok((cost, report))
}

impl StepSample {
    fn drafts(&self) -> bool {
        self.drafting == Drafting::Paid
    }

    /// What its squared error counts.
    fn weight(&self) -> f64 {
        self.step_us.powi(-2)
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

/// Slopes are of contexts less their mean: then each part's share is the best one given the others,
/// and sweeps come closer whatever the contexts are.
#[derive(Default)]
struct Parts {
    token_us: BTreeMap<u32, f64>,
    request_us: BTreeMap<u32, f64>,
    draft_us: BTreeMap<u32, f64>,
    context_slope: f64,
    context_mean: f64,
    draft_context_slope: f64,
    draft_context_mean: f64,
}

impl Parts {
    fn explained(&self, sample: &StepSample) -> f64 {
        let at = |part: &BTreeMap<u32, f64>, key| part.get(&key).copied().unwrap_or(0.0);
        let context = sample.num_context_tokens as f64;
        let draft_us = match sample.drafting {
            Drafting::Paid => {
                let past_mean = context - self.draft_context_mean;
                at(&self.draft_us, sample.num_requests) + self.draft_context_slope * past_mean
            }
            Drafting::Skipped => 0.0,
        };
        at(&self.token_us, sample.num_tokens)
            + at(&self.request_us, sample.num_requests)
            + draft_us
            + self.context_slope * (context - self.context_mean)
    }

    /// Lets each part take what the others leave; returns how far the parts over counts moved. θ
    /// carries the level; the others start at 0, so they only take differences.
    fn sweep(&mut self, samples: &[StepSample]) -> f64 {
        let moved = self.mean_residual(samples.iter(), |sample| sample.num_tokens);
        let mut furthest = add(&mut self.token_us, moved);
        let moved = self.mean_residual(samples.iter(), |sample| sample.num_requests);
        furthest = furthest.max(add(&mut self.request_us, moved));
        let drafting = samples.iter().filter(|sample| sample.drafts());
        let moved = self.mean_residual(drafting, |sample| sample.num_requests);
        furthest = furthest.max(add(&mut self.draft_us, moved));
        self.context_slope += self.slope_residual(samples.iter());
        let drafting = samples.iter().filter(|sample| sample.drafts());
        self.draft_context_slope += self.slope_residual(drafting);
        furthest
    }

    fn mean_residual<'a>(
        &self,
        samples: impl Iterator<Item = &'a StepSample>,
        key: fn(&StepSample) -> u32,
    ) -> BTreeMap<u32, f64> {
        let mut sums: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for sample in samples {
            let sum = sums.entry(key(sample)).or_default();
            sum.0 += sample.weight() * (sample.step_us - self.explained(sample));
            sum.1 += sample.weight();
        }
        sums.into_iter().map(|(key, (sum, weight))| (key, sum / weight)).collect()
    }

    fn slope_residual<'a>(&self, samples: impl Iterator<Item = &'a StepSample> + Clone) -> f64 {
        let context = |sample: &StepSample| sample.num_context_tokens as f64;
        let middle = mean_context(samples.clone());
        let square = |s: &StepSample| s.weight() * (context(s) - middle).powi(2);
        let variance: f64 = samples.clone().map(square).sum();
        if variance == 0.0 {
            return 0.0;
        }
        let residual = |sample: &StepSample| sample.step_us - self.explained(sample);
        samples.map(|s| s.weight() * (context(s) - middle) * residual(s)).sum::<f64>() / variance
    }

    fn table(&self, samples: &[StepSample], tiers: Vec<u32>) -> CostTable {
        let lowest =
            |part: &BTreeMap<u32, f64>| part.values().copied().fold(f64::INFINITY, f64::min);
        let (token_low, request_low) = (lowest(&self.token_us), lowest(&self.request_us));
        let knots = |part: &BTreeMap<u32, f64>, low: f64| {
            part.iter().map(|(&at, us)| Knot(u64::from(at), (us - low).max(0.0))).collect()
        };
        let most = samples.iter().map(|sample| sample.num_context_tokens).max().unwrap_or(0);
        let line = |slope: f64| match most {
            0 => Vec::new(),
            most => vec![Knot(0, 0.0), Knot(most, slope * most as f64)],
        };
        // A falling slope is noise: none. What the mean context takes is in the other parts.
        let (slope, draft_slope) = (self.context_slope.max(0.0), self.draft_context_slope.max(0.0));
        let bias_us = token_low + request_low - slope * self.context_mean;
        CostTable {
            bias_us: bias_us.max(0.0),
            request_us: knots(&self.request_us, request_low),
            draft_us: knots(&self.draft_us, draft_slope * self.draft_context_mean),
            token_us: knots(&self.token_us, token_low),
            context_us: line(slope),
            draft_context_us: line(draft_slope),
            tiers,
            ..CostTable::default()
        }
    }
}

fn mean_context<'a>(samples: impl Iterator<Item = &'a StepSample> + Clone) -> f64 {
    let weight: f64 = samples.clone().map(StepSample::weight).sum();
    let sum: f64 = samples.map(|sample| sample.weight() * sample.num_context_tokens as f64).sum();
    if weight > 0.0 { sum / weight } else { 0.0 }
}

/// Adds to a part; returns the largest change.
fn add(part: &mut BTreeMap<u32, f64>, moved: BTreeMap<u32, f64>) -> f64 {
    let furthest = moved.values().fold(0.0, |furthest: f64, us| furthest.max(us.abs()));
    for (key, us) in moved {
        *part.entry(key).or_default() += us;
    }
    furthest
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
        let load = StepLoad {
            num_requests: sample.num_requests,
            num_other_tokens: 0,
            num_context_tokens: sample.num_context_tokens,
        };
        let num_drafts = sample.num_tokens - sample.num_requests;
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
