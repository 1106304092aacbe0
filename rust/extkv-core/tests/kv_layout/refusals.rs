//! Every layout that is refused, with the reason.

use super::*;

fn refused(sizes: &[u64], order: &[usize], block_dim: usize) -> LayoutError {
    Layout::new(dims(sizes), order.to_vec(), block_dim, BFloat16).unwrap_err()
}

#[test]
fn rejects_stride_orders_that_are_no_permutation() {
    let length = LayoutError::StrideOrderLength { expected: 3, found: 2 };
    assert_eq!(refused(&[2, 1, 4], &[0, 1], 1), length);
    let entry = LayoutError::StrideOrderEntry { entry: 3, num_dims: 3 };
    assert_eq!(refused(&[2, 1, 4], &[0, 1, 3], 1), entry);
    let repeats = LayoutError::StrideOrderRepeats { dim: 1 };
    assert_eq!(refused(&[2, 1, 4], &[0, 1, 1], 1), repeats);
}

#[test]
fn rejects_a_dim_of_size_zero() {
    assert_eq!(refused(&[2, 1, 0], &[0, 1, 2], 1), LayoutError::ZeroDim { dim: "d2".to_owned() });
}

#[test]
fn rejects_a_block_dim_that_is_not_there() {
    let error = LayoutError::BlockDimOutOfRange { block_dim: 3, num_dims: 3 };
    assert_eq!(refused(&[2, 1, 4], &[0, 1, 2], 3), error);
    assert_eq!(refused(&[], &[], 0), LayoutError::BlockDimOutOfRange { block_dim: 0, num_dims: 0 });
}

#[test]
fn rejects_sizes_that_overflow() {
    let huge = refused(&[1, 1 << 40, 1 << 30], &[0, 1, 2], 0);
    assert!(matches!(huge, LayoutError::Overflow { .. }));
    let layout = Layout::block_major(&qwen3_8b()).unwrap();
    let capacity = NumBlocks(1 << 48);
    assert!(matches!(layout.at(capacity), Err(LayoutError::Overflow { .. })));
    let padded = Layout::kv_split(&qwen3_8b()).unwrap().padded_to(1 << 63);
    assert!(matches!(padded, Err(LayoutError::Overflow { .. })));
    let strides =
        Layout::from_strides(dims(&[2, 1 << 40, 1 << 30]), &[i64::MAX, 1 << 30, 1], 0, UInt8);
    assert!(matches!(strides, Err(LayoutError::Overflow { .. })));
}

#[test]
fn rejects_more_segments_than_the_limit() {
    let limit = MAX_SEGMENTS;
    let error = LayoutError::TooManySegments { num_segments: limit + 1, limit };
    assert_eq!(refused(&[limit + 1, 1], &[0, 1], 1), error);
    assert!(Layout::contiguous(dims(&[limit, 1]), 1, UInt8).is_ok());
}

#[test]
fn rejects_no_blocks() {
    let error = Layout::block_major(&qwen3_8b()).unwrap().at(NumBlocks(0)).unwrap_err();
    assert_eq!(error, LayoutError::ZeroSize { what: "number of blocks" });
}

#[test]
fn rejects_blocks_and_growth_outside_the_capacity() {
    let sized = Layout::block_major(&qwen3_8b()).unwrap().at(NumBlocks(10)).unwrap();
    let (block, capacity) = (BlockId(10), NumBlocks(10));
    let error = sized.block_ranges(block).unwrap_err();
    assert_eq!(error, LayoutError::BlockOutOfRange { block, capacity });
    let requested = NumBlocks(11);
    let error = sized.committed_ranges(requested).unwrap_err();
    assert_eq!(error, LayoutError::TooManyBlocks { requested, capacity });
    let (from, to) = (NumBlocks(5), NumBlocks(4));
    let error = sized.grown_ranges(from, to).unwrap_err();
    assert_eq!(error, LayoutError::NotGrowing { from, to });
}

#[test]
fn rejects_an_index_outside_the_shape() {
    let sized = Layout::contiguous(dims(&[1, 3]), 0, UInt8).unwrap().at(NumBlocks(2)).unwrap();
    for index in [vec![2, 0], vec![0, 3], vec![0], vec![0, 0, 0]] {
        let error = sized.byte_offset(&index).unwrap_err();
        assert_eq!(error, LayoutError::IndexOutOfRange { index, shape: vec![2, 3] });
    }
    assert!(matches!(sized.select(0, 2), Err(LayoutError::IndexOutOfRange { .. })));
    assert!(matches!(sized.select(2, 0), Err(LayoutError::IndexOutOfRange { .. })));
}

#[test]
fn rejects_padding_that_is_too_small_or_misaligned() {
    let layout = Layout::block_major(&qwen3_8b()).unwrap();
    let error = layout.clone().padded_to(65_534).unwrap_err();
    let (bytes, needed) = (Bytes(65_534), Bytes(65_536));
    let num_speculative_tokens = 0;
    assert_eq!(error, LayoutError::BlockTooSmall { bytes, needed, num_speculative_tokens });
    let error = layout.padded_to(65_537).unwrap_err();
    let (bytes, alignment) = (Bytes(65_537), Bytes(2));
    assert_eq!(error, LayoutError::BlockMisaligned { bytes, alignment });
}

#[test]
fn rejects_one_width_for_unequal_keys_and_values() {
    let spec = AttentionSpec::new(16, 8, 192, BFloat16).unwrap().with_head_dim_v(128).unwrap();
    let error = LayoutError::UnequalHeadDims { head_dim: 192, head_dim_v: 128 };
    assert_eq!(Layout::kv_split(&spec), Err(error.clone()));
    assert_eq!(Layout::block_major(&spec), Err(error));
}

fn refused_strides(shape: &[u64], strides: &[i64]) -> LayoutError {
    Layout::from_strides(dims(shape), strides, 0, BFloat16).unwrap_err()
}

#[test]
fn rejects_strides_that_alias() {
    let dim = "d0".to_owned();
    let expanded = LayoutError::StridesAlias { dim: dim.clone(), stride: 0, span: 1 };
    assert_eq!(refused_strides(&[4, 1], &[0, 1]), expanded);
    // Neighbours share half of their elements.
    let overlapping = LayoutError::StridesAlias { dim, stride: 4, span: 8 };
    assert_eq!(refused_strides(&[4, 8], &[4, 1]), overlapping);
}

#[test]
fn rejects_strides_that_leave_gaps() {
    let padded = LayoutError::StridesLeaveGap { dim: "d0".to_owned(), stride: 10, span: 8 };
    assert_eq!(refused_strides(&[4, 8], &[10, 1]), padded);
    let every_second = LayoutError::StridesLeaveGap { dim: "d1".to_owned(), stride: 2, span: 1 };
    assert_eq!(refused_strides(&[4, 8], &[16, 2]), every_second);
}

#[test]
fn rejects_negative_or_missing_strides() {
    let negative = LayoutError::NegativeStride { dim: "d1".to_owned(), stride: -1 };
    assert_eq!(refused_strides(&[4, 8], &[8, -1]), negative);
    let count = LayoutError::StrideCount { expected: 2, found: 1 };
    assert_eq!(refused_strides(&[4, 8], &[8]), count);
}

#[test]
fn rejects_strides_of_a_single_block() {
    assert_eq!(refused_strides(&[1, 8], &[8, 1]), LayoutError::AmbiguousBlockDim);
}
