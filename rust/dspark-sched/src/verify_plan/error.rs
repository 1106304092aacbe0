//! Why a plan is refused.

use crate::ids::{SlotId, StepId};

/// A call of a planner, a history or a controller that cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
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
    /// More requests, or drafts per request, than the planner was made for.
    #[error("{name} is {asked}: at most {limit}")]
    TooMany {
        /// What is counted.
        name: &'static str,
        /// The count.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// A count of 0 where at least 1 is needed.
    #[error("{name} is 0: at least 1 is needed")]
    Zero {
        /// What is counted.
        name: &'static str,
    },
    /// A lag of 0 would let the current block's confidences set its own budget.
    #[error("lag is 0: a budget comes from confidences at least 1 step old")]
    ZeroLag,
    /// A ratio or probability out of its range.
    #[error("{name} is {found}: expected {expected}")]
    OutOfRange {
        /// What was given.
        name: &'static str,
        /// The value.
        found: f64,
        /// The range.
        expected: &'static str,
    },
    /// A slot past the last one.
    #[error("slot {slot_id} does not exist: there are {num_slots} slots")]
    UnknownSlot {
        /// The slot.
        slot_id: SlotId,
        /// Number of slots.
        num_slots: usize,
    },
    /// A step that does not follow the one before.
    #[error("step {found} does not follow step {last}: steps rise")]
    StepOrder {
        /// The step given.
        found: StepId,
        /// The last step.
        last: StepId,
    },
    /// A call out of order, for example a plan for a step that was not decided.
    #[error("{call} for step {found:?}: {expected} comes first")]
    CallOrder {
        /// The call.
        call: &'static str,
        /// The step in progress, if any.
        found: Option<StepId>,
        /// The call that must precede it.
        expected: &'static str,
    },
    /// More accepted drafts than were verified.
    #[error("row {row} accepts {found} drafts: {limit} were verified")]
    AcceptedPastWindow {
        /// Row of the batch.
        row: usize,
        /// Accepted drafts.
        found: u32,
        /// Verified drafts.
        limit: u32,
    },
    /// An exhaustive search that would not end.
    #[error("{num_requests} requests of {num_drafts} drafts have more than {limit} plans")]
    TooManyPlans {
        /// Requests.
        num_requests: usize,
        /// Drafts per request.
        num_drafts: usize,
        /// Most plans searched.
        limit: u64,
    },
}

/// `Ok` when the length fits.
pub(crate) fn check_length(
    name: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), PlanError> {
    if found == expected { Ok(()) } else { Err(PlanError::WrongLength { name, found, expected }) }
}
