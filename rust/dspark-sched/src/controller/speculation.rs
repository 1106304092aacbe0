//! The controller: history, planner, gate, cost drift and acceptance in one loop.

use super::acceptance::{AcceptanceRatio, SurvivalDensity};
use super::gate::{DraftGate, GateState};
use super::settings::{ControllerSettings, PlannerKind};
use crate::confidence::survival;
use crate::ids::{StepId, saturating_u32};
use crate::step_cost::{CostScale, CostTracker, Drafting, StepCost, StepLoad};
use crate::survival_history::{SlotRow, SurvivalHistory};
use crate::verify_plan::{
    BudgetRule, DraftBatch, PlanCost, PlanError, PlanReport, Prediction, VerifyPlan, VerifyPlanner,
    check_length,
};

/// Why a step drafts or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecisionReason {
    /// The planner needs no decision: verify all, a fixed number, or none.
    Static,
    /// There is no cost table: everything is verified.
    NoCostTable,
    /// Drafting should pay.
    Gain,
    /// Drafting should not pay: fallback.
    NoGain,
    /// Drafting should not pay, and is tried again.
    Probe,
    /// A step of another shape, to keep the parts of the cost apart.
    Explore,
    /// There are no requests, or no room for drafts.
    NothingToDraft,
}

/// What to do in a step, from history alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// Whether to run the draft pass.
    pub drafts: bool,
    /// Drafts to verify in all (`K`), where that is fixed before they are drawn.
    pub budget: Option<u32>,
    /// Tokens that the step will run at most, padded to a tier, where the budget is fixed: the graph
    /// to prepare.
    pub num_executed_tokens: Option<u32>,
    /// Why.
    pub reason: DecisionReason,
    /// What drafting should bring at best, by what drafts were worth lately.
    pub expected: Option<Prediction>,
}

/// What a step was planned to be and what it was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// The step.
    pub step_id: StepId,
    /// The decision.
    pub decision: Decision,
    /// Requested and landed trim, padding, prediction; empty if the step did not draft.
    pub plan: PlanReport,
    /// Predicted time of the step as run, drift included; None without a table.
    pub predicted_us: Option<f64>,
    /// Measured time, if given.
    pub measured_us: Option<f64>,
    /// Drafts accepted.
    pub num_accepted: u32,
    /// Tokens the step yielded: accepted drafts and one per request.
    pub num_tokens: u32,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ControllerStats {
    /// Steps observed.
    pub num_steps: u64,
    /// Steps that drafted.
    pub num_drafting_steps: u64,
    /// Times that drafting was given up.
    pub num_fallbacks: u64,
    /// Times that it was taken up again.
    pub num_returns: u64,
    /// Probes while given up.
    pub num_probes: u64,
    /// Drafts verified.
    pub num_verified: u64,
    /// Drafts accepted.
    pub num_accepted: u64,
    /// Drafts left out.
    pub requested_trim: u64,
    /// Tokens that did not run because of it.
    pub landed_trim: u64,
    /// Tokens that ran and computed nothing.
    pub num_padding_tokens: u64,
}

/// Decides, plans and learns, one step after the other.
///
/// No clock and no random numbers: equal calls give equal decisions. Float sums may differ between
/// machines in the last bit, so one rank decides and the others are told.
#[derive(Debug, Clone)]
pub struct SpeculationController {
    settings: ControllerSettings,
    cost: Option<StepCost>,
    /// The convex table that Algorithm 1 stops on.
    envelope: Option<StepCost>,
    tracker: CostTracker,
    planner: VerifyPlanner,
    history: SurvivalHistory,
    density: SurvivalDensity,
    ratio: AcceptanceRatio,
    gate: DraftGate,
    step: Option<Step>,
    last_step: Option<StepId>,
    is_fresh_start: bool,
    rows: Vec<SlotRow>,
    /// `[R]` most drafts of each row of the step in progress.
    limits: Vec<u32>,
    survival: Vec<f32>,
    past: Vec<f32>,
    stats: ControllerStats,
}

/// The step in progress.
#[derive(Debug, Clone, Copy)]
struct Step {
    step_id: StepId,
    load: StepLoad,
    decision: Decision,
    is_planned: bool,
}

