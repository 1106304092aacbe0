//! Whether logits and outcomes belong together.
//!
//! Under asynchronous execution it is easy to pair a round's logits with the outcome of the round
//! before or after. Tags catch that where they are carried ([`super::Round`]); this check catches it
//! where the tags themselves are wrong: a head predicts its own round better than its neighbours.

use std::collections::BTreeMap;

use super::error::CalibrationError;
use super::rounds::Rounds;
use crate::confidence::sanitized_logit;
use crate::ids::RequestId;

/// Fewer pairs than this, or of one outcome alone, say nothing.
pub const MIN_NUM_PAIRING_ROUNDS: usize = 200;

/// How much better a neighbour must fit before it is believed.
const MARGIN: f64 = 0.02;

/// How well first-draft logits rank the first draft's outcome some rounds away.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairingReport {
    /// AUC against the round before, the same round, and the round after; None with too few pairs.
    pub auc: [Option<f64>; 3],
}

/// Compares each round's first logit with the outcomes of its request's neighbouring rounds.
///
/// # Errors
/// [`CalibrationError::PairingSuspect`] if a neighbour fits better than the round itself.
pub fn check_pairing(rounds: &Rounds) -> Result<PairingReport, CalibrationError> {
    let mut requests: BTreeMap<RequestId, Vec<_>> = BTreeMap::new();
    for (logits, kept) in rounds.iter() {
        let round = (kept.step_id, sanitized_logit(logits[0]), kept.num_accepted > 0);
        requests.entry(kept.request_id).or_default().push(round);
    }
    requests.values_mut().for_each(|rounds| rounds.sort_by_key(|round| round.0));
    let auc = [-1, 0, 1].map(|offset| {
        let mut pairs = Vec::with_capacity(rounds.len());
        for rounds in requests.values() {
            for (index, round) in rounds.iter().enumerate() {
                let other = index.checked_add_signed(offset).and_then(|other| rounds.get(other));
                pairs.extend(other.map(|other| (round.1, other.2)));
            }
        }
        area_under_curve(pairs)
    });
    if let Some(own) = auc[1] {
        for (offset, neighbour) in [(-1, auc[0]), (1, auc[2])] {
            if let Some(neighbour) = neighbour.filter(|&neighbour| neighbour > own + MARGIN) {
                return Err(CalibrationError::PairingSuspect { offset, neighbour, own });
            }
        }
    }
    Ok(PairingReport { auc })
}

/// Share of (accepted, rejected) pairs that the scores order rightly; ties count half.
fn area_under_curve(mut pairs: Vec<(f32, bool)>) -> Option<f64> {
    let num_accepted = pairs.iter().filter(|pair| pair.1).count();
    let num_rejected = pairs.len() - num_accepted;
    if pairs.len() < MIN_NUM_PAIRING_ROUNDS || num_accepted == 0 || num_rejected == 0 {
        return None;
    }
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut ordered) = (0.0, 0.0);
    for ties in pairs.chunk_by(|a, b| a.0 == b.0) {
        let accepted = ties.iter().filter(|pair| pair.1).count() as f64;
        let rejected = ties.len() as f64 - accepted;
        ordered += accepted * (below + rejected / 2.0);
        below += rejected;
    }
    Some(ordered / (num_accepted as f64 * num_rejected as f64))
}
