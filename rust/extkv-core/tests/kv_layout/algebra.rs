//! The algebra against brute force, for random shapes, orders, dtypes and block dims.

use super::*;

/// What torch does: a contiguous physical tensor, permuted back to the logical dims.
fn permuted_strides(shape: &[u64], stride_order: &[usize]) -> Vec<u64> {
    let physical: Vec<u64> = stride_order.iter().map(|&dim| shape[dim]).collect();
    let contiguous = |i: usize| physical[i + 1..].iter().product::<u64>();
    (0..shape.len())
        .map(|dim| contiguous(stride_order.iter().position(|&d| d == dim).unwrap()))
        .collect()
}

proptest! {
    #[test]
    fn every_element_has_its_own_bytes_inside_its_block(case in cases()) {
        let sized = case.sized();
        let mut owned = BTreeSet::new();
        for index in indices(sized.shape()) {
            let first = sized.byte_offset(&index).unwrap();
            let ranges = sized.block_ranges(BlockId(index[case.block_dim])).unwrap();
            let bytes = first..first + case.dtype.size_bytes();
            let inside = |range: &Range<u64>| range.start <= bytes.start && bytes.end <= range.end;
            prop_assert!(ranges.iter().any(inside));
            for byte in bytes {
                prop_assert!(owned.insert(byte), "byte {byte} of {index:?} has an owner");
            }
        }
        let last = owned.last().copied().unwrap();
        prop_assert!(last < sized.capacity_bytes());
        if case.padding == 0 {
            prop_assert_eq!(owned.len() as u64, sized.capacity_bytes());
        }
    }

    #[test]
    fn committed_prefix_is_exactly_the_blocks_below(case in cases(), share in 0.0_f64..=1.0) {
        let sized = case.sized();
        let committed = (0..=case.capacity).filter(|n| *n as f64 <= share * case.capacity as f64);
        let committed = committed.max().unwrap_or(0);
        let prefix = bytes_of(&sized.committed_ranges(NumBlocks(committed)).unwrap());
        let mut blocks = BTreeSet::new();
        for block in 0..committed {
            blocks.extend(bytes_of(&sized.block_ranges(BlockId(block)).unwrap()));
        }
        prop_assert_eq!(prefix, blocks);
    }

    #[test]
    fn commit_then_grow_is_commit_of_the_sum(case in cases(), a in 0_u64..6, b in 0_u64..6) {
        let sized = case.sized();
        let (a, b) = (a.min(b).min(case.capacity), a.max(b).min(case.capacity));
        let mut grown = bytes_of(&sized.committed_ranges(NumBlocks(a)).unwrap());
        for byte in bytes_of(&sized.grown_ranges(NumBlocks(a), NumBlocks(b)).unwrap()) {
            prop_assert!(grown.insert(byte), "growing touches old byte {byte}");
        }
        prop_assert_eq!(grown, bytes_of(&sized.committed_ranges(NumBlocks(b)).unwrap()));
    }

    #[test]
    fn strides_are_those_of_a_permuted_contiguous_tensor(case in cases()) {
        let sized = Case { padding: 0, ..case.clone() }.sized();
        prop_assert_eq!(sized.strides(), permuted_strides(sized.shape(), &case.stride_order));
        let outside: u64 = case
            .stride_order
            .iter()
            .take_while(|&&dim| dim != case.block_dim)
            .map(|&dim| case.sizes[dim])
            .product();
        prop_assert_eq!(sized.layout().num_segments(), outside);
    }

    #[test]
    fn reported_strides_give_the_layout_back(case in cases()) {
        let case = Case { padding: 0, capacity: case.capacity.max(2), ..case };
        let sized = case.sized();
        let strides: Vec<i64> = sized.strides().iter().map(|&s| i64::try_from(s).unwrap()).collect();
        let shape = dims(sized.shape());
        let layout = Layout::from_strides(shape, &strides, case.block_dim, case.dtype).unwrap();
        prop_assert_eq!(layout.num_segments(), sized.layout().num_segments());
        prop_assert_eq!(layout.bytes_per_block(), sized.layout().bytes_per_block());
        let again = layout.at(NumBlocks(case.capacity)).unwrap();
        for index in indices(sized.shape()) {
            prop_assert_eq!(again.byte_offset(&index), sized.byte_offset(&index));
        }
    }

    #[test]
    fn strides_are_accepted_only_if_they_tile(
        sizes in prop::collection::vec(1_u64..4, 1..4),
        strides in prop::collection::vec(0_i64..13, 3),
    ) {
        let mut shape = sizes;
        shape[0] += 1;
        let strides = &strides[..shape.len()];
        let element = |index: &Vec<u64>| -> u64 {
            index.iter().zip(strides).map(|(i, s)| i * s.unsigned_abs()).sum()
        };
        let elements: Vec<u64> = indices(&shape).iter().map(element).collect();
        let distinct: BTreeSet<u64> = elements.iter().copied().collect();
        let tiles = distinct.len() == elements.len()
            && distinct.last().copied() == Some(elements.len() as u64 - 1);
        let layout = Layout::from_strides(dims(&shape), strides, 0, UInt8);
        prop_assert_eq!(layout.is_ok(), tiles, "{:?}", layout);
    }

    #[test]
    fn block_outermost_is_one_segment_of_the_same_elements(case in cases()) {
        let before = Case { padding: 0, ..case.clone() }.sized();
        let layout = block_outermost(before.layout()).unwrap();
        prop_assert_eq!(layout.num_segments(), 1);
        let after = layout.at(NumBlocks(case.capacity)).unwrap();
        prop_assert_eq!(after.shape(), before.shape());
        prop_assert_eq!(after.capacity_bytes(), before.capacity_bytes());
        for block in 0..case.capacity {
            prop_assert_eq!(after.block_ranges(BlockId(block)).unwrap().len(), 1);
        }
    }
}