impl SpeculationController {
    /// A controller; without a cost table it verifies everything that is drafted.
    ///
    /// # Errors
    /// [`PlanError`] for settings that cannot be.
    pub fn new(settings: ControllerSettings, cost: Option<StepCost>) -> Result<Self, PlanError> {
        settings.check()?;
        let (num_slots, num_drafts) = (settings.max_num_requests, settings.num_drafts);
        let num_cells = num_slots.saturating_mul(num_drafts);
        Ok(Self {
            planner: VerifyPlanner::new(num_slots, num_drafts)?,
            history: SurvivalHistory::new(num_slots, num_drafts, settings.lag)?,
            gate: DraftGate::new(settings.gate)?,
            density: SurvivalDensity::new(num_drafts),
            ratio: AcceptanceRatio::default(),
            tracker: CostTracker::default(),
            settings,
            envelope: cost.as_ref().map(StepCost::envelope),
            cost,
            step: None,
            last_step: None,
            is_fresh_start: true,
            rows: Vec::with_capacity(num_slots),
            limits: Vec::with_capacity(num_slots),
            survival: Vec::with_capacity(num_cells),
            past: Vec::with_capacity(num_cells),
            stats: ControllerStats::default(),
        })
    }

    /// Decides whether a step drafts, and how many drafts it will verify.
    ///
    /// Call before the drafts are drawn. Everything here is history: survivals at least `lag` steps
    /// old, what drafts were worth lately, measured times. So no draft decides about itself. A step
    /// that was decided and not observed is forgotten.
    ///
    /// `limits` `[R]` are the most drafts that each row may verify; `max_num_drafts` bounds the step.
    ///
    /// # Errors
    /// [`PlanError::StepOrder`], [`PlanError::TooMany`], [`PlanError::UnknownSlot`] or
    /// [`PlanError::WrongLength`].
    pub fn decide(
        &mut self,
        step_id: StepId,
        rows: &[SlotRow],
        load: StepLoad,
        limits: Option<&[u32]>,
        max_num_drafts: Option<u32>,
    ) -> Result<Decision, PlanError> {
        check_length("rows", rows.len(), load.num_requests as usize)?;
        if let Some(last) = self.last_step.filter(|&last| step_id <= last) {
            return Err(PlanError::StepOrder { found: step_id, last });
        }
        let num_drafts = self.settings.num_drafts;
        check_count("rows", rows.len(), self.settings.max_num_requests)?;
        if let Some(limits) = limits {
            check_length("limits", limits.len(), rows.len())?;
        }
        self.past.resize(rows.len() * num_drafts, 1.0);
        self.history.read(step_id, rows, &mut self.past)?;
        let all = saturating_u32(num_drafts);
        self.limits.clear();
        self.limits.resize(rows.len(), all);
        for (limit, &given) in self.limits.iter_mut().zip(limits.unwrap_or_default()) {
            *limit = given.min(all);
        }
        let num_available = self.limits.iter().sum();
        let limit = max_num_drafts.unwrap_or(u32::MAX).min(num_available);
        let decision = self.decision(&load, limit)?;
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.last_step = Some(step_id);
        self.step = Some(Step { step_id, load, decision, is_planned: false });
        Ok(decision)
    }

    /// Chooses the verify lengths of the step in progress from its drafts' confidences `[R, γ]`.
    ///
    /// Confidences `c_j` must be functions of the drafts before `j`; see [`crate::estimator`]. Why no
    /// draft decides about itself: see [`VerifyPlanner::top`] and [`VerifyPlanner::greedy`].
    ///
    /// # Errors
    /// [`PlanError::CallOrder`] without a decision to draft; [`PlanError::WrongLength`].
    pub fn plan(&mut self, confidences: &[f32]) -> Result<&VerifyPlan, PlanError> {
        let found = self.step.map(|step| step.step_id);
        let refused = PlanError::CallOrder { call: "plan", found, expected: "a decision to draft" };
        let step =
            self.step.filter(|step| step.decision.drafts && !step.is_planned).ok_or(refused)?;
        let num_drafts = self.settings.num_drafts;
        check_length("confidences", confidences.len(), self.rows.len() * num_drafts)?;
        self.survival.clear();
        for row in confidences.chunks_exact(num_drafts) {
            self.survival.extend(survival(row));
        }
        let limits = Some(self.limits.as_slice());
        let batch = DraftBatch { survival: &self.survival, limits, load: step.load };
        self.history.record(step.step_id, &self.rows, &self.survival)?;
        self.density.observe(&self.survival, self.rows.len(), self.is_fresh_start);
        self.is_fresh_start = false;
        self.step = Some(Step { is_planned: true, ..step });
        let cost = plan_cost(self.cost.as_ref(), self.tracker.scale(), &self.ratio);
        let envelope = self.envelope.as_ref();
        let envelope = plan_cost(envelope, self.tracker.scale(), &self.ratio);
        match (self.settings.planner, step.decision.budget, &cost) {
            (PlannerKind::Greedy, budget, Some(cost)) => match &envelope {
                Some(envelope) if self.settings.fill_tier => {
                    self.planner.greedy_on_tiers(&batch, cost, envelope, budget)
                }
                _ => self.planner.greedy(&batch, cost, budget),
            },
            (PlannerKind::Fixed(len), ..) => self.planner.fixed(&batch, len, cost.as_ref()),
            (PlannerKind::Lagged, Some(budget), cost) => {
                self.planner.top(&batch, budget, cost.as_ref())
            }
            _ => self.planner.fixed(&batch, u32::MAX, cost.as_ref()),
        }
    }

