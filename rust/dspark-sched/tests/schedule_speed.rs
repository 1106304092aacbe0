//! Time and memory of `schedule()` at 256 running requests. The timing is ignored by default:
//! `cargo test --release -p dspark-sched --test schedule_speed -- --ignored --nocapture`.

#![allow(clippy::unwrap_used, clippy::print_stdout)]
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod support;

use std::time::Instant;

use dspark_sched::{
    BlockSize, NewRequest, NumBlocks, NumTokens, RequestId, RequestResult, SchedulePlan, Scheduler,
    SchedulerConfig, TokenId,
};
use support::sampled;

const NUM_REQUESTS: u64 = 256;

/// 256 requests decoding after a prompt of 2,048 tokens each, in blocks of 16.
fn loaded(num_drafts: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: NUM_REQUESTS as u32,
        max_num_batched_tokens: NumTokens(8_192),
        max_model_len: NumTokens(4_096),
        vocab_size: 151_936,
        block_size: BlockSize::new(16).unwrap(),
        num_blocks: NumBlocks(65_536),
        num_speculative_tokens: NumTokens(num_drafts),
        num_lookahead_tokens: NumTokens(num_drafts),
        ..support::config()
    })
    .unwrap();
    for id in 0..NUM_REQUESTS {
        let prompt = (0..2_048).map(|index| (index * 31 + id as u32 * 977) % 151_936);
        let new = NewRequest::new(RequestId(id), support::tokens(prompt), NumTokens(2_000));
        scheduler.add_request(new).unwrap();
    }
    while scheduler.requests().any(|request| !request.is_decoding()) {
        advance(&mut scheduler, num_drafts);
    }
    scheduler
}

/// One step in which every sampled row gets one token; returns seconds of schedule, of update,
/// and of setting drafts.
fn advance(scheduler: &mut Scheduler, num_drafts: u32) -> [f64; 3] {
    let start = Instant::now();
    let plan: &SchedulePlan = scheduler.schedule().unwrap();
    let scheduled = start.elapsed();
    let token = [TokenId(11)];
    let sampled_ids: Vec<u64> = (0..plan.num_requests())
        .filter(|&row| plan.sample_start_loc[row] < plan.sample_start_loc[row + 1])
        .map(|row| plan.request_ids[row].0)
        .collect();
    let results: Vec<RequestResult<'_>> =
        sampled_ids.iter().map(|&id| sampled(id, &token)).collect();
    let start = Instant::now();
    scheduler.update(&results).unwrap();
    let updated = start.elapsed();
    let drafts = vec![Some(TokenId(12)); num_drafts as usize];
    let start = Instant::now();
    for &id in &sampled_ids {
        scheduler.set_drafts(RequestId(id), &drafts).unwrap();
    }
    [scheduled, updated, start.elapsed()].map(|time| time.as_secs_f64())
}

#[test]
fn schedule_reuses_its_buffers() {
    let mut scheduler = loaded(2);
    for _ in 0..40 {
        advance(&mut scheduler, 2); // fills new blocks, and so widens the block tables
    }
    let buffers = |plan: &SchedulePlan| {
        (
            [plan.input_token_ids.as_ptr(), plan.block_tables.as_ptr(), plan.sample_rows.as_ptr()],
            [plan.positions.as_ptr(), plan.slot_mapping.as_ptr()],
            plan.request_ids.as_ptr(),
        )
    };
    let before = buffers(scheduler.schedule().unwrap());
    scheduler.cancel_step().unwrap();
    let after = buffers(scheduler.schedule().unwrap());
    assert_eq!(before, after);
}

#[test]
#[ignore = "a timing; needs a release build and a quiet machine"]
fn schedule_takes_less_than_100_us_for_256_running_requests() {
    for num_drafts in [0, 7] {
        let mut scheduler = loaded(num_drafts);
        let mut samples: Vec<[f64; 3]> =
            (0..500).map(|_| advance(&mut scheduler, num_drafts)).collect();
        let mut report = [[0.0; 2]; 3];
        for (part, report) in report.iter_mut().enumerate() {
            samples.sort_by(|a, b| a[part].total_cmp(&b[part]));
            *report = [samples[250][part] * 1e6, samples[475][part] * 1e6];
        }
        println!(
            "256 running, context 2048-2548, block 16, {num_drafts} drafts (median, p95): \
             schedule {:.1}, {:.1} us; update {:.1}, {:.1} us; set_drafts {:.1}, {:.1} us",
            report[0][0], report[0][1], report[1][0], report[1][1], report[2][0], report[2][1],
        );
        assert!(report[0][0] < 100.0, "schedule() takes {} us", report[0][0]);
    }
}
