//! Traces and records as JSON.

use super::*;

#[test]
fn a_record_is_read_back_as_it_was_written() {
    let record = SizingRecord::new(healthy()).unwrap();
    let text = record.to_json().unwrap();
    assert!(text.contains(&record.plan.sentence()));
    assert_eq!(SizingRecord::from_json(&text).unwrap(), record);
    assert_eq!(record.replay().unwrap(), record.plan);
}

#[test]
fn a_trace_in_json_may_leave_out_what_has_a_default() {
    let text = r#"{
        "device_total_bytes": 1000, "committed_bytes": 0, "transient_peak_bytes": 50,
        "reserve_bytes": 0, "foreign_bytes": 0, "encoder_cache_bytes": 0, "granule_bytes": 1,
        "phases": [
            {"phase": "start", "before": {"driver_free_bytes": 900},
             "after": {"driver_free_bytes": 900}},
            {"phase": "measured", "before": {"driver_free_bytes": 800},
             "after": {"driver_free_bytes": 800}}
        ],
        "cache": {"bytes_per_block": 10, "num_segments": 2, "block_size": 16},
        "reserved_blocks": 100, "max_model_len": 64, "gpu_memory_utilization": 0.92,
        "kv_cache_memory_bytes": null, "mode": "extensible"
    }"#;
    let record = SizingRecord::from_trace_json(text).unwrap();
    // 1000 × 0.92 − 200 used − 50 − 2, in blocks of 10.
    assert_eq!(record.plan.blocks, NumBlocks(66));
    assert_eq!(record.plan.limit, Limit::Utilization);
}

#[test]
fn rejects_records_that_are_not_what_they_say() {
    let text = SizingRecord::new(healthy()).unwrap().to_json().unwrap();
    let read = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        SizingRecord::from_json(&text.replace(from, to)).unwrap_err()
    };
    assert!(matches!(read("{", "["), RecordError::Json(_)));
    assert!(matches!(read("\"granule_bytes\"", "\"granul_bytes\""), RecordError::Json(_)));
    let unknown = read("\"reserve_bytes\": 268435456,\n    \"foreign", "\"x\": 1,\n    \"foreign");
    assert!(matches!(unknown, RecordError::Json(_)));
    let format = read("\"format\": 1", "\"format\": 2");
    assert!(matches!(format, RecordError::Format { found: 2, expected: 1 }));
    let blocks = plan(&healthy()).blocks;
    let changed = read(&format!("\"blocks\": {blocks}"), "\"blocks\": 99999");
    let (stored, replayed) = (NumBlocks(99_999), blocks);
    assert!(matches!(changed, RecordError::PlanDiffers { stored: s, replayed: r }
            if (s, r) == (stored, replayed)));
    let impossible = read("\"device_total_bytes\": 85899345920", "\"device_total_bytes\": 1");
    let source = RecordError::Sizing(SizingError::FreeExceedsTotal {
        phase: Phase::Start,
        free: Bytes(80 * GIB),
        total: Bytes(1),
    });
    assert_eq!(impossible.to_string(), source.to_string());
}

#[test]
fn adjustments_are_kept_and_replayed_in_order() {
    let sized = SizingRecord::new(healthy()).unwrap();
    let fewer = NumBlocks(sized.plan.blocks.0 - 100);
    let agreed = sized.clone().adjusted(Adjustment::OtherRank { blocks: fewer }).unwrap();
    assert_eq!((agreed.plan.blocks, agreed.plan.limit), (fewer, Limit::OtherRank));
    let parts = agreed.plan.parts;
    assert_eq!(parts.total_bytes(), 80 * GIB);
    let now = Adjustment::AtCommit { driver_free_bytes: 40 * GIB, committed_bytes: GIB };
    let checked = agreed.adjusted(now).unwrap();
    assert!(checked.plan.blocks < fewer);
    assert_eq!(checked.plan.limit, Limit::FreeMemory);
    let text = checked.to_json().unwrap();
    assert_eq!(SizingRecord::from_json(&text).unwrap(), checked);
    assert_eq!(checked.replay().unwrap(), checked.plan);
}

#[test]
fn a_record_without_adjustments_is_read() {
    let record = SizingRecord::new(healthy()).unwrap();
    let text = record.to_json().unwrap();
    let without = text.replace("\"adjustments\": [],\n", "");
    assert_ne!(text, without);
    assert_eq!(SizingRecord::from_json(&without).unwrap(), record);
}

#[test]
fn rejects_adjustments_that_cannot_be() {
    let record = SizingRecord::new(healthy()).unwrap();
    let blocks = record.plan.blocks;
    let requested = NumBlocks(blocks.0 + 1);
    let error = record.clone().adjusted(Adjustment::OtherRank { blocks: requested }).unwrap_err();
    assert_eq!(error, SizingError::AbovePlan { requested, blocks });
    let gone = Adjustment::AtCommit { driver_free_bytes: 0, committed_bytes: 0 };
    let error = record.clone().adjusted(gone).unwrap_err();
    assert!(matches!(error, SizingError::TooSmallForOneRequest { blocks: NumBlocks(0), .. }));
    let fewer = record.adjusted(Adjustment::OtherRank { blocks: NumBlocks(300) }).unwrap();
    let text = fewer.to_json().unwrap();
    let unknown = text.replace("other_rank", "other_planet");
    assert!(matches!(SizingRecord::from_json(&unknown), Err(RecordError::Json(_))));
    let changed = text.replace(
        "\"kind\": \"other_rank\",\n      \"blocks\": 300",
        "\"kind\": \"other_rank\",\n      \"blocks\": 301",
    );
    assert!(matches!(
        SizingRecord::from_json(&changed),
        Err(RecordError::PlanDiffers { stored: NumBlocks(300), replayed: NumBlocks(301) })
    ));
}

#[test]
fn facts_are_written_as_a_trace_holds_them() {
    let text = facts().to_json().unwrap();
    assert_eq!(serde_json::from_str::<CacheFacts>(&text).unwrap(), facts());
}
