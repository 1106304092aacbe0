//! The order of drafts: survival falling, then position rising, then request rising.
//!
//! Each draft is one integer that sorts in that order. Ties are decided by place alone, never by a
//! token or its id, so equal survivals cannot leak a value. Within a request survival never rises and
//! position does, so any first drafts of the order are a prefix of each request's drafts.

use super::batch::DraftBatch;
use crate::confidence::sanitized;

/// Most requests that fit a key.
pub(super) const MAX_NUM_REQUESTS: usize = 1 << REQUEST_BITS;
/// Most drafts per request that fit a key.
pub(super) const MAX_NUM_DRAFTS: usize = 1 << POSITION_BITS;

const REQUEST_BITS: u32 = 20;
const POSITION_BITS: u32 = 12;
const SURVIVAL_SHIFT: u32 = REQUEST_BITS + POSITION_BITS;

/// Fills `keys` with the drafts that may be accepted: survival above 0, within the row's limit.
/// Positive floats order as their bits.
pub(super) fn fill_keys(keys: &mut Vec<u64>, batch: &DraftBatch<'_>, num_drafts: usize) {
    keys.clear();
    for_each_draft(batch, num_drafts, |row, position, survival| {
        let place = (position as u64) << REQUEST_BITS | row as u64;
        keys.push(u64::from(!survival.to_bits()) << SURVIVAL_SHIFT | place);
    });
}

/// Calls with row, position and survival of each draft that may be accepted.
pub(super) fn for_each_draft(
    batch: &DraftBatch<'_>,
    num_drafts: usize,
    mut call: impl FnMut(usize, usize, f32),
) {
    for (row, survival) in batch.survival.chunks_exact(num_drafts).enumerate() {
        let mut before = 1.0;
        let drafts = survival.iter().take(batch.limit(row, num_drafts)).enumerate();
        for (position, &survival) in drafts {
            before = sanitized(survival).min(before);
            if before <= 0.0 {
                break;
            }
            call(row, position, before);
        }
    }
}

/// Row of a draft.
#[expect(clippy::cast_possible_truncation, reason = "masked to 20 bits")]
pub(super) fn row_of(key: u64) -> usize {
    (key & (MAX_NUM_REQUESTS as u64 - 1)) as u32 as usize
}

/// Survival of a draft.
pub(super) fn survival_of(key: u64) -> f64 {
    f64::from(f32::from_bits(!((key >> SURVIVAL_SHIFT) as u32)))
}
