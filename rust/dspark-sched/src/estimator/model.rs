//! The online estimator: a ring of recent trials and the logistic model they fit.
//!
//! A position is a trial only if its prefix was accepted and it lies within the verified window, so
//! that trimmed windows do not bias the conditional confidence.

use super::features::{FeatureBatch, FeatureSet, NUM_FEATURES};
use super::irls::{Coefficients, Trial, fit, mean_loss};
use crate::ids::SlotId;

pub(super) const MAX_NUM_DRAFTS: usize = 1 << 12;
pub(super) const MAX_NUM_REQUESTS: usize = 1 << 20;
const MAX_CAPACITY: usize = 1 << 22;

/// Sizes of an estimator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EstimatorSettings {
    /// Trials kept; older ones are forgotten.
    pub capacity: usize,
    /// Least trials before the first fit.
    pub min_num_trials: usize,
    /// Steps between two fits by [`AcceptanceModel::end_step`].
    pub refit_interval: u32,
    /// Weight of the prior, in the units of the loss.
    pub ridge: f64,
}

impl Default for EstimatorSettings {
    fn default() -> Self {
        Self { capacity: 4096, min_num_trials: 200, refit_interval: 100, ridge: 1.0 }
    }
}

/// Features, results or settings that cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EstimatorError {
    /// A feature that the model looks at, not given.
    #[error("{name} are missing: the model looks at them")]
    MissingFeature {
        /// Name of the array.
        name: &'static str,
    },
    /// An array of the wrong length.
    #[error("{name} has {found} elements: {expected} needed")]
    WrongLength {
        /// Name of the array.
        name: &'static str,
        /// Its length.
        found: usize,
        /// The length needed.
        expected: usize,
    },
    /// A setting that cannot be.
    #[error("{name} is {found}: expected {expected}")]
    OutOfRange {
        /// Name of the setting.
        name: &'static str,
        /// The value.
        found: f64,
        /// The range.
        expected: &'static str,
    },
    /// A slot that the estimator has no place for.
    #[error("slot {} is unknown: there are {num_slots}", slot_id.0)]
    UnknownSlot {
        /// The slot.
        slot_id: SlotId,
        /// Slots there are.
        num_slots: usize,
    },
    /// More accepted drafts than verified, or more verified than drawn.
    #[error("row {row} accepts {num_accepted} and verifies {num_verified} of {num_drafts} drafts")]
    AcceptedPastWindow {
        /// Row of the batch.
        row: usize,
        /// Drafts accepted.
        num_accepted: u32,
        /// Drafts verified.
        num_verified: u32,
        /// Drafts drawn.
        num_drafts: usize,
    },
}

/// What a fit did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RefitReport {
    /// Trials fitted.
    pub num_trials: usize,
    /// Newton steps taken.
    pub num_iterations: usize,
    /// Mean loss of the model before, in nats.
    pub loss_before: f64,
    /// Mean loss after.
    pub loss_after: f64,
}

/// A logistic model of acceptance that follows its drafter.
#[derive(Debug, Clone)]
pub struct AcceptanceModel {
    features: FeatureSet,
    num_drafts: usize,
    settings: EstimatorSettings,
    coefficients: Coefficients,
    trials: Vec<Trial>,
    next: usize,
    num_steps: u32,
}

impl AcceptanceModel {
    /// A model of blocks of `num_drafts` (γ) drafts.
    ///
    /// # Errors
    /// [`EstimatorError::OutOfRange`].
    pub fn new(
        features: FeatureSet,
        num_drafts: usize,
        settings: EstimatorSettings,
    ) -> Result<Self, EstimatorError> {
        let counts = [
            ("num_drafts", num_drafts as f64),
            ("capacity", settings.capacity as f64),
            ("min_num_trials", settings.min_num_trials as f64),
            ("refit_interval", f64::from(settings.refit_interval)),
        ];
        for (name, found) in counts {
            if found < 1.0 {
                return Err(EstimatorError::OutOfRange { name, found, expected: "at least 1" });
            }
        }
        let limits = [
            ("num_drafts", num_drafts, MAX_NUM_DRAFTS),
            ("capacity", settings.capacity, MAX_CAPACITY),
        ];
        for (name, found, limit) in limits {
            if found > limit {
                let (found, expected) = (found as f64, "at most 2^12 drafts and 2^22 trials");
                return Err(EstimatorError::OutOfRange { name, found, expected });
            }
        }
        if !(settings.ridge.is_finite() && settings.ridge > 0.0) {
            let expected = "a finite number above 0";
            return Err(EstimatorError::OutOfRange {
                name: "ridge",
                found: settings.ridge,
                expected,
            });
        }
        if settings.min_num_trials > settings.capacity {
            let (name, found) = ("min_num_trials", settings.min_num_trials as f64);
            return Err(EstimatorError::OutOfRange { name, found, expected: "at most capacity" });
        }
        Ok(Self {
            features,
            num_drafts,
            settings,
            coefficients: features.prior(),
            trials: Vec::with_capacity(settings.capacity),
            next: 0,
            num_steps: 0,
        })
    }

