//! The planners. All reuse one workspace: after construction nothing is allocated.

use super::batch::{DraftBatch, PlanCost};
use super::error::PlanError;
use super::falling::FallingSurvivals;
use super::order::{MAX_NUM_DRAFTS, MAX_NUM_REQUESTS, fill_keys, row_of, survival_of};
use super::report::{PlanReport, Prediction, VerifyPlan, predict};
use crate::confidence::sanitized;
use crate::ids::saturating_u32;

/// Most drafts of a step: what the workspace may take is bounded.
const MAX_NUM_CELLS: usize = 1 << 22;

/// What bounds a budget.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BudgetRule {
    /// Most drafts of a step, for example what the token budget leaves.
    pub max_num_drafts: Option<u32>,
    /// Least predicted gain over a step without drafts; below it the budget is 0.
    pub min_predicted_gain: f64,
    /// Whether a budget above 0 is raised to what its graph tier computes anyway.
    pub fill_tier: bool,
}

/// How many drafts a step verifies in all, fixed before they are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftBudget {
    /// `K`.
    pub num_drafts: u32,
    /// What the best budget should bring, even where the gate refuses it.
    pub prediction: Prediction,
    /// Whether the predicted gain reaches the rule's least.
    pub is_worthwhile: bool,
}

/// Plans steps of up to a number of requests with γ drafts each.
#[derive(Debug, Clone)]
pub struct VerifyPlanner {
    max_num_requests: usize,
    num_drafts: usize,
    keys: Vec<u64>,
    falling: FallingSurvivals,
    plan: VerifyPlan,
}

impl VerifyPlanner {
    /// A planner for `max_num_requests` requests of `num_drafts` (γ) drafts.
    ///
    /// # Errors
    /// [`PlanError::Zero`] or [`PlanError::TooMany`].
    pub fn new(max_num_requests: usize, num_drafts: usize) -> Result<Self, PlanError> {
        let sizes = [
            ("max_num_requests", max_num_requests, MAX_NUM_REQUESTS),
            ("num_drafts", num_drafts, MAX_NUM_DRAFTS),
        ];
        for (name, asked, limit) in sizes {
            if asked == 0 {
                return Err(PlanError::Zero { name });
            }
            if asked > limit {
                return Err(PlanError::TooMany { name, asked, limit });
            }
        }
        let asked = max_num_requests * num_drafts;
        if asked > MAX_NUM_CELLS {
            let name = "max_num_requests * num_drafts";
            return Err(PlanError::TooMany { name, asked, limit: MAX_NUM_CELLS });
        }
        let verify_lens = Vec::with_capacity(max_num_requests);
        Ok(Self {
            max_num_requests,
            num_drafts,
            keys: Vec::with_capacity(max_num_requests * num_drafts),
            falling: FallingSurvivals::with_capacity(max_num_requests * num_drafts),
            plan: VerifyPlan { verify_lens, report: PlanReport::default() },
        })
    }

    /// γ.
    #[must_use]
    pub fn num_drafts(&self) -> usize {
        self.num_drafts
    }

    /// The last plan.
    #[must_use]
    pub fn plan(&self) -> &VerifyPlan {
        &self.plan
    }

    /// Algorithm 1 of the DSpark paper: admit drafts in the order of survival while Θ rises, and
    /// stop at the first that does not raise it.
    ///
    /// Admission of draft `j` of a request never depends on it or on later drafts: it is admitted
    /// when all drafts before it in the order were, which reveals their survivals only, and its own
    /// survival raises Θ. That survival is a function of the drafts before `j`; the first draft that
    /// does not raise Θ ends the plan, so nothing behind it is read. Looking past it for a better
    /// maximum would make the admission of a draft depend on its successor's confidence (Appendix A
    /// of the paper). A least gain of the finished plan would do the same, hence there is none here:
    /// cap the plan with `max_num_drafts` from history.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] or [`PlanError::WrongLength`].
    pub fn greedy(
        &mut self,
        batch: &DraftBatch<'_>,
        cost: &PlanCost<'_>,
        max_num_drafts: Option<u32>,
    ) -> Result<&VerifyPlan, PlanError> {
        self.sort(batch)?;
        let num_admitted = self.rising(batch, cost, max_num_drafts.unwrap_or(u32::MAX));
        self.admit(batch, num_admitted, Some(cost));
        Ok(&self.plan)
    }

