//! Verified rounds: what the confidence head said and what came of it.

use super::error::CalibrationError;
use crate::ids::{RequestId, StepId};

/// One round of one request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round<'a> {
    /// The request.
    pub request_id: RequestId,
    /// Step that drew the drafts, as noted beside the logits.
    pub logits_step: StepId,
    /// Step whose drafts the outcome is of, as noted beside the outcome.
    pub outcome_step: StepId,
    /// `[γ]` logits of the confidence head before any temperature.
    pub logits: &'a [f32],
    /// Drafts verified.
    pub num_verified: usize,
    /// Drafts accepted: the first ones.
    pub num_accepted: usize,
    /// Index, from 0, of an accepted end of sequence; drafts after it do not count.
    pub end: Option<usize>,
}

impl Round<'_> {
    /// Drafts that say something about the head: up to an accepted end of sequence.
    #[must_use]
    pub fn num_counted(&self) -> usize {
        self.end.map_or(self.num_verified, |end| end + 1)
    }

    pub(super) fn check(&self, num_drafts: usize) -> Result<(), CalibrationError> {
        if self.logits.len() != num_drafts {
            let (found, expected) = (self.logits.len(), num_drafts);
            return Err(CalibrationError::WrongLength { found, expected });
        }
        if self.logits_step != self.outcome_step {
            return Err(CalibrationError::PairingMismatch {
                request_id: self.request_id,
                logits_step: self.logits_step,
                outcome_step: self.outcome_step,
            });
        }
        let verified = self.num_verified.min(num_drafts);
        if self.num_accepted > verified || self.num_verified > num_drafts {
            let found = self.num_accepted.max(self.num_verified);
            return Err(CalibrationError::AcceptedPastWindow { found, limit: verified });
        }
        match self.end {
            Some(found) if found >= self.num_accepted => {
                Err(CalibrationError::EndNotAccepted { found, limit: self.num_accepted })
            }
            _ => Ok(()),
        }
    }
}

/// Rounds with whole blocks verified, for the offline fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Rounds {
    num_drafts: usize,
    logits: Vec<f32>,
    kept: Vec<Kept>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Kept {
    pub(super) request_id: RequestId,
    pub(super) step_id: StepId,
    pub(super) num_counted: usize,
    pub(super) num_accepted: usize,
}

impl Rounds {
    /// No rounds yet, of `num_drafts` (γ) drafts each.
    ///
    /// # Errors
    /// [`CalibrationError::Zero`].
    pub fn new(num_drafts: usize) -> Result<Self, CalibrationError> {
        if num_drafts == 0 {
            return Err(CalibrationError::Zero { name: "num_drafts" });
        }
        Ok(Self { num_drafts, logits: Vec::new(), kept: Vec::new() })
    }

    /// Adds a round.
    ///
    /// # Errors
    /// [`CalibrationError::Censored`] for a trimmed window, [`CalibrationError::PairingMismatch`],
    /// [`CalibrationError::WrongLength`], [`CalibrationError::AcceptedPastWindow`] or
    /// [`CalibrationError::EndNotAccepted`].
    pub fn push(&mut self, round: &Round<'_>) -> Result<(), CalibrationError> {
        round.check(self.num_drafts)?;
        if round.num_verified < self.num_drafts {
            let (found, needed) = (round.num_verified, self.num_drafts);
            return Err(CalibrationError::Censored { found, needed });
        }
        self.logits.extend_from_slice(round.logits);
        self.kept.push(Kept {
            request_id: round.request_id,
            step_id: round.outcome_step,
            num_counted: round.num_counted(),
            num_accepted: round.num_accepted,
        });
        Ok(())
    }

    /// Number of rounds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// γ.
    #[must_use]
    pub fn num_drafts(&self) -> usize {
        self.num_drafts
    }

    /// The rounds with their logits.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[f32], Kept)> {
        self.logits.chunks_exact(self.num_drafts).zip(self.kept.iter().copied())
    }
}
