//! Random growth, shrinking, writing and freeing against a plain model, with a failure injected at
//! every call index of every step: bytes survive, sizes agree, nothing leaks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::cast_possible_truncation, reason = "sizes of tests are small")]

mod support;

use extkv_core::driver::{Fence, Leftovers};
use extkv_core::memory::{
    BufferView, ChunkPolicy, ChunkSize, GrowableBuffer, Growth, SegmentLayout, grow_together,
    prepare_together, shrink_together,
};
use proptest::prelude::*;
use support::{GRANULE, TestDevice};

#[derive(Debug, Clone)]
enum Step {
    /// New sizes as thousandths of each buffer's largest size; clamped to grow.
    Grow { permille: Vec<u64>, zero_new: bool, is_prepared: bool },
    /// New sizes as thousandths of each buffer's current size.
    Shrink { permille: Vec<u64> },
    /// Fill a committed stretch of one segment.
    Write { buffer: usize, segment: usize, from_permille: u64, value: u8 },
    /// Take a view of committed bytes.
    View { buffer: usize },
    /// Drop the oldest view.
    DropView,
}

#[derive(Debug, Clone)]
struct Shape {
    parts: Vec<(u64, u64)>,
    policy: ChunkPolicy,
}

fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let part = (1u64..5, prop_oneof![Just(1u64), Just(1000), Just(GRANULE / 2), Just(3 * GRANULE)])
        .prop_map(|(half_granules, unit)| {
            let capacity = (half_granules * GRANULE / 2).max(unit);
            (capacity, unit)
        });
    let policy = (
        prop_oneof![
            Just(ChunkSize::Automatic),
            Just(ChunkSize::WholeRun),
            Just(ChunkSize::AtMost(GRANULE)),
            Just(ChunkSize::AtMost(3 * GRANULE))
        ],
        prop_oneof![Just(Growth::Exact), Just(Growth::Geometric)],
    )
        .prop_map(|(size, growth)| ChunkPolicy { size, growth });
    let shape = (prop::collection::vec(part, 1..4), policy)
        .prop_map(|(parts, policy)| Shape { parts, policy });
    prop::collection::vec(shape, 1..4)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let permille = || prop::collection::vec(0u64..=1000, 3);
    let step = prop_oneof![
        4 => (permille(), any::<bool>(), any::<bool>()).prop_map(
            |(permille, zero_new, is_prepared)| Step::Grow { permille, zero_new, is_prepared }
        ),
        3 => permille().prop_map(|permille| Step::Shrink { permille }),
        3 => (0..3usize, 0..3usize, 0u64..1000, 1u8..255).prop_map(
            |(buffer, segment, from_permille, value)| Step::Write {
                buffer, segment, from_permille, value
            }
        ),
        1 => (0..3usize).prop_map(|buffer| Step::View { buffer }),
        1 => Just(Step::DropView),
    ];
    prop::collection::vec(step, 1..14)
}

/// The committed bytes of each segment, as they must read.
struct Model {
    size: u64,
    segments: Vec<Vec<u8>>,
}

struct World {
    device: TestDevice,
    buffers: Vec<GrowableBuffer>,
    models: Vec<Model>,
    views: Vec<BufferView>,
    bases: Vec<u64>,
}

impl World {
    fn new(shapes: &[Shape]) -> Self {
        let device = TestDevice::new(64 << 20);
        let buffers: Vec<GrowableBuffer> = shapes
            .iter()
            .map(|shape| {
                let layout = SegmentLayout::unequal(&shape.parts).expect("layout");
                device.buffer(layout, shape.policy)
            })
            .collect();
        let models = shapes
            .iter()
            .map(|shape| Model { size: 0, segments: vec![Vec::new(); shape.parts.len()] })
            .collect();
        let bases = buffers.iter().map(GrowableBuffer::base).collect();
        Self { device, buffers, models, views: Vec::new(), bases }
    }

    /// Everything a failed step must leave as it was.
    fn fingerprint(&self) -> (Leftovers, Vec<(u64, u64, usize)>) {
        let per_buffer = self
            .buffers
            .iter()
            .map(|buffer| {
                let stats = buffer.stats().expect("stats");
                (buffer.size().expect("size"), stats.committed_bytes, stats.num_handles)
            })
            .collect();
        (self.device.checked.leftovers(), per_buffer)
    }

    fn check_bytes(&self) {
        for (buffer, model) in self.buffers.iter().zip(&self.models) {
            assert_eq!(buffer.size().expect("size"), model.size);
            for (segment, bytes) in buffer.layout().segments().iter().zip(&model.segments) {
                assert_eq!(segment.prefix(model.size), bytes.len() as u64);
                let found = self.device.read(buffer, segment.offset, bytes.len() as u64);
                assert!(found == *bytes, "bytes below the committed size changed");
            }
        }
        let bases: Vec<u64> = self.buffers.iter().map(GrowableBuffer::base).collect();
        assert_eq!(bases, self.bases, "a base pointer moved");
    }

