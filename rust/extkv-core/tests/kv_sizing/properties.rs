//! The rules of sizing for any trace.

use super::*;

/// Starts that hang together: each phase takes something, a few are disturbed.
fn traces() -> impl Strategy<Value = Trace> {
    let takes = prop::collection::vec(0_u64..12 * GIB, 6);
    let cache = (1_u64..8 * MIB, 0_u64..300, 1_u64..65, 1_u64..3, 0_u64..5);
    let rest = (
        0_u64..3 * GIB,
        0_u64..GIB,
        0_u64..20 * GIB,
        0_u64..GIB,
        1_u32..=1_000_000,
        1_u64..200_000,
        0_u64..2 * GIB,
    );
    (takes, cache, rest).prop_map(|(takes, cache, rest)| {
        let (transient, reserve, foreign, encoder, millionths, reserved, drift) = rest;
        let order = [
            Phase::Start,
            Phase::WeightsLoaded,
            Phase::Profiled,
            Phase::Reserved,
            Phase::Captured,
            Phase::Measured,
        ];
        let mut now = free(140 * GIB);
        let mut phases = Vec::new();
        for (at, bytes) in order.into_iter().zip(&takes) {
            let before = now;
            now.driver_free_bytes -= bytes;
            if at != Phase::Captured {
                now.reserved_bytes += bytes;
                now.allocated_bytes += bytes / 2;
            }
            phases.push(phase(at, before, now));
            now.driver_free_bytes += drift;
        }
        Trace {
            device_total_bytes: 156 * GIB,
            phases,
            committed_bytes: takes[3] / 2,
            transient_peak_bytes: transient,
            reserve_bytes: reserve,
            foreign_bytes: foreign,
            encoder_cache_bytes: encoder,
            granule_bytes: 2 * MIB,
            cache: CacheFacts {
                bytes_per_block: cache.0,
                num_segments: cache.1,
                block_size: cache.2,
                num_block_tables: cache.3,
                fixed_blocks_per_request: cache.4,
            },
            reserved_blocks: Some(NumBlocks(reserved)),
            max_model_len: 4096,
            gpu_memory_utilization: Utilization::from_ratio(f64::from(millionths) / 1e6).unwrap(),
            kv_cache_memory_bytes: None,
            mode: SizingMode::Extensible,
        }
    })
}

/// Any numbers at all: a trace from an untrusted file.
fn wild_traces() -> impl Strategy<Value = Trace> {
    let number = || prop_oneof![0_u64..4, any::<u64>(), Just(u64::MAX)];
    let readings = prop::collection::vec((number(), number(), number()), 4);
    let numbers = prop::collection::vec(number(), 12);
    (readings, numbers, any::<bool>()).prop_map(|(readings, n, extensible)| {
        let at = |i: usize| held(readings[i].0, readings[i].1, readings[i].2);
        Trace {
            device_total_bytes: n[0],
            phases: vec![
                phase(Phase::Start, at(0), at(1)),
                phase(Phase::Captured, at(2), at(1)),
                phase(Phase::Measured, at(2), at(3)),
            ],
            committed_bytes: n[1],
            transient_peak_bytes: n[2],
            reserve_bytes: n[3],
            foreign_bytes: n[4],
            encoder_cache_bytes: n[5],
            granule_bytes: n[6],
            cache: CacheFacts {
                bytes_per_block: n[7],
                num_segments: n[8],
                block_size: n[9],
                num_block_tables: n[10],
                fixed_blocks_per_request: n[11],
            },
            reserved_blocks: Some(NumBlocks(n[11])),
            max_model_len: n[10],
            gpu_memory_utilization: Utilization::FULL,
            kv_cache_memory_bytes: (!extensible).then_some(n[5]),
            mode: if extensible { SizingMode::Extensible } else { SizingMode::Fixed },
        }
    })
}

fn blocks(trace: &Trace) -> u64 {
    SizingPlan::new(trace).map_or(0, |plan| plan.blocks.0)
}

