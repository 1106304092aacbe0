//! Sizes before anything is loaded: the sums by hand, and what does not fit.

use extkv_core::kv::{Assumptions, Estimate, ModelFacts};

use super::*;

/// Qwen3-8B, bf16, on 141 GB.
fn qwen3_8b() -> ModelFacts {
    ModelFacts {
        device_total_bytes: 141_000_000_000,
        parameter_bytes: 16_381_470_720,
        encoder_cache_bytes: 0,
        cache: facts(),
        granule_bytes: 2 * MIB,
        max_model_len: 40_960,
        max_num_seqs: 256,
        gpu_memory_utilization: Utilization::FULL,
    }
}

#[test]
fn estimate_is_the_sum_by_hand() {
    let estimate = Estimate::new(&qwen3_8b(), Assumptions::default()).unwrap();
    let without_weights = 141_000_000_000 - 16_381_470_720;
    // Workspace, graphs and transient peak; reserve; one granule for each of 72 segments.
    let room = without_weights - 3 * GIB - 256 * MIB - 144 * MIB;
    assert_eq!(room, 120_977_873_408);
    assert_eq!(estimate.plan.blocks, NumBlocks(51_277));
    assert_eq!(estimate.plan.num_tokens, 820_432);
    assert_eq!(estimate.plan.blocks_per_request, 2_560);
    assert_eq!(estimate.plan.parts.total_bytes(), 141_000_000_000);
    assert_eq!(estimate.plan.parts.weights_bytes, 16_381_470_720);
    assert_eq!(estimate.plan.parts.graphs_bytes, GIB);
    assert_eq!(estimate.plan.parts.workspace_bytes, GIB);
    assert_eq!(estimate.plan.warnings, []);
}

#[test]
fn estimate_says_whether_all_sequences_fit_and_what_is_assumed() {
    let all = Estimate::new(&qwen3_8b(), Assumptions::default()).unwrap();
    assert!(!all.all_sequences_fit());
    let table = all.table();
    let needs = "max_num_seqs = 256 such requests need 655,360 blocks (1440.0 GiB): they do not \
                 all fit\n";
    assert!(table.contains(needs), "{table}");
    let assumed = "assumed, not measured: workspace 1.0, graphs 1.0, transient peak 1.0, reserve \
                   0.2 GiB\n";
    assert!(table.ends_with(assumed), "{table}");
    let few = ModelFacts { max_num_seqs: 20, ..qwen3_8b() };
    assert!(Estimate::new(&few, Assumptions::default()).unwrap().all_sequences_fit());
}

#[test]
fn estimate_holds_encoder_caches_apart_without_a_warning() {
    let facts = ModelFacts { encoder_cache_bytes: 4 * GIB, ..qwen3_8b() };
    let plan = Estimate::new(&facts, Assumptions::default()).unwrap().plan;
    assert_eq!((plan.parts.encoder_cache_bytes, plan.parts.workspace_bytes), (4 * GIB, GIB));
    assert_eq!(plan.warnings, []);
}

#[test]
fn rejects_a_model_that_is_larger_than_the_device() {
    let facts = ModelFacts { parameter_bytes: 140_000_000_000, ..qwen3_8b() };
    let error = Estimate::new(&facts, Assumptions::default()).unwrap_err();
    let needed = Bytes(140_000_000_000 + 2 * GIB);
    let total = Bytes(141_000_000_000);
    assert_eq!(error, SizingError::ModelTooLarge { needed, total });
    let facts = ModelFacts { parameter_bytes: u64::MAX, ..qwen3_8b() };
    let error = Estimate::new(&facts, Assumptions::default()).unwrap_err();
    assert_eq!(error, SizingError::ModelTooLarge { needed: Bytes(u64::MAX), total });
}

#[test]
fn rejects_an_estimate_that_holds_no_request() {
    let facts = ModelFacts { parameter_bytes: 136_000_000_000, ..qwen3_8b() };
    let error = Estimate::new(&facts, Assumptions::default()).unwrap_err();
    assert!(matches!(error, SizingError::TooSmallForOneRequest { needed: NumBlocks(2_560), .. }));
}

#[test]
fn facts_and_assumptions_are_read_from_json() {
    let facts: ModelFacts = serde_json::from_str(
        r#"{"device_total_bytes": 141000000000, "parameter_bytes": 16381470720,
            "cache": {"bytes_per_block": 2359296, "num_segments": 72, "block_size": 16},
            "granule_bytes": 2097152, "max_model_len": 40960, "max_num_seqs": 256,
            "gpu_memory_utilization": 1.0}"#,
    )
    .unwrap();
    assert_eq!(facts, qwen3_8b());
    let assumed: Assumptions = serde_json::from_str(r#"{"graphs_bytes": 5}"#).unwrap();
    assert_eq!(assumed, Assumptions { graphs_bytes: 5, ..Assumptions::default() });
    let estimate = Estimate::new(&facts, assumed).unwrap();
    let json = serde_json::to_value(&estimate).unwrap();
    assert_eq!(json["plan"]["blocks"], estimate.plan.blocks.0);
}

#[test]
fn json_in_gives_json_with_a_summary() {
    let facts = serde_json::to_string(&qwen3_8b()).unwrap();
    let estimate = Estimate::from_json(&facts, "{}").unwrap();
    assert_eq!(estimate, Estimate::new(&qwen3_8b(), Assumptions::default()).unwrap());
    let json: serde_json::Value = serde_json::from_str(&estimate.to_json().unwrap()).unwrap();
    assert_eq!(json["plan"]["blocks"], estimate.plan.blocks.0);
    assert_eq!(json["summary"]["bytes_per_token"], 147_456);
    assert_eq!(json["summary"]["all_sequences_fit"], estimate.all_sequences_fit());
    assert_eq!(json["summary"]["concurrency"], estimate.plan.concurrency());
    assert_eq!(json["assumptions"]["reserve_bytes"], 256_u64 << 20);
}

#[test]
fn rejects_json_that_is_no_facts_or_no_assumptions() {
    let facts = serde_json::to_string(&qwen3_8b()).unwrap();
    assert!(matches!(Estimate::from_json("{}", "{}"), Err(RecordError::Json(_))));
    assert!(matches!(Estimate::from_json(&facts, r#"{"x": 1}"#), Err(RecordError::Json(_))));
    let large = ModelFacts { parameter_bytes: u64::MAX, ..qwen3_8b() };
    let large = serde_json::to_string(&large).unwrap();
    assert!(matches!(
        Estimate::from_json(&large, "{}"),
        Err(RecordError::Sizing(SizingError::ModelTooLarge { .. }))
    ));
}
