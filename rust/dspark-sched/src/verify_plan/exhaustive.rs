//! Every plan tried, for tests. Not causal: it may look at all survivals at once.

use super::batch::{DraftBatch, PlanCost};
use super::error::PlanError;
use crate::confidence::sanitized;
use crate::ids::saturating_u32;

/// Most plans that are tried.
pub const MAX_NUM_PLANS: u64 = 1 << 20;

/// The best of all plans.
#[derive(Debug, Clone, PartialEq)]
pub struct ExhaustivePlan {
    /// `[R]` drafts verified. Among equal plans the one of fewest drafts found first.
    pub verify_lens: Vec<u32>,
    /// Tokens per microsecond: Θ.
    pub rate: f64,
}

/// Finds the plan with the largest Θ by trying all `(γ + 1)^R`.
///
/// # Errors
/// [`PlanError::TooManyPlans`] or [`PlanError::WrongLength`].
pub fn exhaustive_plan(
    batch: &DraftBatch<'_>,
    num_drafts: usize,
    cost: &PlanCost<'_>,
) -> Result<ExhaustivePlan, PlanError> {
    batch.check(usize::MAX, num_drafts)?;
    let num_requests = batch.num_requests();
    let plans = (num_drafts as u64 + 1).checked_pow(saturating_u32(num_requests));
    if plans.is_none_or(|plans| plans > MAX_NUM_PLANS) {
        return Err(PlanError::TooManyPlans { num_requests, num_drafts, limit: MAX_NUM_PLANS });
    }
    let objective = cost.objective(&batch.load);
    let mut lens = vec![0; num_requests];
    let mut best = ExhaustivePlan { verify_lens: lens.clone(), rate: objective.rate(0, 0.0) };
    while next_plan(&mut lens, batch, num_drafts) {
        let rows = lens.iter().zip(batch.survival.chunks_exact(num_drafts));
        let sum: f64 = rows.map(|(&len, row)| row_sum(row, len)).sum();
        let (rate, total) = (objective.rate(lens.iter().sum(), sum), lens.iter().sum::<u32>());
        let best_total: u32 = best.verify_lens.iter().sum();
        if rate > best.rate || (rate == best.rate && total < best_total) {
            best = ExhaustivePlan { verify_lens: lens.clone(), rate };
        }
    }
    Ok(best)
}

fn row_sum(row: &[f32], len: u32) -> f64 {
    row.iter().take(len as usize).map(|&survival| f64::from(sanitized(survival))).sum()
}

/// Counts up, the first request fastest; false after the last plan.
fn next_plan(lens: &mut [u32], batch: &DraftBatch<'_>, num_drafts: usize) -> bool {
    for (row, len) in lens.iter_mut().enumerate() {
        if (*len as usize) < batch.limit(row, num_drafts) {
            *len += 1;
            return true;
        }
        *len = 0;
    }
    false
}
