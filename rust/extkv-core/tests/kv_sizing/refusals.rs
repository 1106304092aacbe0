//! Every reason not to give a size, and what the message tells to change.

use super::*;

fn too_small(trace: &Trace) -> (SizingError, NumBlocks, u64, Bytes, Limit) {
    match refused(trace) {
        error @ SizingError::TooSmallForOneRequest { blocks, longest, missing, limit, .. } => {
            (error, blocks, longest, missing, limit)
        }
        other => unreachable!("{other}"),
    }
}

/// The text names the longest length that fits and what to change; doing either helps.
#[test]
fn too_little_for_one_request_says_what_to_change() {
    let mut trace = bare(80 * GIB, 100 * QWEN3_8B_BLOCK + 72);
    let (error, blocks, longest, missing, limit) = too_small(&trace);
    assert_eq!((blocks, longest), (NumBlocks(100), 1_600));
    assert_eq!((missing, limit), (Bytes(156 * QWEN3_8B_BLOCK), Limit::FreeMemory));
    assert_eq!(
        error.to_string(),
        "one request of max_model_len = 4096 tokens needs 256 blocks and 100 fit: the longest \
         request that fits has 1600 tokens; lower max_model_len to that, or free 351 MiB on the \
         device (fewer sequences or captured graphs, smaller batches, fewer other processes)"
    );
    trace.max_model_len = longest;
    assert_eq!(plan(&trace).blocks, NumBlocks(100));
    let freed = bare(80 * GIB, 100 * QWEN3_8B_BLOCK + 72 + missing.0);
    assert_eq!(plan(&freed).blocks, NumBlocks(256));
}

#[test]
fn exactly_one_request_is_enough_and_a_block_less_is_not() {
    let of = |blocks: u64| bare(80 * GIB, blocks * QWEN3_8B_BLOCK + 72);
    assert_eq!(plan(&of(256)).blocks, NumBlocks(256));
    assert!((plan(&of(256)).concurrency() - 1.0).abs() < 1e-9);
    let (_, blocks, longest, missing, _) = too_small(&of(255));
    assert_eq!((blocks, longest), (NumBlocks(255), 4_080));
    assert_eq!(missing, Bytes(QWEN3_8B_BLOCK));
}

#[test]
fn too_little_counts_a_margin_that_exceeds_free_memory() {
    let mut trace = bare(80 * GIB, GIB);
    trace.reserve_bytes = 3 * GIB;
    let (_, blocks, longest, missing, _) = too_small(&trace);
    assert_eq!((blocks, longest), (NumBlocks(0), 0));
    assert_eq!(missing, Bytes(256 * QWEN3_8B_BLOCK + 2 * GIB + 72));
}

#[test]
fn too_little_names_the_limit_that_binds() {
    let utilization =
        Trace { gpu_memory_utilization: Utilization::from_ratio(0.235).unwrap(), ..healthy() };
    let (error, .., limit) = too_small(&utilization);
    assert_eq!(limit, Limit::Utilization);
    assert!(error.to_string().contains("raise gpu_memory_utilization so that"), "{error}");

    let reservation = Trace { reserved_blocks: Some(NumBlocks(1)), ..healthy() };
    let (error, _, _, missing, limit) = too_small(&reservation);
    assert_eq!((missing, limit), (Bytes(255 * QWEN3_8B_BLOCK), Limit::Reservation));
    assert!(error.to_string().contains("reserve 573.7 MiB"), "{error}");

    let (error, _, _, missing, limit) = too_small(&fixed(Some(10 * QWEN3_8B_BLOCK)));
    assert_eq!((missing, limit), (Bytes(246 * QWEN3_8B_BLOCK), Limit::ManualSize));
    assert!(error.to_string().contains("raise kv_cache_memory_bytes by"), "{error}");
    assert!(Limit::OtherRank.remedy(missing).contains("rank"));
}

