//! Layers at offsets of one allocation.

use super::*;

fn place(layer: &str, offset_bytes: u64, block_stride_bytes: u64, bytes: u64) -> Placement {
    Placement { layer: layer.to_owned(), offset_bytes, block_stride_bytes, bytes_per_block: bytes }
}

fn segments(placements: &[Placement]) -> Result<Vec<(u64, u64)>, PlanError> {
    let segments = segments_of_placements(placements, NumBlocks(10))?;
    Ok(segments.iter().map(|s| (s.offset_bytes, s.bytes_per_block)).collect())
}

#[test]
fn placements_give_back_to_back_and_interleaved_segments() {
    let layer_by_layer = [place("a", 0, 8, 8), place("b", 80, 4, 4)];
    assert_eq!(segments(&layer_by_layer), Ok(vec![(0, 8), (80, 4)]));
    let interleaved = [place("b", 8, 12, 4), place("a", 0, 12, 8)];
    assert_eq!(segments(&interleaved), Ok(vec![(0, 12)]));
    let mixed = [place("a", 0, 12, 8), place("b", 8, 12, 4), place("c", 120, 6, 6)];
    assert_eq!(segments(&mixed), Ok(vec![(0, 12), (120, 6)]));
    let shared = [place("a", 0, 8, 8), place("a again", 0, 8, 8)];
    assert_eq!(segments(&shared), Ok(vec![(0, 8)]));
}

#[test]
fn rejects_placements_that_overlap() {
    let overlap = |layer: &str, other: &str| {
        let (layer, other) = (layer.to_owned(), other.to_owned());
        Err(PlanError::PlacementsOverlap { layer, other })
    };
    let segments_overlap = [place("a", 0, 8, 8), place("b", 79, 4, 4)];
    assert_eq!(segments(&segments_overlap), overlap("a", "b"));
    let blocks_overlap = [place("a", 0, 12, 8), place("b", 7, 12, 5)];
    assert_eq!(segments(&blocks_overlap), overlap("a", "b"));
    let strides_differ = [place("a", 0, 12, 8), place("b", 8, 4, 4)];
    assert_eq!(segments(&strides_differ), overlap("a", "b"));
    assert_eq!(segments(&[place("a", 0, 4, 8)]), overlap("a", "a"));
}

#[test]
fn rejects_placements_that_do_not_tile() {
    let gap =
        |layer: &str, from, to| Err(PlanError::PlacementGap { layer: layer.to_owned(), from, to });
    assert_eq!(segments(&[place("a", 4, 8, 8)]), gap("a", 0, 4));
    assert_eq!(segments(&[place("a", 0, 12, 8)]), gap("a", 8, 12));
    assert_eq!(segments(&[place("a", 0, 12, 4), place("b", 8, 12, 4)]), gap("b", 4, 8));
    assert_eq!(segments(&[place("a", 0, 8, 8), place("b", 81, 4, 4)]), gap("b", 80, 81));
}

#[test]
fn rejects_placements_of_nothing() {
    assert_eq!(segments(&[]), Err(PlanError::NoLayers));
    let zero = |what| Err(PlanError::Layout(LayoutError::ZeroSize { what }));
    assert_eq!(segments(&[place("a", 0, 0, 8)]), zero("block_stride_bytes"));
    assert_eq!(segments(&[place("a", 0, 8, 0)]), zero("bytes_per_block"));
    let none = segments_of_placements(&[place("a", 0, 8, 8)], NumBlocks(0)).unwrap_err();
    assert_eq!(none, PlanError::Layout(LayoutError::ZeroSize { what: "number of blocks" }));
    let far = segments(&[place("a", 0, u64::MAX, u64::MAX)]);
    assert!(matches!(far, Err(PlanError::Layout(LayoutError::Overflow { .. }))));
}