    /// Ends the step in progress with the accepted drafts of each row `[R]` and its time, and learns.
    ///
    /// Give no accepted drafts (an empty slice) if the step did not draft. A time that is unknown or
    /// not typical, such as the first of a new shape, is better left out.
    ///
    /// # Errors
    /// [`PlanError::CallOrder`], [`PlanError::WrongLength`] or [`PlanError::AcceptedPastWindow`].
    pub fn observe(
        &mut self,
        num_accepted: &[u32],
        measured_us: Option<f64>,
    ) -> Result<StepReport, PlanError> {
        let found = self.step.map(|step| step.step_id);
        let ready = self.step.filter(|step| step.is_planned || !step.decision.drafts);
        let expected = if found.is_some() { "plan" } else { "decide" };
        let step = ready.ok_or(PlanError::CallOrder { call: "observe", found, expected })?;
        let drafting = if step.decision.drafts { Drafting::Paid } else { Drafting::Skipped };
        let plan = match drafting {
            Drafting::Paid => self.learn_acceptance(num_accepted)?,
            Drafting::Skipped => {
                check_length("num_accepted", num_accepted.len(), 0)?;
                PlanReport { num_requests: step.load.num_requests, ..PlanReport::default() }
            }
        };
        let accepted = num_accepted.iter().sum();
        let scale = self.tracker.scale();
        let predicted_us = self.cost.as_ref().map(|cost| {
            let predicted = cost.times(&step.load, scale, drafting).at(plan.num_admitted);
            if let Some(measured) = measured_us {
                self.tracker.observe(cost, &step.load, plan.num_admitted, drafting, measured);
            }
            predicted
        });
        self.step = None;
        self.count(&step.decision, &plan, accepted);
        Ok(StepReport {
            step_id: step.step_id,
            decision: step.decision,
            plan,
            predicted_us,
            measured_us,
            num_accepted: accepted,
            num_tokens: step.load.num_requests.saturating_add(accepted),
        })
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> ControllerStats {
        self.stats
    }

    /// Whether drafting pays at present.
    #[must_use]
    pub fn is_drafting(&self) -> bool {
        self.gate.is_open()
    }

    /// Drift of the cost table's parts.
    #[must_use]
    pub fn cost_scale(&self) -> CostScale {
        self.tracker.scale()
    }

    /// Accepted drafts over predicted ones, lately.
    #[must_use]
    pub fn acceptance_ratio(&self) -> f64 {
        self.ratio.value()
    }

    /// Replaces the cost table, for example after graphs were captured anew; drift starts over.
    pub fn set_cost(&mut self, cost: Option<StepCost>) {
        self.envelope = cost.as_ref().map(StepCost::envelope);
        self.cost = cost;
        self.tracker = CostTracker::default();
    }

    fn decision(&mut self, load: &StepLoad, limit: u32) -> Result<Decision, PlanError> {
        let says = |drafts, budget, reason| Decision {
            drafts,
            budget,
            num_executed_tokens: None,
            reason,
            expected: None,
        };
        if self.settings.planner == PlannerKind::NoDrafts {
            return Ok(says(false, None, DecisionReason::Static));
        }
        if limit == 0 {
            return Ok(says(false, None, DecisionReason::NothingToDraft));
        }
        if matches!(self.settings.planner, PlannerKind::VerifyAll | PlannerKind::Fixed(_)) {
            return Ok(says(true, None, DecisionReason::Static));
        }
        let (table, scale) = (self.cost.as_ref(), self.tracker.scale());
        let Some(cost) = plan_cost(table, scale, &self.ratio) else {
            return Ok(says(true, None, DecisionReason::NoCostTable));
        };
        let (pooled, expected) = self.density.best(load, &cost, limit);
        let was_open = self.gate.is_open();
        let gate = self.gate.decide(expected.gain);
        self.stats.num_fallbacks += u64::from(was_open && !self.gate.is_open());
        self.stats.num_returns += u64::from(!was_open && self.gate.is_open());
        let (drafts, reason) = match gate {
            GateState::Open => (true, DecisionReason::Gain),
            GateState::Probe => (true, DecisionReason::Probe),
            GateState::Closed => (false, DecisionReason::NoGain),
            GateState::ExploreSkip => (false, DecisionReason::Explore),
            GateState::ExploreHalf => (true, DecisionReason::Explore),
        };
        let mut decision = Decision { expected: Some(expected), ..says(drafts, None, reason) };
        if !drafts {
            return Ok(decision);
        }
        self.is_fresh_start |= gate == GateState::Probe;
        let budget = match self.settings.planner {
            // Algorithm 1 finds its own number; a probe of it learns from confidences alone.
            PlannerKind::Greedy => limit,
            _ => {
                let limits = Some(self.limits.as_slice());
                let past = DraftBatch { survival: &self.past, limits, load: *load };
                let inputs = BudgetInputs { past, cost: &cost, limit, pooled, gate };
                budget(&mut self.planner, &self.settings, &inputs)?
            }
        };
        decision.budget = Some(budget);
        let times = cost.cost.times(load, cost.scale, Drafting::Paid);
        decision.num_executed_tokens = Some(times.num_executed_tokens(budget));
        Ok(decision)
    }

    fn learn_acceptance(&mut self, num_accepted: &[u32]) -> Result<PlanReport, PlanError> {
        let plan = self.planner.plan();
        check_length("num_accepted", num_accepted.len(), plan.verify_lens.len())?;
        let pairs = num_accepted.iter().zip(&plan.verify_lens).enumerate();
        for (row, (&found, &limit)) in pairs {
            if found > limit {
                return Err(PlanError::AcceptedPastWindow { row, found, limit });
            }
        }
        let rows = self.survival.chunks_exact(self.settings.num_drafts).zip(&plan.verify_lens);
        let sums = rows.map(|(row, &len)| {
            row.iter().take(len as usize).map(|&survival| f64::from(survival)).sum::<f64>()
        });
        let accepted: u32 = num_accepted.iter().sum();
        self.ratio.observe(sums.sum(), f64::from(accepted));
        Ok(plan.report)
    }

    fn count(&mut self, decision: &Decision, plan: &PlanReport, num_accepted: u32) {
        let stats = &mut self.stats;
        stats.num_steps += 1;
        stats.num_drafting_steps += u64::from(decision.drafts);
        stats.num_probes += u64::from(decision.reason == DecisionReason::Probe);
        stats.num_verified += u64::from(plan.num_admitted);
        stats.num_accepted += u64::from(num_accepted);
        stats.requested_trim += u64::from(plan.requested_trim);
        stats.landed_trim += u64::from(plan.landed_trim);
        stats.num_padding_tokens += u64::from(plan.num_padding_tokens);
    }
}

fn plan_cost<'a>(
    cost: Option<&'a StepCost>,
    scale: CostScale,
    ratio: &AcceptanceRatio,
) -> Option<PlanCost<'a>> {
    cost.map(|cost| PlanCost { cost, scale, acceptance_ratio: ratio.value() })
}

