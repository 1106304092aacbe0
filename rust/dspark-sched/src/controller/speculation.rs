//! The controller: history, planner, gate, cost drift and acceptance in one loop.

use super::acceptance::{AcceptanceRatio, SurvivalDensity};
use super::gate::{DraftGate, GateState, ProbeOutlook};
use super::in_flight::{Step, StepsInFlight};
use super::probe::{Probe, keep_windows, probe_of};
use super::report::{ControllerStats, Decision, DecisionReason, StepReport};
use super::settings::{ControllerSettings, PlannerKind};
use crate::confidence::survival;
use crate::ids::{StepId, saturating_u32};
use crate::step_cost::{CostScale, CostTracker, Drafting, StepCost, StepLoad};
use crate::survival_history::{SlotRow, SurvivalHistory};
use crate::verify_plan::{
    BudgetRule, DraftBatch, PlanCost, PlanError, PlanReport, VerifyPlan, VerifyPlanner,
    check_length,
};

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
    steps: StepsInFlight,
    last_step: Option<StepId>,
    is_fresh_start: bool,
    /// The request whose window the next probe verifies first.
    next_probed: usize,
    past: Vec<f32>,
    stats: ControllerStats,
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
            steps: StepsInFlight::new(settings.lag as usize, num_slots, num_drafts),
            last_step: None,
            is_fresh_start: true,
            next_probed: 0,
            past: Vec::with_capacity(num_cells),
            stats: ControllerStats::default(),
        })
    }

    /// Decides whether a step drafts, and how many drafts it will verify.
    ///
    /// Call before the drafts are drawn. Everything here is history: survivals at least `lag` steps
    /// old, what drafts were worth lately, measured times. So no draft decides about itself. Up to
    /// `lag` steps may be decided before the first of them is observed.
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
        check_count("rows", rows.len(), self.settings.max_num_requests)?;
        if let Some(limits) = limits {
            check_length("limits", limits.len(), rows.len())?;
        }
        if let Some(last) = self.last_step.filter(|&last| step_id <= last) {
            return Err(PlanError::StepOrder { found: step_id, last });
        }
        self.past.resize(rows.len() * self.settings.num_drafts, 1.0);
        self.history.read(step_id, rows, &mut self.past)?;
        let mut step = self.steps.take_spare()?;
        let all = saturating_u32(self.settings.num_drafts);
        step.limits.clear();
        step.limits.resize(rows.len(), all);
        for (limit, &given) in step.limits.iter_mut().zip(limits.unwrap_or_default()) {
            *limit = given.min(all);
        }
        let decided = self.decision(&load, &step.limits, max_num_drafts);
        if let Ok(decision) = decided {
            if let (DecisionReason::Probe, Some(budget)) = (decision.reason, decision.budget) {
                self.next_probed = keep_windows(&mut step.limits, self.next_probed, budget);
            }
            step.rows.clear();
            step.rows.extend_from_slice(rows);
            self.last_step = Some(step_id);
            let begins_row = decision.reason == DecisionReason::Probe && self.gate.began_row();
            self.steps.push(Step {
                step_id,
                load,
                decision,
                begins_row,
                is_planned: false,
                ..step
            });
        } else {
            self.steps.recycle(step);
        }
        decided
    }

    /// Chooses verify lengths from drafts' confidences `[R, γ]`, for the oldest step in flight that
    /// drafts and has none.
    ///
    /// Confidences `c_j` must be functions of the drafts before `j`; see [`crate::estimator`]. Why no
    /// draft decides about itself: see [`VerifyPlanner::top`] and [`VerifyPlanner::greedy`].
    ///
    /// # Errors
    /// [`PlanError::CallOrder`] without a decision to draft; [`PlanError::WrongLength`].
    pub fn plan(&mut self, confidences: &[f32]) -> Result<&VerifyPlan, PlanError> {
        let found = self.steps.oldest().map(|step| step.step_id);
        let refused = PlanError::CallOrder { call: "plan", found, expected: "a decision to draft" };
        let step = self.steps.oldest_unplanned().ok_or(refused)?;
        let num_drafts = self.settings.num_drafts;
        check_length("confidences", confidences.len(), step.rows.len() * num_drafts)?;
        step.survival.clear();
        for row in confidences.chunks_exact(num_drafts) {
            step.survival.extend(survival(row));
        }
        self.history.record(step.step_id, &step.rows, &step.survival)?;
        self.density.observe(&step.survival, step.rows.len(), self.is_fresh_start);
        self.is_fresh_start = false;
        let limits = Some(step.limits.as_slice());
        let batch = DraftBatch { survival: &step.survival, limits, load: step.load };
        let scale = self.tracker.scale();
        let cost = plan_cost(self.cost.as_ref(), scale, &self.ratio);
        let envelope = plan_cost(self.envelope.as_ref(), scale, &self.ratio);
        let planner = &mut self.planner;
        let plan = match (self.settings.planner, step.decision.budget, &cost, &envelope) {
            // Its limits say what it verifies.
            (.., cost, _) if step.decision.reason == DecisionReason::Probe => {
                planner.fixed(&batch, u32::MAX, cost.as_ref())
            }
            (PlannerKind::Greedy, budget, Some(cost), Some(envelope)) => {
                if self.settings.fill_tier {
                    planner.greedy_on_tiers(&batch, cost, envelope, budget)
                } else {
                    planner.greedy(&batch, cost, budget)
                }
            }
            (PlannerKind::Fixed(len), _, cost, _) => planner.fixed(&batch, len, cost.as_ref()),
            (PlannerKind::Lagged, Some(num), cost, _) => planner.top(&batch, num, cost.as_ref()),
            (.., cost, _) => planner.fixed(&batch, u32::MAX, cost.as_ref()),
        }?;
        step.verify_lens.clone_from(&plan.verify_lens);
        step.plan = plan.report;
        step.is_planned = true;
        Ok(self.planner.plan())
    }

    /// Ends the oldest step in flight with the accepted drafts of each row `[R]` and its time, and
    /// learns.
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
        let oldest = self.steps.oldest();
        let found = oldest.map(|step| step.step_id);
        let expected = if found.is_some() { "plan" } else { "decide" };
        let ready = oldest.filter(|step| step.is_planned || !step.decision.drafts);
        let step = ready.ok_or(PlanError::CallOrder { call: "observe", found, expected })?;
        let drafting = if step.decision.drafts { Drafting::Paid } else { Drafting::Skipped };
        let plan = match drafting {
            Drafting::Paid => {
                check_accepted(num_accepted, &step.verify_lens)?;
                let accepted: u32 = num_accepted.iter().sum();
                let promised = promised(step, self.settings.num_drafts);
                if step.begins_row {
                    self.ratio.weaken(promised);
                }
                self.ratio.observe(promised, f64::from(accepted));
                step.plan
            }
            Drafting::Skipped => {
                check_length("num_accepted", num_accepted.len(), 0)?;
                PlanReport { num_requests: step.load.num_requests, ..PlanReport::default() }
            }
        };
        let num_accepted = num_accepted.iter().sum();
        let scale = self.tracker.scale();
        let predicted_us = self.cost.as_ref().map(|cost| {
            let predicted = cost.times(&step.load, scale, drafting).at(plan.num_admitted);
            if let Some(measured) = measured_us {
                self.tracker.observe(cost, &step.load, plan.num_admitted, drafting, measured);
            }
            predicted
        });
        let report = StepReport {
            step_id: step.step_id,
            decision: step.decision,
            plan,
            predicted_us,
            measured_us,
            num_accepted,
            num_tokens: step.load.num_requests.saturating_add(num_accepted),
        };
        self.steps.finish_oldest();
        self.stats.count(&report);
        Ok(report)
    }

    /// Gives the newest step in flight up, for example because the engine does not run it; its
    /// number, if there was one. What was planned of it stays in the history.
    pub fn cancel_newest_step(&mut self) -> Option<StepId> {
        self.steps.cancel_newest()
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

    fn decision(
        &mut self,
        load: &StepLoad,
        limits: &[u32],
        max_num_drafts: Option<u32>,
    ) -> Result<Decision, PlanError> {
        let limit = max_num_drafts.unwrap_or(u32::MAX).min(limits.iter().sum());
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
        // While predictions are in flux the gate stays open as long as drafting would pay by what
        // was usual: closed, next to nothing would be learnt.
        let usual = PlanCost { acceptance_ratio: self.ratio.usual(), ..cost };
        let in_flux = was_open && expected.gain <= 0.0;
        let usual_gain = if in_flux { self.density.best(load, &usual, limit).1.gain } else { 0.0 };
        let gate = self.gate.decide(expected.gain.max(usual_gain), || {
            let Probe { plain_us, extra_us, num_drafts } = probe_of(load, &cost, limit);
            let worth = self.density.num_likely() * self.ratio.value();
            ProbeOutlook { plain_us, extra_us, worth, num_drafts }
        });
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
        self.is_fresh_start |= gate == GateState::Probe && self.gate.began_row();
        let budget = match self.settings.planner {
            _ if gate == GateState::Probe => probe_of(load, &cost, limit).num_drafts,
            // Algorithm 1 finds its own number. On tiers it may overshoot into one that history does
            // not pay for: that bounds it.
            PlannerKind::Greedy if self.settings.fill_tier => filled(load, &cost, pooled, limit),
            PlannerKind::Greedy => limit,
            _ => {
                let limits = Some(limits);
                let past = DraftBatch { survival: &self.past, limits, load: *load };
                let learns = usual_gain > 0.0;
                let inputs = BudgetInputs { past, cost: &cost, limit, pooled, learns, gate };
                budget(&mut self.planner, &self.settings, &inputs)?
            }
        };
        decision.budget = Some(budget);
        let times = cost.cost.times(load, cost.scale, Drafting::Paid);
        decision.num_executed_tokens = Some(times.num_executed_tokens(budget));
        Ok(decision)
    }
}

