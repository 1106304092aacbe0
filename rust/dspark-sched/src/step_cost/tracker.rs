//! Drift of a table: three factors on its parts, followed by a Kalman filter over step times.
//!
//! Clocks, other tenants and long contexts move costs after the table was measured. Each measured
//! step is one equation `fixed · x_1 + verify · x_2 + draft · x_3 = y` in the factors. A factor that
//! the recent steps say nothing about keeps its value and only grows less certain, so that the next
//! step of another shape corrects it. Factors come from history, so plans made with them stay exact.

use super::step::{Drafting, StepCost, StepLoad};

/// Variance of a step's relative time around the model.
const STEP_VARIANCE: f64 = 0.02 * 0.02;
/// Variance of a table's parts at the start.
const START_VARIANCE: f64 = 0.10 * 0.10;
/// How much a part's variance grows with each step.
const DRIFT_VARIANCE: f64 = 0.004 * 0.004;
/// Variance of a part that was not seen for long.
const MAX_VARIANCE: f64 = 0.5 * 0.5;
/// Largest surprise that is believed at once, of the predicted time.
const MAX_SURPRISE: f64 = 0.3;
/// Factors stay between this and its inverse.
const MIN_FACTOR: f64 = 0.05;

/// Factors on the parts of a cost table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostScale {
    /// Of bias, requests and context.
    pub fixed: f64,
    /// Of tokens and windows.
    pub verify: f64,
    /// Of the draft pass.
    pub draft: f64,
}

impl Default for CostScale {
    fn default() -> Self {
        Self { fixed: 1.0, verify: 1.0, draft: 1.0 }
    }
}

/// Follows the factors.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTracker {
    factors: [f64; 3],
    covariance: [[f64; 3]; 3],
}

impl Default for CostTracker {
    fn default() -> Self {
        let mut covariance = [[0.0; 3]; 3];
        (0..3).for_each(|index| covariance[index][index] = START_VARIANCE);
        Self { factors: [1.0; 3], covariance }
    }
}

impl CostTracker {
    /// The factors now.
    #[must_use]
    pub fn scale(&self) -> CostScale {
        let [fixed, verify, draft] = self.factors;
        CostScale { fixed, verify, draft }
    }

    /// Learns from one measured step. A time that is not positive and finite is ignored.
    pub fn observe(
        &mut self,
        cost: &StepCost,
        load: &StepLoad,
        num_drafts: u32,
        drafting: Drafting,
        step_us: f64,
    ) {
        let [fixed_us, draft_us] = cost.constant_us(load, drafting);
        let window_us = if num_drafts > 0 { cost.window_us(load) } else { 0.0 };
        let token_us = window_us + cost.token_us(load.num_base_tokens().saturating_add(num_drafts));
        let table_us = fixed_us + token_us + draft_us;
        if !(step_us.is_finite() && step_us > 0.0 && table_us > 0.0) {
            return;
        }
        let parts = [fixed_us, token_us, draft_us].map(|us| us / table_us);
        self.grow_uncertainty();
        self.correct(parts, step_us / table_us);
    }

    fn grow_uncertainty(&mut self) {
        for index in 0..3 {
            let variance = &mut self.covariance[index][index];
            *variance = (*variance + DRIFT_VARIANCE).min(MAX_VARIANCE);
        }
    }

    fn correct(&mut self, parts: [f64; 3], relative_us: f64) {
        let spread = self.covariance.map(|row| dot(row, parts));
        let predicted = dot(self.factors, parts);
        let variance = dot(spread, parts) + STEP_VARIANCE * predicted * predicted;
        let limit = MAX_SURPRISE * predicted;
        let surprise = (relative_us - predicted).clamp(-limit, limit);
        for row in 0..3 {
            let gain = spread[row] / variance;
            let factor = self.factors[row] + gain * surprise;
            self.factors[row] = factor.clamp(MIN_FACTOR, 1.0 / MIN_FACTOR);
            for (cell, spread) in self.covariance[row].iter_mut().zip(spread) {
                *cell -= gain * spread;
            }
        }
    }
}

fn dot(left: [f64; 3], right: [f64; 3]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}
