//! Named behaviours of growth, shrinking, zeroing and lifetime on the checked host device.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::cast_possible_truncation, reason = "sizes of tests are small")]

mod support;

use std::sync::Arc;
use std::thread;

use extkv_core::driver::{DriverCall, Fence, HostBudget, HostDriver};
use extkv_core::memory::{
    BufferOptions, ChunkPolicy, ChunkSize, Freeing, GrowableBuffer, Growth, SegmentLayout,
    grow_together, prepare_together, shrink_together,
};
use extkv_core::{DriverError, Error};
use support::{GRANULE, TestDevice, exact_policy};

const HALF: u64 = GRANULE / 2;

#[test]
fn granule_across_a_segment_border_is_mapped_once() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(6 * HALF, 2);
    let sizes_and_granules = [(HALF, 2), (2 * HALF, 3), (3 * HALF, 3)];
    for (size, num_granules) in sizes_and_granules {
        buffer.grow_to(size, true).unwrap();
        assert_eq!(buffer.stats().unwrap().committed_bytes, num_granules * GRANULE, "size {size}");
    }
    device.write(&buffer, 0, &vec![1; 3 * HALF as usize]);
    device.write(&buffer, 3 * HALF, &vec![2; 3 * HALF as usize]);
    assert!(device.read(&buffer, 0, 3 * HALF).iter().all(|byte| *byte == 1));
}

#[test]
fn growth_keeps_the_base_and_the_bytes() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(100 * GRANULE, 1);
    let base = buffer.base();
    buffer.grow_to(10, false).unwrap();
    device.write(&buffer, 0, &[7; 10]);
    buffer.grow_to(100 * GRANULE, false).unwrap();
    assert_eq!(buffer.base(), base);
    assert_eq!(device.read(&buffer, 0, 10), [7; 10]);
}

#[test]
fn zeroing_touches_only_new_logical_bytes() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(2 * GRANULE, 1);
    buffer.grow_to(GRANULE, false).unwrap();
    device.write(&buffer, 0, &vec![0xAB; GRANULE as usize]);
    buffer.shrink_to(10, Fence::Device).unwrap();
    buffer.grow_to(100, true).unwrap();
    assert_eq!(device.read(&buffer, 0, 10), [0xAB; 10]);
    assert_eq!(device.read(&buffer, 10, 90), [0; 90]);
    assert_eq!(device.read(&buffer, 100, 10), [0xAB; 10], "bytes past the size were touched");
}