#[test]
fn rejects_numbers_that_must_not_be_zero() {
    let zero = |field| SizingError::ZeroField { field };
    let with = |change: fn(&mut Trace)| {
        let mut trace = healthy();
        change(&mut trace);
        refused(&trace)
    };
    assert_eq!(with(|t| t.device_total_bytes = 0), zero("device_total_bytes"));
    assert_eq!(with(|t| t.cache.bytes_per_block = 0), zero("bytes_per_block"));
    assert_eq!(with(|t| t.cache.block_size = 0), zero("block_size"));
    assert_eq!(with(|t| t.cache.num_block_tables = 0), zero("num_block_tables"));
    assert_eq!(with(|t| t.max_model_len = 0), zero("max_model_len"));
    assert_eq!(with(|t| t.reserved_blocks = Some(NumBlocks(0))), zero("reserved_blocks"));
    assert_eq!(refused(&fixed(Some(0))), zero("kv_cache_memory_bytes"));
    let error = reservation_blocks(GIB, Utilization::FULL, 0).unwrap_err();
    assert_eq!(error, zero("bytes_per_block"));
}

#[test]
fn rejects_a_utilization_that_is_no_share() {
    for ratio in [0.0, -0.5, 1.000_001, f64::INFINITY, 4e-7] {
        assert_eq!(Utilization::from_ratio(ratio), Err(SizingError::Utilization { ratio }));
    }
    assert!(Utilization::from_ratio(f64::NAN).is_err());
    assert_eq!(Utilization::from_ratio(1.0), Ok(Utilization::FULL));
    assert_eq!(Utilization::from_ratio(0.92).unwrap().of(100 * GIB), 92 * GIB);
    assert_eq!(Utilization::FULL.of(u64::MAX), u64::MAX);
}

#[test]
fn rejects_missing_and_disordered_phases() {
    for (index, missing) in [(0, Phase::Start), (5, Phase::Measured)] {
        let mut trace = healthy();
        trace.phases.remove(index);
        assert_eq!(refused(&trace), SizingError::MissingPhase { phase: missing });
    }
    let mut trace = healthy();
    trace.phases.swap(1, 2);
    let (phase, after) = (Phase::WeightsLoaded, Phase::Profiled);
    assert_eq!(refused(&trace), SizingError::PhaseOrder { phase, after });
    let mut trace = healthy();
    trace.phases[1] = trace.phases[0];
    let (phase, after) = (Phase::Start, Phase::Start);
    assert_eq!(refused(&trace), SizingError::PhaseOrder { phase, after });
}

#[test]
fn rejects_more_memory_than_the_device_has() {
    let mut trace = healthy();
    trace.phases[2].after.driver_free_bytes = 81 * GIB;
    let (phase, free, total) = (Phase::Profiled, Bytes(81 * GIB), Bytes(80 * GIB));
    assert_eq!(refused(&trace), SizingError::FreeExceedsTotal { phase, free, total });
    for bytes in [20 * GIB, u64::MAX] {
        let trace = Trace { committed_bytes: bytes, ..healthy() };
        let (committed, free) = (Bytes(bytes), Bytes(60 * GIB + GIB / 2));
        assert_eq!(refused(&trace), SizingError::CommittedExceedsTotal { committed, free, total });
    }
}

#[test]
fn rejects_an_extensible_cache_without_a_reservation() {
    let trace = Trace { reserved_blocks: None, ..healthy() };
    assert_eq!(refused(&trace), SizingError::NoReservation);
}

#[test]
fn rejects_rounding_that_overflows() {
    let trace = Trace { granule_bytes: u64::MAX, ..healthy() };
    let what = "rounding to granules";
    assert_eq!(refused(&trace), SizingError::Overflow { what });
}

#[test]
fn rejects_ranks_that_cannot_agree() {
    assert_eq!(agree(&[]), Err(SizingError::NoRanks));
    let first = plan(&healthy());
    let mut second = first.clone();
    second.max_model_len = 8192;
    let (rank, field, expected, found) = (1, "max_model_len", 4096, 8192);
    let error = SizingError::RanksDiffer { rank, field, expected, found };
    assert_eq!(agree(&[first.clone(), second]), Err(error));
    let more = NumBlocks(first.blocks.0 + 1);
    let error = first.at_blocks(more, Limit::OtherRank).unwrap_err();
    let (requested, blocks) = (more, first.blocks);
    assert_eq!(error, SizingError::AbovePlan { requested, blocks });
}
