//! Fallback to no drafts, and the way back.
//!
//! The gate sees predicted gains, which are history. Closed, it lets a probe through now and then,
//! since without drafts nothing is learnt about them: not before the time without drafts has paid for
//! it, and at intervals that double while probes find nothing new. Few requests have few drafts in a
//! step, of which one probe may say anything: then some follow each other. Open, it asks now and then for a
//! step of another shape, so that the parts of the cost stay known apart.

use super::probe::MIN_NUM_DRAFTS;
use crate::verify_plan::PlanError;

/// A rise of what drafts are worth after a probe that asks for the next one soon.
const GOOD_NEWS: f64 = 1.25;
/// Steps to the probe after one with good news, and to the next one of a row: late enough to know what that one brought.
const FOLLOW_UP_INTERVAL: u32 = 8;
/// Probes that may be paid for in advance: a row of good news uses them up.
const MAX_NUM_SAVED_PROBES: f64 = 16.0;

/// When to fall back and when to look again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateSettings {
    /// Least predicted gain to start drafting. It goes on while the gain is above 0.
    pub min_predicted_gain: f64,
    /// Steps without drafts before the first probe.
    pub probe_interval: u32,
    /// Longest interval, after probes that found no gain; longer where a probe costs more.
    pub max_probe_interval: u32,
    /// What probes may cost, of the time without drafts.
    pub max_probe_share: f64,
    /// Drafting steps between two steps of another shape; 0 for never.
    pub explore_interval: u32,
}

impl Default for GateSettings {
    fn default() -> Self {
        Self {
            min_predicted_gain: 0.01,
            probe_interval: 64,
            max_probe_interval: 512,
            max_probe_share: 0.01,
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
        let found = self.max_probe_share;
        if !(found > 0.0 && found <= 1.0) {
            let expected = "above 0 and at most 1";
            return Err(PlanError::OutOfRange { name: "max_probe_share", found, expected });
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

/// What a probe costs, and what is thought of drafts before it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProbeOutlook {
    /// Time of the step without drafts.
    pub plain_us: f64,
    /// What a probe takes beyond that.
    pub extra_us: f64,
    /// Drafts of a request that would be accepted if all were verified.
    pub worth: f64,
    /// Drafts that a probe verifies.
    pub num_drafts: u32,
}

/// Decides step by step.
#[derive(Debug, Clone)]
pub struct DraftGate {
    settings: GateSettings,
    is_open: bool,
    num_steps: u32,
    num_open_steps: u32,
    interval: u32,
    /// What probes may cost by now.
    saved_us: f64,
    /// What drafts were worth before the last probe, or the row of small ones that it belongs to.
    worth_before_probe: Option<f64>,
    /// Drafts that this row has verified so far; 0 between rows.
    num_probed: u32,
    /// Whether the last probe began a row.
    began_row: bool,
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
        Ok(Self {
            settings,
            is_open: true,
            num_steps: 0,
            num_open_steps: 0,
            interval,
            saved_us: 0.0,
            worth_before_probe: None,
            num_probed: 0,
            began_row: false,
            explores_half: false,
        })
    }

    /// Whether drafting pays at present.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the last probe began a row: those that follow it add to what it says.
    #[must_use]
    pub fn began_row(&self) -> bool {
        self.began_row
    }

    /// Decides a step from the gain that history predicts for it. `probe` is asked for while the gate
    /// is closed. In the middle of a row of probes it stays closed.
    pub fn decide(
        &mut self,
        predicted_gain: f64,
        probe: impl FnOnce() -> ProbeOutlook,
    ) -> GateState {
        let least = if self.is_open { 0.0 } else { self.settings.min_predicted_gain };
        let pays = predicted_gain > 0.0 && predicted_gain >= least && self.num_probed == 0;
        if pays != self.is_open {
            self.turn(pays);
        }
        self.num_steps += 1;
        if pays { self.open_step() } else { self.closed_step(probe()) }
    }

    fn turn(&mut self, opens: bool) {
        // What soon turns out to be a mistake is no reason to look more often.
        if self.num_open_steps >= self.settings.probe_interval {
            self.interval = self.settings.probe_interval;
        }
        self.is_open = opens;
        self.num_steps = 0;
        self.num_open_steps = 0;
        self.saved_us = 0.0;
        self.worth_before_probe = None;
        self.num_probed = 0;
    }

    fn open_step(&mut self) -> GateState {
        self.num_open_steps = self.num_open_steps.saturating_add(1);
        if self.settings.explore_interval == 0 || self.num_steps < self.settings.explore_interval {
            return GateState::Open;
        }
        self.num_steps = 0;
        self.explores_half = !self.explores_half;
        if self.explores_half { GateState::ExploreSkip } else { GateState::ExploreHalf }
    }

    fn closed_step(&mut self, probe: ProbeOutlook) -> GateState {
        let saved_us = self.saved_us + self.settings.max_probe_share * probe.plain_us;
        self.saved_us = saved_us.min(MAX_NUM_SAVED_PROBES * probe.extra_us);
        let is_good_news = |before| probe.worth >= GOOD_NEWS * before && probe.worth > 0.0;
        let follow_up = FOLLOW_UP_INTERVAL.min(self.settings.probe_interval);
        if self.num_probed == 0 && self.worth_before_probe.is_some_and(is_good_news) {
            self.interval = follow_up;
            self.worth_before_probe = None;
        }
        let begins_row = self.num_probed == 0;
        let in_row = FOLLOW_UP_INTERVAL.min(self.settings.max_probe_interval);
        let interval = if begins_row { self.interval } else { in_row };
        if self.num_steps < interval || self.saved_us < probe.extra_us {
            return GateState::Closed;
        }
        self.num_steps = 0;
        self.saved_us -= probe.extra_us;
        self.began_row = begins_row;
        if begins_row {
            self.worth_before_probe = Some(probe.worth);
        }
        self.num_probed = self.num_probed.saturating_add(probe.num_drafts);
        if self.num_probed >= MIN_NUM_DRAFTS || probe.num_drafts == 0 {
            self.num_probed = 0;
            let doubled = self.interval.max(self.settings.probe_interval / 2).saturating_mul(2);
            self.interval = doubled.min(self.settings.max_probe_interval);
        }
        GateState::Probe
    }
}
