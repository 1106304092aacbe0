//! What each part, warning and line of a plan means.

use super::*;

#[test]
fn every_byte_of_a_healthy_start_is_explained() {
    let plan = plan(&healthy());
    let parts = plan.parts;
    assert_eq!(parts.total_bytes(), 80 * GIB);
    assert_eq!((parts.weights_bytes, parts.graphs_bytes), (15 * GIB, 3 * GIB / 2));
    // Context, libraries and the step's memory that the allocator keeps.
    assert_eq!(parts.workspace_bytes, 2 * GIB);
    assert_eq!((parts.transient_bytes, parts.reserve_bytes), (0, 256 * MIB));
    assert_eq!(parts.rounding_bytes, 144 * MIB);
    let room = 60 * GIB + GIB / 2 + GIB - 256 * MIB - 144 * MIB;
    assert_eq!(plan.blocks, NumBlocks(room / QWEN3_8B_BLOCK));
    assert_eq!(parts.kv_bytes, plan.blocks.0 * QWEN3_8B_BLOCK);
    assert_eq!(parts.unused_bytes, room % QWEN3_8B_BLOCK);
    assert_eq!((plan.num_tokens, plan.blocks_per_request), (plan.blocks.0 * 16, 256));
    assert_eq!((plan.limit, plan.warnings.as_slice()), (Limit::FreeMemory, [].as_slice()));
}

/// The example sentence of the design.
#[test]
fn sentence_says_what_takes_which_bytes() {
    let gib = |tenths: u64| tenths * GIB / 10;
    let mut trace = bare(gib(708), gib(534));
    let loaded = held(gib(553), gib(151), gib(151));
    let captured = held(gib(534), gib(151), gib(151));
    trace.phases = vec![
        phase(Phase::Start, free(gib(708)), free(gib(704))),
        phase(Phase::WeightsLoaded, free(gib(704)), loaded),
        phase(Phase::Captured, loaded, captured),
        phase(Phase::Measured, captured, captured),
    ];
    trace.transient_peak_bytes = gib(6);
    trace.reserve_bytes = gib(5);
    trace.cache.bytes_per_block = 13_434_000;
    assert_eq!(
        plan(&trace).sentence(),
        "weights 15.1, graphs 1.9, workspace 0.4, margin 1.1, KV 52.3 GiB = 4,180 blocks = \
         66,880 tokens, 16.3 × max_model_len"
    );
}

#[test]
fn table_has_a_line_per_part_and_warnings_at_the_end() {
    let mut trace = healthy();
    trace.foreign_bytes = GIB;
    trace.reserved_blocks = Some(NumBlocks(20_000));
    let table = plan(&trace).table();
    let expected = "\
other processes       1.0 GiB    1.2 %
weights              15.0 GiB   18.8 %
graphs                1.5 GiB    1.9 %
encoder cache         0.0 GiB    0.0 %
workspace             1.0 GiB    1.2 %
transient peak        0.0 GiB    0.0 %
reserve               0.2 GiB    0.3 %
rounding              0.1 GiB    0.2 %
KV cache             43.9 GiB   54.9 %
unused               17.2 GiB   21.5 %
device               80.0 GiB  100.0 %

20,000 blocks of 16 tokens and 2,359,296 bytes = 320,000 tokens (147,456 bytes per token)
78.1 requests of max_model_len = 4,096 tokens (256 blocks each) fit at once
not more blocks because of the reservation
warning: 27811 blocks fit, the reservation holds 20000
";
    assert_eq!(table, expected);
}