/// What a budget is made of.
struct BudgetInputs<'a> {
    past: DraftBatch<'a>,
    cost: &'a PlanCost<'a>,
    /// Most drafts of the step.
    limit: u32,
    /// The best number by what drafts were worth lately.
    pooled: u32,
    gate: GateState,
}

fn budget(
    planner: &mut VerifyPlanner,
    settings: &ControllerSettings,
    inputs: &BudgetInputs<'_>,
) -> Result<u32, PlanError> {
    let BudgetInputs { past, cost, limit, pooled, gate } = inputs;
    let rule = BudgetRule {
        max_num_drafts: Some(*limit),
        min_predicted_gain: f64::NEG_INFINITY,
        fill_tier: settings.fill_tier,
    };
    let num_requests = past.load.num_requests;
    let snapshot = if num_requests >= settings.min_snapshot_requests {
        planner.budget(past, cost, &rule)?.num_drafts
    } else {
        0
    };
    let times = cost.cost.times(&past.load, cost.scale, Drafting::Paid);
    let room = times.num_executed_tokens(*pooled).saturating_sub(past.load.num_base_tokens());
    let filled = if settings.fill_tier { room.min(*limit).max(*pooled) } else { *pooled };
    let num_drafts = if snapshot > 0 { snapshot } else { filled };
    Ok(match gate {
        GateState::Probe => num_drafts.max(num_requests.min(*limit)),
        GateState::ExploreHalf => num_drafts.div_ceil(2),
        _ => num_drafts,
    })
}

fn check_count(name: &'static str, asked: usize, limit: usize) -> Result<(), PlanError> {
    if asked <= limit { Ok(()) } else { Err(PlanError::TooMany { name, asked, limit }) }
}
