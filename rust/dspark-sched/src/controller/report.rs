//! What a controller says: decisions, step reports, counters.

use crate::ids::StepId;
use crate::verify_plan::{PlanReport, Prediction};

/// Why a step drafts or does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DecisionReason {
    /// The planner needs no decision: verify all, a fixed number, or none.
    #[default]
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
#[derive(Debug, Clone, Copy, Default, PartialEq)]
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

impl ControllerStats {
    pub(super) fn count(&mut self, report: &StepReport) {
        let plan = &report.plan;
        self.num_steps += 1;
        self.num_drafting_steps += u64::from(report.decision.drafts);
        self.num_probes += u64::from(report.decision.reason == DecisionReason::Probe);
        self.num_verified += u64::from(plan.num_admitted);
        self.num_accepted += u64::from(report.num_accepted);
        self.requested_trim += u64::from(plan.requested_trim);
        self.landed_trim += u64::from(plan.landed_trim);
        self.num_padding_tokens += u64::from(plan.num_padding_tokens);
    }
}