#[test]
fn free_memory_that_moves_between_phases_is_a_warning() {
    let mut trace = bare(80 * GIB, 60 * GIB);
    trace.phases[0].after = free(61 * GIB);
    trace.phases[0].before = free(61 * GIB);
    let (phase, bytes) = (Phase::Measured, GIB);
    assert_eq!(plan(&trace).warnings, [Warning::FreeFellBefore { phase, bytes }]);
    trace.phases[0].after = free(59 * GIB);
    trace.phases[0].before = free(59 * GIB);
    assert_eq!(plan(&trace).warnings, [Warning::FreeRoseBefore { phase, bytes }]);
    // What the allocator gave back is no drift.
    trace.phases[0].after.reserved_bytes = GIB;
    trace.phases[0].before.reserved_bytes = GIB;
    assert_eq!(plan(&trace).warnings, []);
}

#[test]
fn allocators_cached_bytes_are_counted_once() {
    let keeps = healthy();
    let mut gives_back = healthy();
    let measured = gives_back.phases.last_mut().unwrap();
    measured.after = measured.before;
    let (keeps, gives_back) = (plan(&keeps), plan(&gives_back));
    assert_eq!((keeps.parts.transient_bytes, gives_back.parts.transient_bytes), (0, GIB));
    assert_eq!(keeps.blocks, gives_back.blocks);
    assert_eq!(keeps.parts.workspace_bytes, gives_back.parts.workspace_bytes + GIB);
}

#[test]
fn bytes_cached_before_measuring_are_not_trusted_for_the_transient_peak() {
    let mut trace = healthy();
    let measured = trace.phases.last_mut().unwrap();
    // 4 GiB in a graph's private pool: held before and after, and of no use to an eager step.
    measured.before.reserved_bytes += 4 * GIB;
    measured.after.reserved_bytes = measured.before.reserved_bytes;
    assert_eq!(plan(&trace).parts.transient_bytes, GIB);
}

#[test]
fn tensors_that_a_step_leaves_alive_do_not_cover_the_transient_peak() {
    let mut trace = healthy();
    let measured = trace.phases.last_mut().unwrap();
    measured.after.allocated_bytes = measured.before.allocated_bytes + GIB;
    assert_eq!(plan(&trace).parts.transient_bytes, GIB);
}

#[test]
fn an_allocator_peak_above_the_stated_one_is_a_warning() {
    let mut trace = healthy();
    let measured = trace.phases.last_mut().unwrap();
    measured.after.peak_allocated_bytes = measured.before.allocated_bytes + 2 * GIB;
    let (stated_bytes, seen_bytes) = (GIB, 2 * GIB);
    let warning = Warning::PeakAboveTransient { stated_bytes, seen_bytes };
    let odd = plan(&trace);
    assert_eq!(odd.warnings, [warning]);
    assert_eq!(odd.blocks, plan(&healthy()).blocks);
    assert!(warning.to_string().contains("rose by 2 GiB while measuring, 1 GiB are stated"));
}

#[test]
fn weights_outside_an_allocator_are_the_fall_of_free_memory() {
    let mut trace = healthy();
    for reading in &mut trace.phases {
        for at in [&mut reading.before, &mut reading.after] {
            (at.allocated_bytes, at.reserved_bytes) = (0, 0);
        }
    }
    assert_eq!(plan(&trace).parts.weights_bytes, 15 * GIB);
}

#[test]
fn encoder_cache_is_a_part_of_its_own() {
    let bytes = encoder_cache_bytes(8_192, 4_096, BFloat16).unwrap();
    assert_eq!(bytes, 64 * MIB);
    assert_eq!(encoder_cache_bytes(0, 4_096, BFloat16), Ok(0));
    assert!(encoder_cache_bytes(u64::MAX, 4_096, BFloat16).is_err());
    let plain = plan(&healthy());
    let with = plan(&Trace { encoder_cache_bytes: bytes, ..healthy() });
    assert_eq!(with.parts.encoder_cache_bytes, bytes);
    assert_eq!(with.parts.workspace_bytes, plain.parts.workspace_bytes - bytes);
    assert_eq!(with.blocks, plain.blocks);
}