#[test]
fn recycled_pages_read_zero_after_shrink_and_growth() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(8 * GRANULE, 2);
    buffer.grow_to(4 * GRANULE, false).unwrap();
    device.write(&buffer, 0, &vec![0xAB; 8 * GRANULE as usize]);
    let given_back = buffer.shrink_to(HALF, Fence::Streams(&[])).unwrap();
    assert_eq!(given_back, 0, "one handle per segment cannot be cut");
    buffer.grow_to(4 * GRANULE, true).unwrap();
    for segment in [0, 4 * GRANULE] {
        let bytes = device.read(&buffer, segment, 4 * GRANULE);
        assert!(bytes[..HALF as usize].iter().all(|byte| *byte == 0xAB));
        assert!(bytes[HALF as usize..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn shrink_gives_back_whole_handles_at_the_tail() {
    let device = TestDevice::new(64 * GRANULE);
    let layout = SegmentLayout::equal(20 * GRANULE, 2).unwrap();
    let policy = ChunkPolicy { size: ChunkSize::AtMost(4 * GRANULE), growth: Growth::Exact };
    let buffer = device.buffer(layout, policy);
    buffer.grow_to(10 * GRANULE, false).unwrap();
    assert_eq!(buffer.stats().unwrap().num_handles, 6);
    assert_eq!(buffer.shrink_to(5 * GRANULE, Fence::Device).unwrap(), 4 * GRANULE);
    assert_eq!(buffer.stats().unwrap().num_handles, 4);
    assert_eq!(buffer.shrink_to(0, Fence::Device).unwrap(), 16 * GRANULE);
    assert_eq!(device.budget.info().free, 64 * GRANULE);
    buffer.grow_to(10 * GRANULE, false).unwrap();
}

#[test]
fn growing_one_granule_at_a_time_keeps_few_handles() {
    let device = TestDevice::new(1 << 40);
    let num_granules = 16_384;
    let layout = SegmentLayout::equal(num_granules * GRANULE, 1).unwrap();
    let buffer = device.buffer(layout, ChunkPolicy::default());
    for granules in 1..=num_granules {
        buffer.grow_to(granules * GRANULE, false).unwrap();
        let stats = buffer.stats().unwrap();
        assert!(stats.rounding_bytes <= stats.logical_bytes / 64, "surplus above 1/64");
    }
    // 128 + 64 ln(16384 / 64) = 482
    let num_handles = buffer.stats().unwrap().num_handles;
    assert!(num_handles <= 482, "{num_handles} handles");
}

#[test]
fn surplus_that_does_not_fit_is_left_out() {
    let device = TestDevice::new(129 * GRANULE);
    let layout = SegmentLayout::equal(200 * GRANULE, 1).unwrap();
    let buffer = device.buffer(layout, ChunkPolicy::default());
    buffer.grow_to(128 * GRANULE, false).unwrap();
    buffer.grow_to(129 * GRANULE, false).unwrap();
    assert_eq!(device.budget.info().free, 0);
    assert_eq!(buffer.stats().unwrap().committed_bytes, 129 * GRANULE);
}

#[test]
fn handles_do_not_cross_segments() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(8 * GRANULE, 4);
    buffer.grow_to(2 * GRANULE, false).unwrap();
    assert_eq!(buffer.stats().unwrap().num_handles, 4);
    assert_eq!(device.checked.num_calls_of(DriverCall::SetAccess), 1, "one contiguous run");
    assert_eq!(buffer.num_handles_in(0, 2 * GRANULE).unwrap(), 1);
    assert_eq!(buffer.num_handles_in(GRANULE, 2 * GRANULE).unwrap(), 2);
}

#[test]
fn b64_failed_create_leaves_no_trace_and_a_retry_works() {
    let device = TestDevice::new(1 << 30);
    let layout = SegmentLayout::equal(3 * GRANULE, 1).unwrap();
    let policy = ChunkPolicy { size: ChunkSize::AtMost(GRANULE), growth: Growth::Exact };
    let buffer = device.buffer(layout, policy);
    let before = (device.checked.leftovers(), device.budget.info());
    device.checked.fail_nth_of(DriverCall::Create, 1);
    let error = buffer.grow_to(3 * GRANULE, false).unwrap_err();
    assert!(matches!(error, Error::Driver(DriverError::Injected { call: DriverCall::Create, .. })));
    assert_eq!((device.checked.leftovers(), device.budget.info()), before);
    assert_eq!(buffer.size().unwrap(), 0);
    buffer.grow_to(3 * GRANULE, false).unwrap();
    drop(buffer);
    device.assert_empty();
}

#[test]
fn b66_closed_buffers_return_all_memory() {
    let device = TestDevice::new(1 << 30);
    for _ in 0..64 {
        let buffer = device.exact(16 * GRANULE, 1);
        buffer.grow_to(16 * GRANULE, true).unwrap();
        assert_eq!(buffer.free().unwrap(), Freeing::Done);
    }
    device.assert_empty();
}

#[test]
fn b67_unaligned_sizes_round_up_and_close_clean() {
    let budget = Arc::new(HostBudget::new(1 << 30));
    let driver = Arc::new(HostDriver::new(2 << 20, Arc::clone(&budget)).unwrap());
    let layout = SegmentLayout::equal(8 << 20, 1).unwrap();
    let buffer = GrowableBuffer::new(driver, layout, BufferOptions::default()).unwrap();
    buffer.grow_to(3_000_000, false).unwrap();
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.logical_bytes, stats.committed_bytes), (3_000_000, 4_194_304));
    buffer.grow_to(4_194_304, false).unwrap();
    assert_eq!(buffer.stats().unwrap().num_handles, stats.num_handles, "nothing new to map");
    buffer.free().unwrap();
    assert_eq!(budget.info().free, 1 << 30);
}

#[test]
fn b70_impossible_reservations_fail_and_the_next_one_works() {
    let device = TestDevice::new(1 << 30);
    let layout = SegmentLayout::equal(1 << 50, 1).unwrap();
    let error = GrowableBuffer::new(device.driver(), layout, BufferOptions::default()).unwrap_err();
    assert!(matches!(error, Error::AddressSpaceExhausted { .. }), "{error}");
    assert_eq!(SegmentLayout::equal(0, 1).unwrap_err(), Error::ZeroCapacity);
    let huge = SegmentLayout::equal(u64::MAX, 1).unwrap();
    let error = GrowableBuffer::new(device.driver(), huge, BufferOptions::default()).unwrap_err();
    assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
    device.exact(GRANULE, 1).grow_to(GRANULE, true).unwrap();
    device.assert_empty();
}

