//! One size for several ranks.

use super::error::SizingError;
use super::plan::SizingPlan;
use crate::kv::spec::NumBlocks;

/// What several ranks commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// Blocks, the same on every rank.
    pub blocks: NumBlocks,
    /// The first rank that has no more.
    pub limiting_rank: usize,
}

/// Takes the minimum of blocks over the plans of all ranks, in rank order.
///
/// # Errors
/// [`SizingError::NoRanks`]; [`SizingError::RanksDiffer`] if a rank has another `block_size` or
/// `max_model_len`.
pub fn agree(plans: &[SizingPlan]) -> Result<Agreement, SizingError> {
    let first = plans.first().ok_or(SizingError::NoRanks)?;
    let mut agreement = Agreement { blocks: first.blocks, limiting_rank: 0 };
    for (rank, plan) in plans.iter().enumerate() {
        let settings = [
            ("block_size", first.cache.block_size, plan.cache.block_size),
            ("max_model_len", first.max_model_len, plan.max_model_len),
        ];
        if let Some((field, expected, found)) = settings.into_iter().find(|(_, a, b)| a != b) {
            return Err(SizingError::RanksDiffer { rank, field, expected, found });
        }
        if plan.blocks < agreement.blocks {
            agreement = Agreement { blocks: plan.blocks, limiting_rank: rank };
        }
    }
    Ok(agreement)
}