    /// Algorithm 1 on a convex table below the real one, then up to the end of the graph tier.
    ///
    /// On stairs [`VerifyPlanner::greedy`] stops before the first one. On `envelope`
    /// ([`crate::step_cost::StepCost::envelope`]) Θ has one maximum. Where it stops is decided by
    /// drafts that were revealed in order, as there; that fixes the tier, and the drafts that fill it
    /// come in the same order, each admitted whatever it is. So no admission depends on the draft or
    /// on later ones.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] or [`PlanError::WrongLength`].
    pub fn greedy_on_tiers(
        &mut self,
        batch: &DraftBatch<'_>,
        cost: &PlanCost<'_>,
        envelope: &PlanCost<'_>,
        max_num_drafts: Option<u32>,
    ) -> Result<&VerifyPlan, PlanError> {
        self.sort(batch)?;
        let limit = max_num_drafts.unwrap_or(u32::MAX);
        let stop = self.rising(batch, envelope, limit);
        let times = cost.objective(&batch.load).times;
        let room = times.num_executed_tokens(stop).saturating_sub(batch.load.num_base_tokens());
        let filled = if stop == 0 { 0 } else { room.min(limit).max(stop) };
        self.admit(batch, filled.min(saturating_u32(self.keys.len())), Some(cost));
        Ok(&self.plan)
    }

    /// How many drafts of the order each raise Θ.
    fn rising(&self, batch: &DraftBatch<'_>, cost: &PlanCost<'_>, limit: u32) -> u32 {
        let objective = cost.objective(&batch.load);
        let mut best = objective.rate(0, 0.0);
        let (mut num_admitted, mut survival_sum) = (0, 0.0);
        for &key in &self.keys {
            let sum = survival_sum + survival_of(key);
            if num_admitted == limit {
                break;
            }
            let rate = objective.rate(num_admitted + 1, sum);
            if rate <= best {
                break;
            }
            (best, num_admitted, survival_sum) = (rate, num_admitted + 1, sum);
        }
        num_admitted
    }

    /// The budget of the production form (paper, section 5.2): the number of drafts with the largest
    /// Θ of all, by the survivals of an earlier step. Stairs in the cost need the global maximum.
    ///
    /// `past` must hold survivals computed before the current block was drawn. Then the budget, its
    /// gate and the tier it fills are history, and no draft of the current block can depend on them.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] or [`PlanError::WrongLength`].
    pub fn budget(
        &mut self,
        past: &DraftBatch<'_>,
        cost: &PlanCost<'_>,
        rule: &BudgetRule,
    ) -> Result<DraftBudget, PlanError> {
        past.check(self.max_num_requests, self.num_drafts)?;
        self.falling.fill(past, self.num_drafts);
        let objective = cost.objective(&past.load);
        let limit = rule.max_num_drafts.unwrap_or(u32::MAX);
        let mut best = (objective.rate(0, 0.0), 0, 0.0);
        let base = past.load.num_base_tokens();
        let most = saturating_u32(self.falling.len()).min(limit);
        let (mut sum, mut end) = (0.0, 0);
        for (survival, num_drafts) in self.falling.survivals().zip(1..=limit) {
            sum += survival;
            // More drafts take no more time up to the end of a tier, so the best fill one.
            if num_drafts > end {
                end = (objective.times.num_executed_tokens(num_drafts) - base).min(most);
            }
            if num_drafts < end {
                continue;
            }
            let rate = objective.rate(num_drafts, sum);
            if rate > best.0 {
                best = (rate, num_drafts, sum);
            }
        }
        let (_, num_drafts, sum) = best;
        let prediction = predict(&objective, num_drafts, sum);
        let is_worthwhile = num_drafts > 0 && prediction.gain >= rule.min_predicted_gain;
        let filled = objective.times.num_executed_tokens(num_drafts) - past.load.num_base_tokens();
        let filled =
            if rule.fill_tier { filled.min(self.num_available(past)).min(limit) } else { 0 };
        let num_drafts = if is_worthwhile { num_drafts.max(filled) } else { 0 };
        Ok(DraftBudget { num_drafts, prediction, is_worthwhile })
    }