    /// Runs `attempt` with a failure at call 0, 1, 2, … until it gets through; after each failure
    /// everything is as before.
    fn with_every_failure<E: std::fmt::Debug>(&self, attempt: impl Fn() -> Result<(), E>) {
        let before = self.fingerprint();
        for index in 0.. {
            let calls_before = self.device.checked.num_calls();
            self.device.checked.fail_nth(index);
            let result = attempt();
            let num_calls = self.device.checked.num_calls() - calls_before;
            self.device.checked.clear_faults();
            match result {
                Ok(()) if num_calls <= index => return,
                // A release that failed was made up for; the step is done all the same.
                Ok(()) => return,
                Err(error) => {
                    assert!(num_calls > index, "failed without an injected failure: {error:?}");
                    assert_eq!(self.fingerprint(), before, "call {index} left a trace");
                    self.check_bytes();
                }
            }
        }
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Grow { permille, zero_new, is_prepared } => {
                self.grow(permille, *zero_new, *is_prepared);
            }
            Step::Shrink { permille } => self.shrink(permille),
            Step::Write { buffer, segment, from_permille, value } => {
                self.write(*buffer, *segment, *from_permille, *value);
            }
            Step::View { buffer } => {
                let buffer = &self.buffers[buffer % self.buffers.len()];
                let committed = buffer.layout().segments()[0].prefix(buffer.size().expect("size"));
                self.views.push(buffer.view_committed(0, committed).expect("view"));
            }
            Step::DropView => drop((!self.views.is_empty()).then(|| self.views.remove(0))),
        }
        self.check_bytes();
    }

    fn grow(&mut self, permille: &[u64], zero_new: bool, is_prepared: bool) {
        let sizes: Vec<u64> = self
            .buffers
            .iter()
            .zip(&self.models)
            .zip(permille)
            .map(|((buffer, model), p)| (buffer.layout().max_size() * p / 1000).max(model.size))
            .collect();
        let targets: Vec<(&GrowableBuffer, u64)> =
            self.buffers.iter().zip(sizes.iter().copied()).collect();
        self.with_every_failure(|| {
            if is_prepared {
                prepare_together(&targets)?.commit(zero_new)
            } else {
                grow_together(&targets, zero_new)
            }
        });
        for ((buffer, model), size) in self.buffers.iter().zip(&mut self.models).zip(sizes) {
            for (segment, bytes) in buffer.layout().segments().iter().zip(&mut model.segments) {
                let old = bytes.len() as u64;
                let new_bytes =
                    self.device.read(buffer, segment.offset + old, segment.prefix(size) - old);
                assert!(!zero_new || new_bytes.iter().all(|byte| *byte == 0), "new bytes not zero");
                bytes.extend(new_bytes);
            }
            model.size = size;
        }
    }

    fn shrink(&mut self, permille: &[u64]) {
        let sizes: Vec<u64> =
            self.models.iter().zip(permille).map(|(model, p)| model.size * p / 1000).collect();
        let targets: Vec<(&GrowableBuffer, u64)> =
            self.buffers.iter().zip(sizes.iter().copied()).collect();
        self.with_every_failure(|| shrink_together(&targets, Fence::Device).map(|_| ()));
        for ((buffer, model), size) in self.buffers.iter().zip(&mut self.models).zip(sizes) {
            for (segment, bytes) in buffer.layout().segments().iter().zip(&mut model.segments) {
                bytes.truncate(usize::try_from(segment.prefix(size)).expect("prefix"));
            }
            model.size = size;
        }
    }

    fn write(&mut self, buffer: usize, segment: usize, from_permille: u64, value: u8) {
        let index = buffer % self.buffers.len();
        let (buffer, model) = (&self.buffers[index], &mut self.models[index]);
        let segment = segment % model.segments.len();
        let bytes = &mut model.segments[segment];
        let from = usize::try_from(bytes.len() as u64 * from_permille / 1000).expect("offset");
        bytes[from..].fill(value);
        let offset = buffer.layout().segments()[segment].offset + from as u64;
        self.device.write(buffer, offset, &bytes[from..]);
    }

    /// Frees everything with every failure, views last, and looks for leaks.
    fn finish(self) {
        let Self { device, buffers, views, .. } = self;
        for buffer in &buffers {
            for index in 0.. {
                let calls_before = device.checked.num_calls();
                device.checked.fail_nth(index);
                let result = buffer.free();
                let num_calls = device.checked.num_calls() - calls_before;
                device.checked.clear_faults();
                if result.is_ok() && num_calls <= index {
                    break;
                }
            }
        }
        drop(views);
        drop(buffers);
        device.assert_empty();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_failure_at_every_call_leaves_the_state_as_it_was(
        shapes in shapes(),
        steps in steps(),
    ) {
        let mut world = World::new(&shapes);
        for step in &steps {
            world.run(step);
        }
        world.finish();
    }

    #[test]
    fn a_driver_that_dies_for_good_never_panics(
        shapes in shapes(),
        steps in steps(),
        death in 0u64..60,
    ) {
        let world = World::new(&shapes);
        world.device.checked.fail_all_from(death);
        for step in &steps {
            let sizes = |permille: &[u64], world: &World| -> Vec<u64> {
                world.buffers.iter().zip(permille)
                    .map(|(buffer, p)| buffer.layout().max_size() * p / 1000)
                    .collect()
            };
            match step {
                Step::Grow { permille, zero_new, .. } => {
                    let sizes = sizes(permille, &world);
                    let targets: Vec<_> = world.buffers.iter().zip(sizes).collect();
                    let _ = grow_together(&targets, *zero_new);
                }
                Step::Shrink { permille } => {
                    let sizes = sizes(permille, &world);
                    let targets: Vec<_> = world.buffers.iter().zip(sizes).collect();
                    let _ = shrink_together(&targets, Fence::Device);
                }
                _ => {}
            }
        }
        drop(world);
    }
}
