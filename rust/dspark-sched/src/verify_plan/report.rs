//! A plan and what it should bring.

use super::batch::{Objective, PlanCost};
use crate::step_cost::StepLoad;

/// How many drafts each request verifies.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VerifyPlan {
    /// `[R]` drafts verified, in addition to the one token that always is.
    pub verify_lens: Vec<u32>,
    /// What the plan asks for and should bring.
    pub report: PlanReport,
}

/// What a plan asks for, what lands, and what it should bring.
///
/// A trim is requested in drafts and lands in tokens that do not run: graphs come in tiers, so a
/// small trim may save nothing. Compare the two before believing in a gain.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PlanReport {
    /// `R`.
    pub num_requests: u32,
    /// Drafts that could have been verified.
    pub num_available: u32,
    /// Drafts verified: `K`.
    pub num_admitted: u32,
    /// Tokens that run: the tier that holds requests, other tokens and drafts.
    pub num_executed_tokens: u32,
    /// Tokens among them that compute nothing: lost to tier rounding.
    pub num_padding_tokens: u32,
    /// Drafts left out.
    pub requested_trim: u32,
    /// Tokens that do not run because of it.
    pub landed_trim: u32,
    /// What the cost table says; None without one.
    pub prediction: Option<Prediction>,
}

/// What a cost table says about a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Microseconds of the step, draft pass included.
    pub step_us: f64,
    /// Tokens that it yields in expectation: τ.
    pub num_tokens: f64,
    /// Tokens per second over those of a step without drafts, minus 1.
    pub gain: f64,
}

impl PlanReport {
    pub(super) fn new(
        load: &StepLoad,
        [num_available, num_admitted]: [u32; 2],
        survival_sum: f64,
        cost: Option<&PlanCost<'_>>,
    ) -> Self {
        let objective = cost.map(|cost| cost.objective(load));
        let num_base_tokens = load.num_base_tokens();
        let executed = |num_drafts: u32| match &objective {
            Some(objective) => objective.times.num_executed_tokens(num_drafts),
            None => num_base_tokens.saturating_add(num_drafts),
        };
        let num_executed_tokens = executed(num_admitted);
        Self {
            num_requests: load.num_requests,
            num_available,
            num_admitted,
            num_executed_tokens,
            num_padding_tokens: num_executed_tokens
                .saturating_sub(num_base_tokens)
                .saturating_sub(num_admitted),
            requested_trim: num_available.saturating_sub(num_admitted),
            landed_trim: executed(num_available).saturating_sub(num_executed_tokens),
            prediction: objective.map(|objective| predict(&objective, num_admitted, survival_sum)),
        }
    }
}

pub(super) fn predict(objective: &Objective<'_>, num_drafts: u32, survival_sum: f64) -> Prediction {
    Prediction {
        step_us: objective.times.at(num_drafts),
        num_tokens: objective.num_tokens(survival_sum),
        gain: objective.gain(objective.rate(num_drafts, survival_sum)),
    }
}
