//! Why calibration data or a temperature file is refused.

use crate::ids::{RequestId, StepId};

/// Rounds, settings or files that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// Logits of another number of drafts.
    #[error("a round has {found} logits: {expected} needed")]
    WrongLength {
        /// Logits given.
        found: usize,
        /// γ.
        expected: usize,
    },
    /// A setting of 0.
    #[error("{name} is 0: at least 1 is needed")]
    Zero {
        /// Name of the setting.
        name: &'static str,
    },
    /// A setting out of its range.
    #[error("{name} is {found}: expected {expected}")]
    OutOfRange {
        /// Name of the setting.
        name: &'static str,
        /// The value.
        found: f64,
        /// The range.
        expected: &'static str,
    },
    /// Logits of one round with the outcome of another.
    #[error(
        "request {request_id}: logits of step {logits_step} with the outcome of step \
         {outcome_step}"
    )]
    PairingMismatch {
        /// The request.
        request_id: RequestId,
        /// Step that drew the drafts.
        logits_step: StepId,
        /// Step whose drafts the outcome is of.
        outcome_step: StepId,
    },
    /// A round whose window was trimmed: what it hides would bias the fit.
    #[error("a round verified {found} of {needed} drafts: the offline fit needs whole blocks")]
    Censored {
        /// Drafts verified.
        found: usize,
        /// Drafts drawn.
        needed: usize,
    },
    /// More drafts accepted than verified.
    #[error("a round accepts {found} drafts: {limit} were verified")]
    AcceptedPastWindow {
        /// Drafts accepted.
        found: usize,
        /// Drafts verified.
        limit: usize,
    },
    /// An accepted end of sequence that was not accepted.
    #[error("the end of sequence is draft {found} of {limit} accepted ones")]
    EndNotAccepted {
        /// Its index, from 0.
        found: usize,
        /// Drafts accepted.
        limit: usize,
    },
    /// Too few rounds reach a position.
    #[error("position {position} has {found} rounds: at least {needed} are needed")]
    TooFewRounds {
        /// The position, from 1.
        position: usize,
        /// Rounds that count there.
        found: usize,
        /// Least number.
        needed: usize,
    },
    /// Logits that tell more about a neighbouring round than about their own.
    #[error(
        "logits predict the outcome {offset:+} round(s) away better than their own: AUC \
         {neighbour:.3} against {own:.3}; check how rounds are paired"
    )]
    PairingSuspect {
        /// How far away the better match is.
        offset: i32,
        /// AUC there.
        neighbour: f64,
        /// AUC of the pairs as given.
        own: f64,
    },
    /// A file without temperatures.
    #[error("the file has neither \"temperatures\" nor \"sts_temperatures\"")]
    NoTemperatures,
    /// A file whose two lists differ.
    #[error("\"temperatures\" and \"sts_temperatures\" of the file differ")]
    Conflict,
    /// A temperature that cannot be.
    #[error("temperature {position} is {found}: a finite number above 0 is needed")]
    BadTemperature {
        /// Its position, from 1.
        position: usize,
        /// The value.
        found: f64,
    },
    /// Fewer temperatures than drafts.
    #[error("{found} temperatures for {needed} drafts: at least as many are needed")]
    TooFewTemperatures {
        /// Temperatures there are.
        found: usize,
        /// γ.
        needed: usize,
    },
    /// Text that is no temperature file.
    #[error("the temperature file is not readable: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
}
