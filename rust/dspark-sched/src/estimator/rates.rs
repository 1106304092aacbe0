//! Confidences from history alone: rates of acceptance per position, and how each request lately did
//! compared with them.
//!
//! They work for any drafter, and nothing waits for the draft pass. A position is a trial only if its
//! prefix was accepted and it lies within the verified window.

use super::model::{EstimatorError, MAX_NUM_DRAFTS, MAX_NUM_REQUESTS, check_length, check_windows};
use crate::ids::Generation;
use crate::survival_history::SlotRow;

/// Of all requests together: weight of the past per step, and what is believed before any.
const RATE_DECAY: f64 = 0.99;
const PRIOR_TRIALS: f64 = 16.0;
const PRIOR_RATE: f64 = 0.8;
/// Of one request: its drafts change faster than all requests' together.
const REQUEST_DECAY: f64 = 0.9;
const REQUEST_PRIOR: f64 = 4.0;

/// Rates per position and request.
#[derive(Debug, Clone)]
pub struct AcceptanceRates {
    /// Per position: trials, and those accepted.
    positions: Vec<[f64; 2]>,
    occupants: Vec<Occupant>,
    /// Chance of each position once those before it are accepted.
    rates: Vec<f64>,
    /// Per position: trials and accepted drafts of a step.
    fresh: Vec<[u32; 2]>,
}

/// What the occupant of a slot accepted, and what the rates promised of it.
#[derive(Debug, Clone, Copy, Default)]
struct Occupant {
    generation: Option<Generation>,
    accepted: f64,
    promised: f64,
}

impl AcceptanceRates {
    /// Rates of blocks of `num_drafts` (γ) drafts of requests in `num_slots` slots: likely, before any
    /// data.
    ///
    /// # Errors
    /// [`EstimatorError::OutOfRange`].
    pub fn new(num_slots: usize, num_drafts: usize) -> Result<Self, EstimatorError> {
        let limits = [
            ("num_slots", num_slots, MAX_NUM_REQUESTS),
            ("num_drafts", num_drafts, MAX_NUM_DRAFTS),
        ];
        for (name, found, limit) in limits {
            if found == 0 || found > limit {
                let (found, expected) = (found as f64, "from 1 to 2^20 slots, to 2^12 drafts");
                return Err(EstimatorError::OutOfRange { name, found, expected });
            }
        }
        Ok(Self {
            positions: vec![[PRIOR_TRIALS, PRIOR_TRIALS * PRIOR_RATE]; num_drafts],
            occupants: vec![Occupant::default(); num_slots],
            rates: vec![PRIOR_RATE; num_drafts],
            fresh: vec![[0; 2]; num_drafts],
        })
    }

    /// Chance of each position `[γ]` once those before it are accepted.
    #[must_use]
    pub fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// Checks rows, before anything is made for them.
    ///
    /// # Errors
    /// [`EstimatorError::UnknownSlot`].
    pub fn check(&self, rows: &[SlotRow]) -> Result<(), EstimatorError> {
        let num_slots = self.occupants.len();
        match rows.iter().find(|row| row.slot_id.0 as usize >= num_slots) {
            Some(row) => Err(EstimatorError::UnknownSlot { slot_id: row.slot_id, num_slots }),
            None => Ok(()),
        }
    }

    /// Writes the confidence of each draft of `rows` into `confidences` `[R, γ]`: the rates, scaled
    /// for each request.
    ///
    /// # Errors
    /// [`EstimatorError::UnknownSlot`] or [`EstimatorError::WrongLength`].
    pub fn confidences(
        &self,
        rows: &[SlotRow],
        confidences: &mut [f32],
    ) -> Result<(), EstimatorError> {
        self.check(rows)?;
        check_length("confidences", confidences.len(), rows.len() * self.rates.len())?;
        for (row, out) in rows.iter().zip(confidences.chunks_exact_mut(self.rates.len())) {
            let occupant = &self.occupants[row.slot_id.0 as usize];
            let scale = if occupant.generation == Some(row.generation) {
                (occupant.accepted + REQUEST_PRIOR) / (occupant.promised + REQUEST_PRIOR)
            } else {
                1.0
            };
            for (out, rate) in out.iter_mut().zip(&self.rates) {
                *out = narrowed((scale * rate).min(1.0));
            }
        }
        Ok(())
    }

    /// Counts each draft that was verified and whose predecessors were accepted: `[R]` verified and
    /// accepted.
    ///
    /// # Errors
    /// [`EstimatorError::UnknownSlot`], [`EstimatorError::WrongLength`] or
    /// [`EstimatorError::AcceptedPastWindow`]. Nothing is counted then.
    pub fn observe(
        &mut self,
        rows: &[SlotRow],
        num_verified: &[u32],
        num_accepted: &[u32],
    ) -> Result<(), EstimatorError> {
        self.check(rows)?;
        check_length("num_verified", num_verified.len(), rows.len())?;
        check_length("num_accepted", num_accepted.len(), rows.len())?;
        check_windows(num_verified, num_accepted, self.rates.len())?;
        self.fresh.fill([0; 2]);
        for (row, (&verified, &accepted)) in rows.iter().zip(num_verified.iter().zip(num_accepted))
        {
            let num_tried = verified.min(accepted + 1);
            let promised: f64 = self.rates.iter().take(num_tried as usize).sum();
            let occupant = &mut self.occupants[row.slot_id.0 as usize];
            let kept = match occupant.generation {
                Some(generation) if generation != row.generation => 0.0,
                _ if verified > 0 => REQUEST_DECAY,
                _ => 1.0,
            };
            *occupant = Occupant {
                generation: Some(row.generation),
                accepted: kept * occupant.accepted + f64::from(accepted),
                promised: kept * occupant.promised + promised,
            };
            // Windows by their length first; the sums over longer ones follow.
            for (index, count) in [num_tried, accepted].into_iter().enumerate() {
                if let Some(last) = count.checked_sub(1) {
                    self.fresh[last as usize][index] += 1;
                }
            }
        }
        self.learn();
        Ok(())
    }

    /// Blends in the step's counts, if anything was tried.
    fn learn(&mut self) {
        if self.fresh.iter().all(|&[tried, _]| tried == 0) {
            return;
        }
        let mut reaching = [0; 2];
        let prior = (1.0 - RATE_DECAY) * PRIOR_TRIALS;
        let positions = self.positions.iter_mut().zip(&self.fresh).zip(&mut self.rates);
        for ((position, fresh), rate) in positions.rev() {
            reaching = [reaching[0] + fresh[0], reaching[1] + fresh[1]];
            let [tried, accepted] = reaching.map(f64::from);
            position[0] = RATE_DECAY * position[0] + tried + prior;
            position[1] = RATE_DECAY * position[1] + accepted + prior * PRIOR_RATE;
            *rate = position[1] / position[0];
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a probability")]
fn narrowed(value: f64) -> f32 {
    value as f32
}