#[test]
fn b74_segments_of_one_and_a_half_granules_map_what_they_need() {
    let budget = Arc::new(HostBudget::new(1 << 30));
    let driver = Arc::new(HostDriver::new(2 << 20, budget).unwrap());
    let layout = SegmentLayout::equal(6 << 20, 2).unwrap();
    let buffer = GrowableBuffer::new(driver, layout, BufferOptions::default()).unwrap();
    for (mib_per_segment, physical_mib) in [(1, 4), (2, 6), (3, 6)] {
        buffer.grow_to(mib_per_segment << 20, true).unwrap();
        assert_eq!(buffer.stats().unwrap().committed_bytes, physical_mib << 20);
    }
}

#[test]
fn b76_reservation_covers_the_upper_bound_and_the_last_block_is_usable() {
    let device = TestDevice::new(1 << 40);
    let block = 12_288;
    let layout = SegmentLayout::unequal(&[(6_483 * block, block), (6_483 * block, block)]).unwrap();
    let buffer = device.buffer(layout, ChunkPolicy::default());
    buffer.grow_to(1, true).unwrap();
    assert!(buffer.layout().max_size() >= 6_483);
    buffer.grow_to(6_483, true).unwrap();
    let last = 6_482 * block;
    device.write(&buffer, last, &vec![9; usize::try_from(block).unwrap()]);
    device.write(&buffer, 6_483 * block + last, &vec![8; usize::try_from(block).unwrap()]);
}

#[test]
fn b77_growth_never_replaces_mapped_handles() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(64 * GRANULE, 2);
    for granules in 1..=32 {
        buffer.grow_to(granules * GRANULE, true).unwrap();
    }
    assert_eq!(device.checked.num_calls_of(DriverCall::Unmap), 0);
    assert_eq!(device.checked.num_calls_of(DriverCall::Release), 0);
}

#[test]
fn budget_exhausted_in_the_middle_of_a_group_tells_what_was_needed() {
    let device = TestDevice::new(10 * GRANULE);
    let buffers = [device.exact(8 * GRANULE, 4), device.exact(8 * GRANULE, 2)];
    grow_together(&[(&buffers[0], HALF), (&buffers[1], HALF)], true).unwrap();
    let before = device.checked.leftovers();
    let error =
        grow_together(&[(&buffers[0], 2 * GRANULE), (&buffers[1], 4 * GRANULE)], true).unwrap_err();
    let Error::OutOfMemory { requested, available, .. } = error.clone() else {
        panic!("{error}");
    };
    assert_eq!((requested.0, available.map(|b| b.0)), (10 * GRANULE, Some(4 * GRANULE)));
    assert_eq!(error.to_string(), "cannot commit 640 KiB on cpu: 256 KiB free");
    assert_eq!(device.checked.leftovers(), before);
    assert_eq!(buffers.each_ref().map(|b| b.size().unwrap()), [HALF, HALF]);
}

#[test]
fn a_prepared_growth_can_be_committed_dropped_or_go_stale() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(8 * GRANULE, 1);
    let before = device.checked.leftovers();
    drop(prepare_together(&[(&buffer, 4 * GRANULE)]).unwrap());
    assert_eq!(device.checked.leftovers(), before);
    let stale = prepare_together(&[(&buffer, 4 * GRANULE)]).unwrap();
    prepare_together(&[(&buffer, GRANULE)]).unwrap().commit(true).unwrap();
    assert_eq!(stale.commit(true).unwrap_err(), Error::StalePrepared);
    assert_eq!(buffer.size().unwrap(), GRANULE);
    assert_eq!(device.checked.leftovers().num_handles, 1);
}

#[test]
fn rejects_sizes_that_do_not_fit() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(4 * GRANULE, 2);
    buffer.grow_to(GRANULE, false).unwrap();
    let error = buffer.grow_to(3 * GRANULE, false).unwrap_err();
    assert!(error.to_string().contains("exceeds the segment capacity"), "{error}");
    let error = buffer.grow_to(1, false).unwrap_err();
    assert!(error.to_string().contains("grow-only"), "{error}");
    assert!(matches!(buffer.grow_by(u64::MAX, false), Err(Error::CapacityExceeded { .. })));
    let error = buffer.shrink_to(2 * GRANULE, Fence::Device).unwrap_err();
    assert!(matches!(error, Error::ShrinkOnly { .. }), "{error}");
    let error = grow_together(&[(&buffer, GRANULE), (&buffer, GRANULE)], false).unwrap_err();
    assert_eq!(error, Error::DuplicateBuffer { index: 1 });
    assert_eq!(buffer.size().unwrap(), GRANULE);
}