    /// The plan of the production form: the `num_drafts` drafts of largest current survival.
    ///
    /// Admission of a draft never depends on it or on later drafts: with the budget fixed
    /// beforehand, a draft is admitted when fewer than `num_drafts` drafts come before it in the
    /// order. Drafts behind it in its own request always come later, so only its own survival counts,
    /// a function of the drafts before it, and the other requests' survivals. Reveal the order draft
    /// by draft and stop after `num_drafts`: the same plan.
    ///
    /// Drafts without survival are never admitted, so the plan may be smaller than the budget.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] or [`PlanError::WrongLength`].
    pub fn top(
        &mut self,
        batch: &DraftBatch<'_>,
        num_drafts: u32,
        cost: Option<&PlanCost<'_>>,
    ) -> Result<&VerifyPlan, PlanError> {
        batch.check(self.max_num_requests, self.num_drafts)?;
        fill_keys(&mut self.keys, batch, self.num_drafts);
        let num_admitted = (num_drafts as usize).min(self.keys.len());
        if num_admitted < self.keys.len() {
            self.keys.select_nth_unstable(num_admitted);
        }
        self.admit(batch, saturating_u32(num_admitted), cost);
        Ok(&self.plan)
    }

    /// Verifies up to `num_drafts` drafts of every request: the same number, whatever they are, so
    /// no admission depends on a draft. With γ it verifies all, which is the plan without a table;
    /// with 0 none.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] or [`PlanError::WrongLength`].
    pub fn fixed(
        &mut self,
        batch: &DraftBatch<'_>,
        num_drafts: u32,
        cost: Option<&PlanCost<'_>>,
    ) -> Result<&VerifyPlan, PlanError> {
        batch.check(self.max_num_requests, self.num_drafts)?;
        let mut survival_sum = 0.0;
        self.plan.verify_lens.clear();
        for (row, survival) in batch.survival.chunks_exact(self.num_drafts).enumerate() {
            let len = batch.limit(row, self.num_drafts).min(num_drafts as usize);
            self.plan.verify_lens.push(saturating_u32(len));
            survival_sum +=
                survival.iter().take(len).map(|&a| f64::from(sanitized(a))).sum::<f64>();
        }
        let num_admitted = self.plan.verify_lens.iter().sum();
        let counts = [self.num_available(batch), num_admitted];
        self.plan.report = PlanReport::new(&batch.load, counts, survival_sum, cost);
        Ok(&self.plan)
    }

    fn sort(&mut self, batch: &DraftBatch<'_>) -> Result<(), PlanError> {
        batch.check(self.max_num_requests, self.num_drafts)?;
        fill_keys(&mut self.keys, batch, self.num_drafts);
        self.keys.sort_unstable();
        Ok(())
    }

    /// Makes the plan of the first keys.
    fn admit(&mut self, batch: &DraftBatch<'_>, num_admitted: u32, cost: Option<&PlanCost<'_>>) {
        let lens = &mut self.plan.verify_lens;
        lens.clear();
        lens.resize(batch.num_requests(), 0);
        let mut survival_sum = 0.0;
        for &key in self.keys.iter().take(num_admitted as usize) {
            lens[row_of(key)] += 1;
            survival_sum += survival_of(key);
        }
        let counts = [self.num_available(batch), num_admitted];
        self.plan.report = PlanReport::new(&batch.load, counts, survival_sum, cost);
    }

    fn num_available(&self, batch: &DraftBatch<'_>) -> u32 {
        let all = batch.num_requests() * self.num_drafts;
        let limited = batch.limits.map(|limits| {
            let drafts = limits.iter().map(|&limit| (limit as usize).min(self.num_drafts));
            drafts.sum()
        });
        saturating_u32(limited.unwrap_or(all))
    }
}