proptest! {
    #[test]
    fn parts_sum_to_the_device(trace in traces()) {
        if let Ok(plan) = SizingPlan::new(&trace) {
            prop_assert_eq!(plan.parts.total_bytes(), trace.device_total_bytes);
            prop_assert_eq!(plan.parts.kv_bytes, plan.blocks.0 * trace.cache.bytes_per_block);
        }
    }

    #[test]
    fn blocks_are_within_every_bound(trace in traces()) {
        if let Ok(plan) = SizingPlan::new(&trace) {
            let measured = trace.reading(Phase::Measured).unwrap().after.driver_free_bytes;
            let taken = plan.parts.margin_bytes() + plan.parts.rounding_bytes;
            prop_assert!(plan.parts.kv_bytes + taken <= measured + trace.committed_bytes);
            prop_assert!(plan.blocks <= trace.reserved_blocks.unwrap());
            prop_assert!(plan.blocks.0 >= plan.blocks_per_request);
            let reservation = reservation_blocks(
                trace.device_total_bytes,
                trace.gpu_memory_utilization,
                trace.cache.bytes_per_block,
            );
            prop_assert!(plan.blocks <= reservation.unwrap());
        }
    }

    #[test]
    fn more_free_memory_never_means_fewer_blocks(trace in traces(), more in 0_u64..10 * GIB) {
        let mut freer = trace.clone();
        let last = freer.phases.last_mut().unwrap();
        last.after.driver_free_bytes += more;
        if last.after.driver_free_bytes + freer.committed_bytes <= freer.device_total_bytes {
            prop_assert!(blocks(&freer) >= blocks(&trace));
        }
    }

    #[test]
    fn a_larger_margin_never_means_more_blocks(trace in traces(), more in 0_u64..10 * GIB) {
        let mut careful = trace.clone();
        careful.reserve_bytes += more;
        prop_assert!(blocks(&careful) <= blocks(&trace));
        let mut worse = trace.clone();
        worse.transient_peak_bytes += more;
        prop_assert!(blocks(&worse) <= blocks(&trace));
    }

    #[test]
    fn the_longest_length_of_an_error_fits(trace in traces()) {
        let error = SizingPlan::new(&trace).err();
        if let Some(SizingError::TooSmallForOneRequest { longest, missing, limit, .. }) = error {
            prop_assert!(longest < trace.max_model_len && missing.0 > 0);
            let shorter = Trace { max_model_len: longest, ..trace.clone() };
            prop_assert!(longest == 0 || SizingPlan::new(&shorter).is_ok());
            let freed = trace.reserve_bytes.checked_sub(missing.0);
            if let (Limit::FreeMemory, Some(reserve_bytes)) = (limit, freed) {
                let freer = Trace { reserve_bytes, reserved_blocks: Some(NumBlocks(1 << 60)), ..trace };
                prop_assert!(SizingPlan::new(&freer).is_ok());
            }
        }
    }

    #[test]
    fn a_record_replays_to_the_same_plan(trace in traces()) {
        if let Ok(record) = SizingRecord::new(trace) {
            let again = SizingRecord::from_json(&record.to_json().unwrap()).unwrap();
            prop_assert_eq!(again.replay().unwrap(), record.plan.clone());
            prop_assert_eq!(again, record);
        }
    }

    #[test]
    fn ranks_agree_on_a_size_that_each_has(traces in prop::collection::vec(traces(), 1..5)) {
        let same = |mut trace: Trace| {
            trace.cache.block_size = 16;
            SizingPlan::new(&trace).ok()
        };
        let plans: Vec<SizingPlan> = traces.into_iter().filter_map(same).collect();
        if let Ok(agreed) = agree(&plans) {
            prop_assert_eq!(plans.iter().map(|plan| plan.blocks).min(), Some(agreed.blocks));
            prop_assert_eq!(plans[agreed.limiting_rank].blocks, agreed.blocks);
            for plan in &plans {
                let plan = plan.at_blocks(agreed.blocks, Limit::OtherRank).unwrap();
                prop_assert_eq!(plan.parts.total_bytes(), plan.device_total_bytes);
            }
        }
    }

    #[test]
    fn no_numbers_make_sizing_panic(trace in wild_traces(), free_now: u64, committed_now: u64) {
        if let Ok(plan) = SizingPlan::new(&trace) {
            prop_assert_eq!(plan.parts.total_bytes(), trace.device_total_bytes);
            prop_assert!(!plan.table().is_empty() && !plan.sentence().is_empty());
            let _ = plan.at_commit(free_now, committed_now);
        }
    }

    #[test]
    fn text_that_is_no_record_is_an_error(text in "\\PC{0,80}") {
        prop_assert!(SizingRecord::from_json(&text).is_err());
        prop_assert!(SizingRecord::from_trace_json(&text).is_err());
    }
}