#[test]
fn memory_waits_for_the_last_view() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(4 * GRANULE, 2);
    buffer.grow_to(GRANULE, true).unwrap();
    let views = [buffer.view_committed(2 * GRANULE, GRANULE), buffer.view_capacity(0, 4 * GRANULE)];
    let [committed, capacity] = views.map(Result::unwrap);
    assert_eq!(buffer.free_strict().unwrap_err(), Error::LiveViews { num_views: 2 });
    assert!(!buffer.is_freed().unwrap());
    assert_eq!(buffer.free().unwrap(), Freeing::Deferred { num_views: 2 });
    assert_eq!(buffer.grow_to(GRANULE, true).unwrap_err(), Error::Freed { operation: "grow" });
    assert!(buffer.stats().unwrap().has_deferred_free);
    drop(committed);
    device.host.write(capacity.address(), &[1]).unwrap();
    drop(buffer);
    assert_eq!(device.checked.leftovers().num_reservations, 1);
    thread::spawn(move || drop(capacity)).join().unwrap();
    device.assert_empty();
}

#[test]
fn views_stay_inside_what_they_may_show() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(4 * GRANULE, 2);
    buffer.grow_to(100, true).unwrap();
    assert!(buffer.view_committed(0, 100).is_ok());
    assert!(buffer.view_committed(2 * GRANULE, 100).is_ok());
    for (offset, length) in [(0, 101), (2 * GRANULE + 1, 100), (u64::MAX, 2)] {
        let error = buffer.view_committed(offset, length).unwrap_err();
        assert!(matches!(error, Error::ViewOutOfRange { .. }), "{error}");
    }
    let error = buffer.view_capacity(1, 4 * GRANULE).unwrap_err();
    assert!(matches!(error, Error::ViewOutOfRange { limit_of: "reserved", .. }), "{error}");
}

#[test]
fn failed_free_can_be_repeated() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(2 * GRANULE, 2);
    buffer.grow_to(GRANULE, true).unwrap();
    device.checked.fail_nth_of(DriverCall::Unmap, 0);
    buffer.free().unwrap_err();
    assert!(buffer.stats().unwrap().has_deferred_free);
    assert_eq!(buffer.free().unwrap(), Freeing::Done);
    device.assert_empty();
}

#[test]
fn a_failure_that_cannot_be_undone_poisons_the_buffer_but_not_free() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(2 * GRANULE, 1);
    device.checked.fail_nth_of(DriverCall::SetAccess, 0);
    device.checked.fail_nth_of(DriverCall::Unmap, 0);
    buffer.grow_to(GRANULE, true).unwrap_err();
    let error = buffer.grow_to(GRANULE, true).unwrap_err();
    assert_eq!(error, Error::Poisoned { call: DriverCall::Map });
    assert!(error.to_string().contains("can only be freed"));
}

#[test]
fn threads_that_append_never_lose_a_byte() {
    let device = TestDevice::new(1 << 40);
    let buffer = Arc::new(device.exact(1 << 24, 1));
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || {
                let mut ends = Vec::new();
                for _ in 0..100 {
                    ends.push(buffer.grow_by(1000, true).unwrap());
                    buffer.stats().unwrap();
                }
                ends
            })
        })
        .collect();
    let mut ends: Vec<u64> = workers.into_iter().flat_map(|w| w.join().unwrap()).collect();
    ends.sort_unstable();
    assert_eq!(ends, (1..=800).map(|n| n * 1000).collect::<Vec<u64>>());
}

#[test]
fn groups_in_opposite_order_do_not_deadlock() {
    let device = TestDevice::new(1 << 40);
    let pair = Arc::new([device.exact(1 << 24, 1), device.exact(1 << 24, 1)]);
    let workers = [false, true].map(|is_reversed| {
        let pair = Arc::clone(&pair);
        thread::spawn(move || {
            for step in 1..300 {
                let mut targets = vec![(&pair[0], step * 100), (&pair[1], step * 100)];
                if is_reversed {
                    targets.reverse();
                }
                // One of the two threads is behind and is refused as a shrink; neither waits.
                let _ = grow_together(&targets, false);
                let _ = shrink_together(&targets, Fence::Device);
            }
        })
    });
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn stats_count_driver_calls() {
    let device = TestDevice::new(1 << 30);
    let buffer = device.exact(2 * GRANULE, 2);
    buffer.grow_to(GRANULE, true).unwrap();
    let stats = buffer.stats().unwrap();
    let count = |call: DriverCall| stats.driver_calls[call.index()].count;
    assert_eq!(count(DriverCall::Reserve), 1);
    assert_eq!((count(DriverCall::Create), count(DriverCall::Map)), (2, 2));
    assert_eq!(count(DriverCall::SetAccess), 1);
    assert_eq!(count(DriverCall::Fill), 0, "fresh host memory is zero");
    let create = stats.driver_calls[DriverCall::Create.index()];
    assert!(create.total_ns >= create.max_ns && create.max_ns > 0);
    assert_eq!(exact_policy().growth, Growth::Exact);
}
