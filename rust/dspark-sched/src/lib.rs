//! Pure decisions of an LLM engine: which requests run, on which blocks, with which drafts.
//!
//! No I/O, no clock, no random numbers: equal calls give equal results. Nothing here knows a
//! device, Python or torch.
//!
//! | layer | module | knows |
//! |---|---|---|
//! | scheduler | [`scheduler`], `schedule`, `update`, `resize`, `integrity` | queues, budgets, preemption, one step at a time |
//! | step data | [`plan`], [`output`], [`stats`] | flat arrays for the runner, results, counters |
//! | requests | [`request`], [`stop`], `request_table`, `slots`, `kv_blocks` | tokens, drafts, ends, stable batch rows, a request's blocks |
//! | blocks | [`block_pool`], [`prefix_cache`] | who holds a block, what it contains |
//! | speculation | [`controller`] | when to draft, with which budget; fallback and return |
//! | verify lengths | [`verify_plan`], [`survival_history`] | planners; survivals of earlier steps by slot |
//! | estimates | [`calibration`], [`estimator`], [`step_cost`] | temperatures, acceptance from features, time of a step |
//! | drafts | [`confidence`] | survival from confidences |
//! | values | [`ids`], [`config`], [`error`] | typed numbers, limits, every refusal as data |
//!
//! A module sees only those in its row and below.
//!
//! | DSpark paper | here |
//! |---|---|
//! | γ | [`SchedulerConfig::num_speculative_tokens`], `num_drafts` |
//! | c | confidence |
//! | a | [`survival()`] |
//! | ℓ | `verify_lens` |
//! | τ, Θ | [`verify_plan::Prediction`] |
//! | SPS(B) | [`step_cost::StepCost`], as its inverse |
//! | T_k | [`calibration::Temperatures`] |
//!
//! ```
//! use dspark_sched::*;
//!
//! # fn main() -> Result<()> {
//! let mut scheduler = Scheduler::new(SchedulerConfig {
//!     max_num_seqs: 8,
//!     max_num_batched_tokens: NumTokens(64),
//!     max_model_len: NumTokens(128),
//!     vocab_size: 100,
//!     block_size: BlockSize::new(16)?,
//!     num_blocks: NumBlocks(32),
//!     num_speculative_tokens: NumTokens(0),
//!     num_lookahead_tokens: NumTokens(0),
//!     policy: SchedulingPolicy::Fcfs,
//!     chunked_prefill: ChunkedPrefill::Enabled { long_prefill_token_threshold: None },
//!     enable_prefix_caching: true,
//! })?;
//! let prompt = vec![TokenId(5), TokenId(6), TokenId(7)];
//! scheduler.add_request(NewRequest::new(RequestId(1), prompt, NumTokens(1)))?;
//! assert_eq!(scheduler.schedule()?.input_token_ids, [5, 6, 7]);
//! let outcome = RowOutcome::Sampled(&[TokenId(8)]);
//! let output = scheduler.update(&[RequestResult { request_id: RequestId(1), outcome }])?;
//! assert_eq!(output.requests[0].finished, Some(FinishReason::Length.into()));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod calibration;
pub mod confidence;
pub mod config;
pub mod controller;
pub mod error;
pub mod estimator;
pub mod ids;
mod integrity;
mod kv_blocks;
pub mod output;
pub mod plan;
pub mod prefix_cache;
pub mod request;
mod request_table;
mod resize;
mod schedule;
pub mod scheduler;
mod slots;
pub mod stats;
pub mod step_cost;
pub mod stop;
pub mod survival_history;
mod update;
pub mod verify_plan;

pub use block_pool::BlockPool;
pub use confidence::survival;
pub use config::{ChunkedPrefill, SchedulerConfig, SchedulingPolicy};
pub use error::{Error, Result};
pub use ids::{
    BlockId, BlockSize, Generation, NumBlocks, NumTokens, RequestId, SlotId, StepId, TokenId,
};
pub use output::{RequestOutput, RequestResult, RowOutcome, StepOutput};
pub use plan::SchedulePlan;
pub use prefix_cache::{BlockHash, BlockHashFn, CacheKeys, default_block_hash};
pub use request::{Draft, NewRequest, Request, RequestStatus};
pub use scheduler::{DraftUse, Scheduler};
pub use stats::{PrefixCacheStats, SchedulerStats};
pub use stop::{FinishReason, Finished, Stopping};