    /// Intercept, head, margin, request temperature, position.
    #[must_use]
    pub fn coefficients(&self) -> [f64; NUM_FEATURES] {
        self.coefficients
    }

    /// Trials kept.
    #[must_use]
    pub fn num_trials(&self) -> usize {
        self.trials.len()
    }

    /// Checks the shape of features, before anything is made for them.
    ///
    /// # Errors
    /// [`EstimatorError::MissingFeature`], [`EstimatorError::WrongLength`], or
    /// [`EstimatorError::OutOfRange`] for more than 2^20 requests.
    pub fn check(&self, batch: &FeatureBatch<'_>) -> Result<(), EstimatorError> {
        if batch.num_requests > MAX_NUM_REQUESTS {
            let (name, found) = ("num_requests", batch.num_requests as f64);
            return Err(EstimatorError::OutOfRange { name, found, expected: "at most 2^20" });
        }
        self.features.check(batch, self.num_drafts)
    }

    /// Writes the confidence of each draft into `confidences` `[R, γ]`.
    ///
    /// # Errors
    /// [`EstimatorError::MissingFeature`] or [`EstimatorError::WrongLength`].
    pub fn confidences(
        &self,
        batch: &FeatureBatch<'_>,
        confidences: &mut [f32],
    ) -> Result<(), EstimatorError> {
        self.check(batch)?;
        check_length("confidences", confidences.len(), batch.num_requests * self.num_drafts)?;
        self.features.logits(batch, self.num_drafts, &self.coefficients, confidences);
        for confidence in confidences {
            *confidence = 1.0 / (1.0 + (-*confidence).exp());
        }
        Ok(())
    }

    /// Remembers what came of the drafts of a batch: `[R]` verified and accepted.
    ///
    /// Give as verified only what counts: up to an accepted end of sequence.
    ///
    /// # Errors
    /// As [`AcceptanceModel::confidences`], or [`EstimatorError::AcceptedPastWindow`]. Nothing is
    /// remembered then.
    pub fn observe(
        &mut self,
        batch: &FeatureBatch<'_>,
        num_verified: &[u32],
        num_accepted: &[u32],
    ) -> Result<(), EstimatorError> {
        self.check(batch)?;
        check_length("num_verified", num_verified.len(), batch.num_requests)?;
        check_length("num_accepted", num_accepted.len(), batch.num_requests)?;
        check_windows(num_verified, num_accepted, self.num_drafts)?;
        for (row, (&verified, &accepted)) in num_verified.iter().zip(num_accepted).enumerate() {
            for position in 0..verified.min(accepted + 1) {
                let position = position as usize;
                let features = self.features.of(batch, self.num_drafts, row, position);
                self.remember((features, position < accepted as usize));
            }
        }
        Ok(())
    }

    /// Counts a step, and fits every `refit_interval` of them.
    pub fn end_step(&mut self) -> Option<RefitReport> {
        self.num_steps += 1;
        if self.num_steps < self.settings.refit_interval {
            return None;
        }
        self.num_steps = 0;
        self.refit()
    }

    /// Fits the trials kept, starting from the present model; None with too few of them.
    ///
    /// Takes a millisecond or so for the default capacity.
    pub fn refit(&mut self) -> Option<RefitReport> {
        if self.trials.len() < self.settings.min_num_trials {
            return None;
        }
        let loss_before = mean_loss(&self.trials, &self.coefficients);
        let prior = self.features.prior();
        let (fitted, num_iterations) =
            fit(&self.trials, &prior, self.settings.ridge, &self.coefficients);
        self.coefficients = fitted;
        let loss_after = mean_loss(&self.trials, &fitted);
        let num_trials = self.trials.len();
        Some(RefitReport { num_trials, num_iterations, loss_before, loss_after })
    }

    fn remember(&mut self, trial: Trial) {
        match self.trials.get_mut(self.next) {
            Some(oldest) => *oldest = trial,
            None => self.trials.push(trial),
        }
        self.next = (self.next + 1) % self.settings.capacity;
    }
}

pub(super) fn check_windows(
    num_verified: &[u32],
    num_accepted: &[u32],
    num_drafts: usize,
) -> Result<(), EstimatorError> {
    let mut rows = num_verified.iter().zip(num_accepted).enumerate();
    let is_wrong = |&(_, (&verified, &accepted)): &(usize, (&u32, &u32))| {
        accepted > verified || verified as usize > num_drafts
    };
    match rows.find(is_wrong) {
        None => Ok(()),
        Some((row, (&num_verified, &num_accepted))) => {
            Err(EstimatorError::AcceptedPastWindow { row, num_accepted, num_verified, num_drafts })
        }
    }
}

pub(super) fn check_length(
    name: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), EstimatorError> {
    let error = EstimatorError::WrongLength { name, found, expected };
    if found == expected { Ok(()) } else { Err(error) }
}
