//! Layers at offsets of one allocation, as an engine reports them, to the segments of a buffer.
//!
//! Each layer has a first byte, a distance between its blocks and bytes per block. Layers whose
//! blocks interleave (the same distance, inside one another's gaps) form one segment; a layer
//! whose blocks are back to back forms its own. The segments must tile the buffer.

use super::SegmentPlan;
use super::error::PlanError;
use crate::kv::checked::{add, mul, non_zero};
use crate::kv::error::LayoutError;
use crate::kv::spec::NumBlocks;

/// One layer in a common allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The layer.
    pub layer: String,
    /// First byte of its block 0.
    pub offset_bytes: u64,
    /// Bytes from one of its blocks to the next.
    pub block_stride_bytes: u64,
    /// Bytes of one of its blocks.
    pub bytes_per_block: u64,
}

/// Derives the segments of a buffer from the layers placed in it. Layers at the very same place
/// share it.
///
/// # Errors
/// [`PlanError::NoLayers`]; [`LayoutError::ZeroSize`]; [`PlanError::PlacementsOverlap`] names two
/// layers that would use the same bytes; [`PlanError::PlacementGap`] where bytes belong to no
/// layer; [`LayoutError::Overflow`].
pub fn segments_of_placements(
    placements: &[Placement],
    capacity: NumBlocks,
) -> Result<Vec<SegmentPlan>, PlanError> {
    non_zero("number of blocks", capacity.0)?;
    let mut rest: Vec<&Placement> = placements.iter().collect();
    rest.sort_by_key(|place| (place.offset_bytes, place.block_stride_bytes));
    rest.dedup_by(|a, b| same_place(a, b));
    let mut rest = rest.as_slice();
    let mut segments = Vec::new();
    let mut end = 0;
    let mut previous: Option<&Placement> = None;
    while let Some(&first) = rest.first() {
        check_start(first, end, previous)?;
        let (segment, members) = take_segment(rest, capacity)?;
        end = add("bytes of a buffer", segment.offset_bytes, segment.capacity_bytes)?;
        segments.push(segment);
        let (taken, others) = rest.split_at(members);
        previous = taken.last().copied();
        rest = others;
    }
    if segments.is_empty() { Err(PlanError::NoLayers) } else { Ok(segments) }
}

fn same_place(a: &Placement, b: &Placement) -> bool {
    (a.offset_bytes, a.block_stride_bytes, a.bytes_per_block)
        == (b.offset_bytes, b.block_stride_bytes, b.bytes_per_block)
}

fn check_start(first: &Placement, end: u64, previous: Option<&Placement>) -> Result<(), PlanError> {
    match previous {
        Some(previous) if first.offset_bytes < end => Err(overlap(previous, first)),
        _ => check_gap(first, end, first.offset_bytes),
    }
}

/// Takes the layers whose block 0 lies between the first one's block 0 and block 1.
fn take_segment(
    placements: &[&Placement],
    capacity: NumBlocks,
) -> Result<(SegmentPlan, usize), PlanError> {
    let Some(&first) = placements.first() else {
        return Err(PlanError::NoLayers);
    };
    let stride = non_zero("block_stride_bytes", first.block_stride_bytes)?;
    let window_end = add("bytes of a buffer", first.offset_bytes, stride)?;
    let members = placements.iter().take_while(|place| place.offset_bytes < window_end).count();
    let (inside, _) = placements.split_at(members);
    check_block(inside, stride, window_end)?;
    let capacity_bytes = mul("bytes of a buffer", stride, capacity.0)?;
    let (offset_bytes, bytes_per_block) = (first.offset_bytes, stride);
    Ok((SegmentPlan { offset_bytes, capacity_bytes, bytes_per_block }, members))
}

/// Refuses layers that do not fill a block of their segment side by side.
fn check_block(inside: &[&Placement], stride: u64, window_end: u64) -> Result<(), PlanError> {
    for pair in inside.windows(2) {
        if let [place, next] = pair {
            let end = block_end(place)?;
            if next.offset_bytes < end || next.block_stride_bytes != stride {
                return Err(overlap(place, next));
            }
            check_gap(next, end, next.offset_bytes)?;
        }
    }
    match (inside.first(), inside.last()) {
        (Some(first), Some(last)) if block_end(last)? > window_end => Err(overlap(last, first)),
        (_, Some(last)) => check_gap(last, block_end(last)?, window_end),
        _ => Ok(()),
    }
}

fn check_gap(place: &Placement, from: u64, to: u64) -> Result<(), PlanError> {
    if from == to {
        return Ok(());
    }
    Err(PlanError::PlacementGap { layer: place.layer.clone(), from, to })
}

fn block_end(place: &Placement) -> Result<u64, LayoutError> {
    let bytes = non_zero("bytes_per_block", place.bytes_per_block)?;
    add("bytes of a buffer", place.offset_bytes, bytes)
}

fn overlap(first: &Placement, second: &Placement) -> PlanError {
    PlanError::PlacementsOverlap { layer: first.layer.clone(), other: second.layer.clone() }
}
