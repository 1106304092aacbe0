//! What an engine may choose.

use super::gate::GateSettings;
use crate::verify_plan::PlanError;

/// How verify lengths are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PlannerKind {
    /// A budget from earlier steps, shared out by current survival: the production form.
    #[default]
    Lagged,
    /// Algorithm 1 on current survivals: for engines that plan after the draft pass.
    Greedy,
    /// Every draft of every request.
    VerifyAll,
    /// The same number of every request.
    Fixed(u32),
    /// No drafts at all.
    NoDrafts,
}

/// Settings of a [`super::SpeculationController`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ControllerSettings {
    /// Slots of the persistent batch, and most requests of a step.
    pub max_num_requests: usize,
    /// γ.
    pub num_drafts: usize,
    /// How verify lengths are chosen.
    pub planner: PlannerKind,
    /// Steps between the confidences and the budget made of them; at least 1.
    pub lag: u32,
    /// Whether a budget is raised to what its graph tier computes anyway. With it, Algorithm 1 stops
    /// on the convex table below the stairs; without it, on the table as it is.
    pub fill_tier: bool,
    /// With fewer requests a budget comes from what all requests' drafts were worth lately: the last
    /// block of a few requests says little about their next.
    pub min_snapshot_requests: u32,
    /// Fallback and return.
    pub gate: GateSettings,
}

impl ControllerSettings {
    /// Settings in use for a batch of at most `max_num_requests` requests of `num_drafts` drafts.
    #[must_use]
    pub fn new(max_num_requests: usize, num_drafts: usize) -> Self {
        Self {
            max_num_requests,
            num_drafts,
            planner: PlannerKind::Lagged,
            lag: 2,
            fill_tier: true,
            min_snapshot_requests: 16,
            gate: GateSettings::default(),
        }
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        if let PlannerKind::Fixed(asked) = self.planner
            && asked as usize > self.num_drafts
        {
            let (asked, limit) = (asked as usize, self.num_drafts);
            return Err(PlanError::TooMany { name: "fixed verify length", asked, limit });
        }
        self.gate.check()
    }
}
