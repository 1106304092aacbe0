//! Failure injection on a real CUDA device: `cargo test --test cuda_device -- --ignored`, or the
//! executable that `make gpu-wheel` leaves in `.gpu/`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use extkv_core::driver::{CheckedDriver, CudaOptions, Fence, Leftovers, VmmDriver, registry};
use extkv_core::memory::{
    BufferOptions, ChunkPolicy, ChunkSize, GrowableBuffer, Growth, SegmentLayout, grow_together,
    prepare_together, shrink_together,
};

const GRANULE: u64 = 2 << 20;

fn device() -> (Arc<dyn VmmDriver>, Arc<CheckedDriver>) {
    let cuda: Arc<dyn VmmDriver> = registry::cuda(0, CudaOptions::default()).expect("CUDA device");
    (Arc::clone(&cuda), Arc::new(CheckedDriver::new(cuda)))
}

fn buffer(checked: &Arc<CheckedDriver>, num_segments: u64) -> GrowableBuffer {
    let layout = SegmentLayout::equal(num_segments * 3 * GRANULE / 2, num_segments).unwrap();
    let policy = ChunkPolicy { size: ChunkSize::AtMost(GRANULE), growth: Growth::Exact };
    let driver = Arc::clone(checked) as Arc<dyn VmmDriver>;
    GrowableBuffer::new(driver, layout, BufferOptions { policy }).unwrap()
}

/// Fails call 0, 1, 2, … of `attempt` until it gets through; checks free memory after each.
fn with_every_failure(
    cuda: &Arc<dyn VmmDriver>,
    checked: &CheckedDriver,
    attempt: impl Fn() -> extkv_core::Result<()>,
) -> u64 {
    let free = cuda.memory_info().unwrap().free;
    for index in 0.. {
        checked.fail_nth(index);
        let result = attempt();
        checked.clear_faults();
        if result.is_ok() {
            return index;
        }
        let after = cuda.memory_info().unwrap().free;
        assert_eq!(after, free, "call {index} left device memory behind");
    }
    0
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_failing_call_leaves_a_real_device_as_it_was() {
    let (cuda, checked) = device();
    let before = cuda.memory_info().unwrap().free;
    let buffers = [buffer(&checked, 2), buffer(&checked, 4)];
    let full = 3 * GRANULE / 2;
    let grow = || grow_together(&[(&buffers[0], full), (&buffers[1], full)], true);
    assert!(with_every_failure(&cuda, &checked, grow) > 20);
    let shrink = || {
        let targets = [(&buffers[0], 0), (&buffers[1], 0)];
        shrink_together(&targets, Fence::Device).map(|_| ())
    };
    with_every_failure(&cuda, &checked, shrink);
    let prepared = || {
        let targets = [(&buffers[1], full), (&buffers[0], GRANULE)];
        prepare_together(&targets)?.commit(true)
    };
    with_every_failure(&cuda, &checked, prepared);
    drop(buffers);
    assert_eq!(checked.leftovers(), Leftovers::default());
    assert_eq!(cuda.memory_info().unwrap().free, before);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_wrong_index_and_a_huge_reservation_are_errors() {
    let error = registry::cuda(4096, CudaOptions::default()).unwrap_err();
    assert!(error.to_string().contains("device index 4096 does not exist"), "{error}");
    let (cuda, _) = device();
    let layout = SegmentLayout::equal(1 << 50, 1).unwrap();
    GrowableBuffer::new(Arc::clone(&cuda), layout, BufferOptions::default()).unwrap_err();
    let layout = SegmentLayout::equal(1 << 44, 1).unwrap();
    GrowableBuffer::new(cuda, layout, BufferOptions::default()).unwrap();
}