/// Accepted drafts that the verified ones of a step promised.
fn promised(step: &Step, num_drafts: usize) -> f64 {
    let rows = step.survival.chunks_exact(num_drafts).zip(&step.verify_lens);
    rows.map(|(row, &len)| row.iter().take(len as usize).map(|&a| f64::from(a)).sum::<f64>()).sum()
}

fn check_accepted(num_accepted: &[u32], verify_lens: &[u32]) -> Result<(), PlanError> {
    check_length("num_accepted", num_accepted.len(), verify_lens.len())?;
    let mut pairs = num_accepted.iter().zip(verify_lens).enumerate();
    match pairs.find(|(_, (found, limit))| found > limit) {
        None => Ok(()),
        Some((row, (&found, &limit))) => Err(PlanError::AcceptedPastWindow { row, found, limit }),
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
    /// Whether at least a draft of each request shall be verified, so that something is learnt.
    learns: bool,
    gate: GateState,
}

fn budget(
    planner: &mut VerifyPlanner,
    settings: &ControllerSettings,
    inputs: &BudgetInputs<'_>,
) -> Result<u32, PlanError> {
    let BudgetInputs { past, cost, limit, pooled, learns, gate } = inputs;
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
    let num_drafts = match snapshot {
        0 if settings.fill_tier => filled(&past.load, cost, *pooled, *limit),
        0 => *pooled,
        snapshot => snapshot,
    };
    let num_drafts = match gate {
        GateState::ExploreHalf => num_drafts.div_ceil(2),
        _ => num_drafts,
    };
    Ok(if *learns { num_drafts.max(num_requests.min(*limit)) } else { num_drafts })
}

/// A number of drafts, raised to what its tier computes anyway.
fn filled(load: &StepLoad, cost: &PlanCost<'_>, num_drafts: u32, limit: u32) -> u32 {
    let times = cost.cost.times(load, cost.scale, Drafting::Paid);
    let room = times.num_executed_tokens(num_drafts).saturating_sub(load.num_base_tokens());
    room.min(limit).max(num_drafts)
}

fn check_count(name: &'static str, asked: usize, limit: usize) -> Result<(), PlanError> {
    if asked <= limit { Ok(()) } else { Err(PlanError::TooMany { name, asked, limit }) }
}
