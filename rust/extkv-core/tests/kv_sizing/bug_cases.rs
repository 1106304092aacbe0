//! Public cases by number (`shared/cases/bug_cases.md`).

use super::*;

/// B76: one block committed, memory for 6,483: they were reserved from the start, and the second
/// size is inside the reservation.
#[test]
fn b76_reservation_holds_whatever_the_plan_finds() {
    let total = 6_483 * QWEN3_8B_BLOCK + 20 * GIB;
    let reserved = reservation_blocks(total, Utilization::FULL, QWEN3_8B_BLOCK).unwrap();
    assert!(reserved >= NumBlocks(6_483));
    let mut trace = bare(total, 6_482 * QWEN3_8B_BLOCK + 100);
    trace.committed_bytes = QWEN3_8B_BLOCK;
    trace.reserved_blocks = Some(reserved);
    assert_eq!(plan(&trace).blocks, NumBlocks(6_483));
    // A reservation that was too small is a bound, not an overrun.
    trace.reserved_blocks = Some(NumBlocks(6_000));
    let clamped = plan(&trace);
    assert_eq!((clamped.blocks, clamped.limit), (NumBlocks(6_000), Limit::Reservation));
    let (fitting, reserved) = (NumBlocks(6_483), NumBlocks(6_000));
    assert_eq!(clamped.warnings, [Warning::ClampedToReservation { fitting, reserved }]);
    assert_eq!(clamped.parts.total_bytes(), total);
}

/// B78: 40 GiB, graphs of 1.37 GiB, a buffer of 150 MiB: 17,514 blocks of 2,359,296 bytes.
#[test]
fn b78_blocks_after_graphs_and_buffer_are_exact() {
    assert_eq!(36 * 2 * 16 * 8 * 128 * 2, QWEN3_8B_BLOCK);
    // 1.37 GiB, rounded up to a byte.
    let graphs = (137 * GIB).div_ceil(100);
    let mut trace = bare(40 * GIB, 40 * GIB - graphs);
    let (before, after) = (free(40 * GIB), free(40 * GIB - graphs));
    trace.phases.insert(1, phase(Phase::Captured, before, after));
    trace.phases[0] = phase(Phase::Start, before, before);
    trace.reserve_bytes = 150 * MIB;
    trace.granule_bytes = 0;
    let exact = plan(&trace);
    assert_eq!((exact.blocks, exact.parts.graphs_bytes), (NumBlocks(17_514), graphs));
    // With 2 MiB granules, 72 segments may waste 144 MiB of it.
    trace.granule_bytes = 2 * MIB;
    assert_eq!(plan(&trace).blocks, NumBlocks(17_450));
}

/// B80: capture needs 3 GiB for a moment and keeps 0.3 GiB once caches are emptied.
#[test]
fn b80_only_what_capture_keeps_is_deducted() {
    let kept = 3 * GIB / 10;
    let after_capture = held(57 * GIB, 0, 3 * GIB - kept);
    let emptied = free(60 * GIB - kept);
    let mut trace = bare(80 * GIB, 60 * GIB - kept);
    trace.phases = vec![
        phase(Phase::Start, free(60 * GIB), free(60 * GIB)),
        phase(Phase::Captured, free(60 * GIB), after_capture),
        phase(Phase::Measured, emptied, emptied),
    ];
    let plan = plan(&trace);
    assert_eq!(plan.parts.graphs_bytes, kept);
    assert_eq!(plan.blocks, NumBlocks((60 * GIB - kept - 72) / QWEN3_8B_BLOCK));
    assert_eq!(plan.warnings, []);
}

/// vLLM issue 57936 and its kin: negative graph memory was added to the cache.
#[test]
fn negative_graph_memory_is_not_added() {
    let mut trace = healthy();
    let measured = trace.phases[5];
    let before = trace.phases[3].after.driver_free_bytes;
    trace.phases[4].before.driver_free_bytes = measured.before.driver_free_bytes - GIB;
    trace.phases[3].after.driver_free_bytes = measured.before.driver_free_bytes - GIB;
    let odd = plan(&trace);
    assert_eq!(odd.parts.graphs_bytes, 0);
    assert!(odd.warnings.contains(&Warning::NegativeGraphMemory { bytes: GIB }));
    // What was measured after capture is the same, so is the size.
    trace.phases[4].before.driver_free_bytes = before;
    assert_eq!(odd.blocks, plan(&trace).blocks);
}

/// B81: ranks with 2,111 and 2,055 blocks commit 2,055, before any of them commits.
#[test]
fn b81_ranks_agree_on_the_minimum() {
    let of = |blocks: u64| plan(&bare(80 * GIB, blocks * QWEN3_8B_BLOCK + 100));
    let plans = [of(2_111), of(2_055)];
    let agreed = agree(&plans).unwrap();
    assert_eq!(agreed, Agreement { blocks: NumBlocks(2_055), limiting_rank: 1 });
    let at = |plan: &SizingPlan| plan.at_blocks(agreed.blocks, Limit::OtherRank).unwrap();
    let [first, second] = [at(&plans[0]), at(&plans[1])];
    assert_eq!(first.parts.kv_bytes, second.parts.kv_bytes);
    assert_eq!((first.limit, second.limit), (Limit::OtherRank, Limit::FreeMemory));
    assert_eq!(first.num_tokens, 2_055 * 16);
    assert_eq!(first.parts.total_bytes(), 80 * GIB);
}

