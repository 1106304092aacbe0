//! What planners read.

use super::error::{PlanError, check_length};
use crate::step_cost::{CostScale, Drafting, StepCost, StepLoad, StepTimes};

/// Drafts of the requests of one step.
#[derive(Debug, Clone, Copy)]
pub struct DraftBatch<'a> {
    /// `[R, γ]` survival of each draft, row by row. What is no probability counts as 0, and what
    /// rises within a row as the value before it.
    pub survival: &'a [f32],
    /// `[R]` most drafts that each request may verify, for example before its length limit.
    pub limits: Option<&'a [u32]>,
    /// The step's requests (`R`) and what else it computes.
    pub load: StepLoad,
}

impl<'a> DraftBatch<'a> {
    /// A batch of `num_requests` rows without limits, other tokens or counted context.
    #[must_use]
    pub fn new(survival: &'a [f32], num_requests: u32) -> Self {
        Self { survival, limits: None, load: StepLoad::of_requests(num_requests) }
    }

    /// `R`.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.load.num_requests as usize
    }

    pub(crate) fn check(
        &self,
        max_num_requests: usize,
        num_drafts: usize,
    ) -> Result<(), PlanError> {
        let asked = self.num_requests();
        if asked > max_num_requests {
            return Err(PlanError::TooMany {
                name: "num_requests",
                asked,
                limit: max_num_requests,
            });
        }
        check_length("survival", self.survival.len(), asked * num_drafts)?;
        self.limits.map_or(Ok(()), |limits| check_length("limits", limits.len(), asked))
    }

    /// Most drafts of a row.
    pub(super) fn limit(&self, row: usize, num_drafts: usize) -> usize {
        let limit = self.limits.and_then(|limits| limits.get(row));
        limit.map_or(num_drafts, |&limit| num_drafts.min(limit as usize))
    }
}

/// What a planner believes about time and acceptance. All of it comes from history.
#[derive(Debug, Clone, Copy)]
pub struct PlanCost<'a> {
    /// The measured table.
    pub cost: &'a StepCost,
    /// Drift of its parts.
    pub scale: CostScale,
    /// Accepted drafts over predicted ones, as measured; 1 when unknown.
    pub acceptance_ratio: f64,
}

impl<'a> PlanCost<'a> {
    /// The table as measured.
    #[must_use]
    pub fn new(cost: &'a StepCost) -> Self {
        Self { cost, scale: CostScale::default(), acceptance_ratio: 1.0 }
    }

    pub(crate) fn objective(&self, load: &StepLoad) -> Objective<'a> {
        Objective {
            times: self.cost.times(load, self.scale, Drafting::Paid),
            plain_us: self.cost.times(load, self.scale, Drafting::Skipped).at(0),
            num_requests: f64::from(load.num_requests),
            acceptance_ratio: self.acceptance_ratio,
        }
    }
}

/// Θ of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Objective<'a> {
    pub(crate) times: StepTimes<'a>,
    /// Time of the step that neither drafts nor verifies.
    pub(crate) plain_us: f64,
    num_requests: f64,
    acceptance_ratio: f64,
}

impl Objective<'_> {
    /// τ of drafts whose survival sums to this.
    pub(crate) fn num_tokens(&self, survival_sum: f64) -> f64 {
        self.num_requests + self.acceptance_ratio * survival_sum
    }

    /// Tokens per microsecond.
    pub(crate) fn rate(&self, num_drafts: u32, survival_sum: f64) -> f64 {
        self.num_tokens(survival_sum) / self.times.at(num_drafts)
    }

    /// Relative gain of a rate over the step without drafts; 0 without requests.
    pub(crate) fn gain(&self, rate: f64) -> f64 {
        let plain = self.num_requests / self.plain_us;
        if plain > 0.0 { rate / plain - 1.0 } else { 0.0 }
    }
}
