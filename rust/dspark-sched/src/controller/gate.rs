//! Fallback to no drafts, and the way back.
//!
//! The gate sees predicted gains, which are history. Closed, it lets a probe through now and then, at
//! doubling intervals, since without drafts nothing is learnt about them. Open, it asks now and then
//! for a step of another shape, so that the parts of the cost stay known apart.

use crate::verify_plan::PlanError;

/// When to fall back and when to look again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateSettings {
    /// Least predicted gain to start drafting. It goes on while the gain is above 0.
    pub min_predicted_gain: f64,
    /// Steps without drafts before the first probe.
    pub probe_interval: u32,
    /// Longest interval, after probes that found no gain.
    pub max_probe_interval: u32,
    /// Drafting steps between two steps of another shape; 0 for never.
    pub explore_interval: u32,
}

impl Default for GateSettings {
    fn default() -> Self {
        Self {
            min_predicted_gain: 0.01,
            probe_interval: 64,
            max_probe_interval: 512,
            explore_interval: 128,
        }
    }
}

impl GateSettings {
    pub(super) fn check(&self) -> Result<(), PlanError> {
        let found = self.min_predicted_gain;
        if !(found.is_finite() && found >= 0.0) {
            let expected = "a finite number of at least 0";
            return Err(PlanError::OutOfRange { name: "min_predicted_gain", found, expected });
        }
        if self.probe_interval == 0 {
            return Err(PlanError::Zero { name: "probe_interval" });
        }
        if self.max_probe_interval < self.probe_interval {
            let (name, found) = ("max_probe_interval", f64::from(self.max_probe_interval));
            return Err(PlanError::OutOfRange { name, found, expected: "at least probe_interval" });
        }
        Ok(())
    }
}

/// What the gate says about a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateState {
    /// Draft.
    Open,
    /// Draft, although nothing is gained, to learn.
    Probe,
    /// Do not draft.
    Closed,
    /// Do not draft, although it pays, to learn what a step costs without.
    ExploreSkip,
    /// Draft, with half the budget, to learn what tokens cost.
    ExploreHalf,
}

/// Decides step by step.
#[derive(Debug, Clone)]
pub struct DraftGate {
    settings: GateSettings,
    is_open: bool,
    num_steps: u32,
    interval: u32,
    explores_half: bool,
}

impl DraftGate {
    /// An open gate: drafts are tried first.
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`] or [`PlanError::Zero`].
    pub fn new(settings: GateSettings) -> Result<Self, PlanError> {
        settings.check()?;
        let interval = settings.probe_interval;
        Ok(Self { settings, is_open: true, num_steps: 0, interval, explores_half: false })
    }

    /// Whether drafting pays at present.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Decides a step from the gain that history predicts for it.
    pub fn decide(&mut self, predicted_gain: f64) -> GateState {
        let least = if self.is_open { 0.0 } else { self.settings.min_predicted_gain };
        let pays = predicted_gain > 0.0 && predicted_gain >= least;
        if pays != self.is_open {
            self.is_open = pays;
            self.num_steps = 0;
            self.interval = self.settings.probe_interval;
        }
        self.num_steps += 1;
        if pays { self.open_step() } else { self.closed_step() }
    }

    fn open_step(&mut self) -> GateState {
        if self.settings.explore_interval == 0 || self.num_steps < self.settings.explore_interval {
            return GateState::Open;
        }
        self.num_steps = 0;
        self.explores_half = !self.explores_half;
        if self.explores_half { GateState::ExploreSkip } else { GateState::ExploreHalf }
    }

    fn closed_step(&mut self) -> GateState {
        if self.num_steps < self.interval {
            return GateState::Closed;
        }
        self.num_steps = 0;
        self.interval = self.interval.saturating_mul(2).min(self.settings.max_probe_interval);
        GateState::Probe
    }
}