#[test]
fn utilization_bounds_what_this_process_uses() {
    let mut trace = healthy();
    trace.gpu_memory_utilization = Utilization::from_ratio(0.75).unwrap();
    let capped = plan(&trace);
    let own = 80 * GIB - 60 * GIB - GIB / 2 - GIB;
    let room = 60 * GIB - own - 256 * MIB - 144 * MIB;
    assert_eq!((capped.blocks.0, capped.limit), (room / QWEN3_8B_BLOCK, Limit::Utilization));
    assert!(capped.parts.unused_bytes >= 20 * GIB);
    trace.foreign_bytes = 2 * GIB;
    assert_eq!(plan(&trace).blocks.0, (room + 2 * GIB) / QWEN3_8B_BLOCK);
}

#[test]
fn parts_measured_too_large_are_trimmed_and_said() {
    let mut trace = healthy();
    trace.foreign_bytes = 50 * GIB;
    let plan = plan(&trace);
    let used = 80 * GIB - 60 * GIB - GIB / 2 - GIB;
    assert_eq!(plan.parts.foreign_bytes, used);
    assert_eq!((plan.parts.weights_bytes, plan.parts.workspace_bytes), (0, 0));
    let trimmed = |part, measured_bytes, counted_bytes| Warning::PartTrimmed {
        part,
        measured_bytes,
        counted_bytes,
    };
    assert!(plan.warnings.contains(&trimmed(MeasuredPart::Foreign, 50 * GIB, used)));
    assert!(plan.warnings.contains(&trimmed(MeasuredPart::Weights, 15 * GIB, 0)));
    assert_eq!(plan.parts.total_bytes(), 80 * GIB);
}

#[test]
fn every_warning_says_its_numbers() {
    let (phase, bytes) = (Phase::Profiled, 3 * GIB);
    let (fitting, reserved) = (NumBlocks(5), NumBlocks(4));
    let part = MeasuredPart::Graphs;
    let warnings = [
        Warning::FreeRoseDuring { phase, bytes },
        Warning::FreeFellDuring { phase, bytes },
        Warning::FreeRoseBefore { phase, bytes },
        Warning::FreeFellBefore { phase, bytes },
        Warning::NegativeGraphMemory { bytes },
        Warning::ManualSizeNearFree { requested_bytes: bytes, free_bytes: bytes },
        Warning::PartTrimmed { part, measured_bytes: bytes, counted_bytes: 0 },
    ];
    for warning in warnings {
        assert!(warning.to_string().contains("3 GiB"), "{warning}");
    }
    let clamped = Warning::ClampedToReservation { fitting, reserved };
    assert_eq!(clamped.to_string(), "5 blocks fit, the reservation holds 4");
}

#[test]
fn recurrent_and_pooled_layers_change_what_a_request_needs() {
    let pooled = CacheFacts { num_block_tables: 2, fixed_blocks_per_request: 3, ..facts() };
    assert_eq!(pooled.blocks_per_request(4096), Ok(515));
    assert_eq!(pooled.longest_request(NumBlocks(515), 5_000), 4_096);
    assert_eq!(pooled.longest_request(NumBlocks(514), 5_000), 4_080);
    assert_eq!(pooled.longest_request(NumBlocks(2), 5_000), 0);
    assert_eq!(pooled.num_tokens(NumBlocks(515)), 257 * 16);
    let recurrent = CacheFacts { num_block_tables: 0, fixed_blocks_per_request: 4, ..facts() };
    assert_eq!(recurrent.blocks_per_request(1 << 40), Ok(4));
    assert_eq!(recurrent.longest_request(NumBlocks(4), 5_000), 5_000);
    let plan = plan(&Trace { cache: pooled, ..healthy() });
    assert!((plan.concurrency() - plan.blocks.0 as f64 / 515.0).abs() < 1e-9);
    let overflow = CacheFacts { block_size: 1, num_block_tables: 2, ..facts() };
    let what = "blocks per request";
    assert_eq!(overflow.blocks_per_request(u64::MAX), Err(SizingError::Overflow { what }));
}