/// B82: free memory rises from 188.29 to 188.75 GiB during profiling.
#[test]
fn b82_free_memory_that_rises_is_a_warning() {
    let hundredths = |n: u64| n * GIB / 100;
    let mut trace = bare(192 * GIB, hundredths(18_875));
    let (start, later) = (free(hundredths(18_829)), free(hundredths(18_875)));
    trace.phases[0] = phase(Phase::Start, start, start);
    trace.phases.insert(1, phase(Phase::Profiled, start, later));
    trace.reserved_blocks = Some(NumBlocks(100_000));
    let plan = plan(&trace);
    let bytes = hundredths(18_875) - hundredths(18_829);
    assert_eq!(plan.warnings, [Warning::FreeRoseDuring { phase: Phase::Profiled, bytes }]);
    assert_eq!(plan.blocks, NumBlocks((hundredths(18_875) - 72) / QWEN3_8B_BLOCK));
    assert_eq!(plan.parts.total_bytes(), 192 * GIB);
}

/// B82, the opposite: 10 GiB are gone after profiling, and then more just before committing.
#[test]
fn b82_free_memory_that_falls_is_a_warning_and_checked_at_commit() {
    let start = free(188 * GIB);
    let later = free(178 * GIB);
    let mut trace = bare(192 * GIB, 178 * GIB);
    trace.phases[0] = phase(Phase::Start, start, start);
    trace.phases.insert(1, phase(Phase::Profiled, start, later));
    trace.foreign_bytes = 10 * GIB;
    trace.reserved_blocks = Some(NumBlocks(100_000));
    // The share is of what this process uses: the other process's 10 GiB do not count against it.
    trace.gpu_memory_utilization = Utilization::from_ratio(0.5).unwrap();
    let plan = plan(&trace);
    let bytes = 10 * GIB;
    assert_eq!(plan.warnings, [Warning::FreeFellDuring { phase: Phase::Profiled, bytes }]);
    assert_eq!(plan.parts.foreign_bytes, 10 * GIB);
    let own = 192 * GIB - 178 * GIB - 10 * GIB;
    assert_eq!(plan.blocks, NumBlocks((96 * GIB - own - 72) / QWEN3_8B_BLOCK));

    let same = plan.at_commit(178 * GIB, 0).unwrap();
    assert_eq!(same, plan);
    let fewer = plan.at_commit(50 * GIB, 0).unwrap();
    assert_eq!(fewer.blocks, NumBlocks((50 * GIB - 72) / QWEN3_8B_BLOCK));
    assert_eq!(fewer.parts.total_bytes(), 192 * GIB);
    let none = plan.at_commit(100 * MIB, 0).unwrap_err();
    let SizingError::TooSmallForOneRequest { longest, missing, .. } = none else {
        unreachable!("{none}")
    };
    assert_eq!(longest, 100 * MIB / QWEN3_8B_BLOCK * 16);
    assert_eq!(missing, Bytes(256 * QWEN3_8B_BLOCK + 72 - 100 * MIB));
}

/// B85: a size pinned to 95 % of free memory is refused if the engine needs more than the rest,
/// and warned about if it does not; both numbers are named.
#[test]
fn b85_pinned_size_near_free_memory_is_refused_or_warned_about() {
    let free_bytes = 60 * GIB + GIB / 2 + GIB;
    let pinned = free_bytes / 100 * 95;
    let mut trace = fixed(Some(pinned));
    trace.transient_peak_bytes = 5 * GIB;
    let error = refused(&trace);
    let available = Bytes(free_bytes - 4 * GIB - 400 * MIB);
    let (requested, free) = (Bytes(pinned), Bytes(free_bytes));
    assert_eq!(error, SizingError::ManualSizeTooLarge { requested, free, available });
    assert!(error.to_string().contains(&requested.to_string()), "{error}");
    assert!(error.to_string().contains(&free.to_string()), "{error}");

    trace.transient_peak_bytes = GIB;
    let near = plan(&trace);
    let (requested_bytes, near_free_bytes) = (pinned, free_bytes);
    let warning = Warning::ManualSizeNearFree { requested_bytes, free_bytes: near_free_bytes };
    assert_eq!(near.warnings, [warning]);
    assert_eq!((near.blocks.0, near.limit), (pinned / QWEN3_8B_BLOCK, Limit::ManualSize));
    let half = plan(&fixed(Some(free_bytes / 2)));
    assert_eq!(half.warnings, []);
    assert_eq!(half.parts.total_bytes(), 80 * GIB);
}

/// A pinned size is never made smaller, not even at the last moment.
#[test]
fn b85_pinned_size_that_no_longer_fits_at_commit_is_refused() {
    let pinned = plan(&fixed(Some(50 * GIB)));
    assert_eq!(pinned.at_commit(61 * GIB, 0).unwrap(), pinned);
    let exact = pinned.parts.kv_bytes + 400 * MIB;
    assert!(pinned.at_commit(exact, 0).is_ok() && pinned.at_commit(exact - 1, 0).is_err());
    let error = pinned.at_commit(40 * GIB, 0).unwrap_err();
    let requested = Bytes(50 * GIB / QWEN3_8B_BLOCK * QWEN3_8B_BLOCK);
    let (free, available) = (Bytes(40 * GIB), Bytes(40 * GIB - 400 * MIB));
    assert_eq!(error, SizingError::ManualSizeTooLarge { requested, free, available });
}

/// B85: with the growable cache there is one rule, and it is no clamp.
#[test]
fn b85_pinned_size_with_the_extensible_cache_is_an_error() {
    let trace = Trace { kv_cache_memory_bytes: Some(GIB), ..healthy() };
    let requested = Bytes(GIB);
    assert_eq!(refused(&trace), SizingError::ManualSizeWithExtensible { requested });
}
