//! The scheduler, one call at a time.

use std::sync::{Mutex, MutexGuard};

use dspark_sched::{
    BlockSize, CacheKeys, ChunkedPrefill, DraftUse, Error, FinishReason, NewRequest, NumBlocks,
    NumTokens, RequestId, Scheduler, SchedulerConfig, SchedulingPolicy, Stopping, TokenId,
};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use super::args::{Arg, ArgumentError, Drafts, TokenIds};
use super::output::PyStepOutput;
use super::plan::PyPlan;
use super::results::FlatResults;
use super::stats::stats_dict;
use crate::error::{BindingError, BindingResult};

/// Continuous batching over a paged KV cache.
#[pyclass(frozen, name = "Scheduler", module = "extkv._extkv")]
pub(crate) struct PyScheduler {
    config: SchedulerConfig,
    inner: Mutex<Scheduler>,
}

impl PyScheduler {
    fn lock(&self, py: Python<'_>) -> BindingResult<MutexGuard<'_, Scheduler>> {
        let broken = |_| Error::Corrupt { rule: "every call returns", subject: 0 };
        Ok(self.inner.lock_py_attached(py).map_err(broken)?)
    }
}

#[pymethods]
impl PyScheduler {
    #[new]
    #[pyo3(signature = (
        *, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size, block_size, num_blocks,
        num_speculative_tokens, num_lookahead_tokens, policy, enable_chunked_prefill,
        long_prefill_token_threshold, enable_prefix_caching
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        max_num_seqs: Arg<u32>,
        max_num_batched_tokens: Arg<NumTokens>,
        max_model_len: Arg<NumTokens>,
        vocab_size: Arg<u32>,
        block_size: Arg<u32>,
        num_blocks: Arg<NumBlocks>,
        num_speculative_tokens: Arg<NumTokens>,
        num_lookahead_tokens: Arg<NumTokens>,
        policy: Arg<SchedulingPolicy>,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: Arg<NumTokens>,
        enable_prefix_caching: bool,
    ) -> BindingResult<Self> {
        let threshold = long_prefill_token_threshold.named("long_prefill_token_threshold")?;
        let config = SchedulerConfig {
            max_num_seqs: max_num_seqs.named("max_num_seqs")?,
            max_num_batched_tokens: max_num_batched_tokens.named("max_num_batched_tokens")?,
            max_model_len: max_model_len.named("max_model_len")?,
            vocab_size: vocab_size.named("vocab_size")?,
            block_size: BlockSize::new(block_size.named("block_size")?)?,
            num_blocks: num_blocks.named("num_blocks")?,
            num_speculative_tokens: num_speculative_tokens.named("num_speculative_tokens")?,
            num_lookahead_tokens: num_lookahead_tokens.named("num_lookahead_tokens")?,
            policy: policy.named("policy")?,
            chunked_prefill: chunked_prefill(enable_chunked_prefill, threshold),
            enable_prefix_caching,
        };
        let inner = Mutex::new(Scheduler::new(config.clone())?);
        Ok(Self { config, inner })
    }

    /// Queue a request.
    #[pyo3(signature = (
        request_id, prompt_token_ids, *, max_tokens, min_tokens, stop_token_ids, eos_token_id,
        ignore_eos, priority, cache_salt, extra_keys, skip_reading_prefix_cache
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn add_request(
        &self,
        py: Python<'_>,
        request_id: Arg<RequestId>,
        prompt_token_ids: Arg<TokenIds>,
        max_tokens: Arg<NumTokens>,
        min_tokens: Arg<NumTokens>,
        stop_token_ids: Arg<TokenIds>,
        eos_token_id: Arg<Option<TokenId>>,
        ignore_eos: bool,
        priority: Arg<i32>,
        cache_salt: Option<String>,
        extra_keys: Arg<Vec<u64>>,
        skip_reading_prefix_cache: bool,
    ) -> BindingResult<()> {
        let parse = || -> Result<NewRequest, ArgumentError> {
            let stopping = Stopping {
                max_tokens: max_tokens.named("max_tokens")?,
                min_tokens: min_tokens.named("min_tokens")?,
                stop_token_ids: stop_token_ids.named("stop_token_ids")?.0,
                eos_token_id: eos_token_id.named("eos_token_id")?,
                ignore_eos,
            };
            let extra_keys = extra_keys.named("extra_keys")?;
            Ok(NewRequest {
                request_id: request_id.named("request_id")?,
                prompt_token_ids: prompt_token_ids.named("prompt_token_ids")?.0,
                stopping,
                priority: priority.named("priority")?,
                cache_keys: CacheKeys { cache_salt, extra_keys },
                skip_reading_prefix_cache,
            })
        };
        let new = parse().map_err(BindingError::RequestArgument)?;
        self.lock(py)?.add_request(new).map_err(BindingError::Request)
    }

    /// Plan the next step.
    fn schedule(&self, py: Python<'_>) -> PyResult<PyPlan> {
        let mut scheduler = self.lock(py)?;
        PyPlan::copy(py, scheduler.schedule().map_err(BindingError::from)?)
    }

    /// End the step in flight with its results.
    fn update(
        &self,
        py: Python<'_>,
        request_ids: Arg<Vec<u64>>,
        token_offsets: Arg<Vec<u32>>,
        token_ids: Arg<TokenIds>,
        failed_request_ids: Arg<Vec<u64>>,
    ) -> PyResult<PyStepOutput> {
        let results = FlatResults::parse(request_ids, token_offsets, token_ids, failed_request_ids);
        let results = results.map_err(BindingError::from)?;
        let mut scheduler = self.lock(py)?;
        let output = scheduler.update(&results.results()).map_err(BindingError::from)?;
        PyStepOutput::copy(py, output)
    }

    /// Give the step in flight up.
    fn cancel_step(&self, py: Python<'_>) -> BindingResult<()> {
        Ok(self.lock(py)?.cancel_step()?)
    }

    /// Replace a request's drafts; whether its next step can verify them.
    fn set_drafts(
        &self,
        py: Python<'_>,
        request_id: Arg<RequestId>,
        drafts: Arg<Drafts>,
    ) -> BindingResult<bool> {
        let (request_id, drafts) = (request_id.named("request_id")?, drafts.named("drafts")?);
        Ok(self.lock(py)?.set_drafts(request_id, &drafts.0)? == DraftUse::Held)
    }

    /// End a request from outside.
    fn abort(&self, py: Python<'_>, request_id: Arg<RequestId>) -> BindingResult<()> {
        let request_id = request_id.named("request_id")?;
        self.lock(py)?.abort(request_id)?;
        Ok(())
    }

    /// End a request for a reason that the engine found.
    fn finish(
        &self,
        py: Python<'_>,
        request_id: Arg<RequestId>,
        reason: Arg<FinishReason>,
    ) -> BindingResult<()> {
        let (request_id, reason) = (request_id.named("request_id")?, reason.named("reason")?);
        self.lock(py)?.finish(request_id, reason)?;
        Ok(())
    }

    /// Add blocks to the pool.
    fn grow(&self, py: Python<'_>, num_blocks: Arg<NumBlocks>) -> BindingResult<()> {
        let num_blocks = num_blocks.named("num_blocks")?;
        Ok(self.lock(py)?.grow(num_blocks)?)
    }

    /// Remove the pool's last blocks, which must be free.
    fn shrink(&self, py: Python<'_>, num_blocks: Arg<NumBlocks>) -> BindingResult<()> {
        let num_blocks = num_blocks.named("num_blocks")?;
        Ok(self.lock(py)?.shrink(num_blocks)?)
    }

    /// Preempt the requests that hold a block at or past a number; how many.
    fn vacate(&self, py: Python<'_>, num_blocks: Arg<NumBlocks>) -> BindingResult<u32> {
        let num_blocks = num_blocks.named("num_blocks")?;
        Ok(self.lock(py)?.vacate(num_blocks)?)
    }

    /// Forget all cached prefixes.
    fn reset_prefix_cache(&self, py: Python<'_>) -> BindingResult<()> {
        Ok(self.lock(py)?.reset_prefix_cache()?)
    }

    /// Check everything that must hold between two calls.
    fn check_integrity(&self, py: Python<'_>) -> BindingResult<()> {
        Ok(self.lock(py)?.check_integrity()?)
    }

    /// Counters and gauges.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.lock(py)?.stats();
        stats_dict(py, &stats)
    }

    /// Whether any request is live.
    fn has_unfinished_requests(&self, py: Python<'_>) -> BindingResult<bool> {
        Ok(self.lock(py)?.has_unfinished_requests())
    }

    /// Number of the step in flight.
    fn step_in_flight(&self, py: Python<'_>) -> BindingResult<Option<u64>> {
        Ok(self.lock(py)?.step_in_flight().map(|step_id| step_id.0))
    }

    /// Blocks of the pool.
    fn num_blocks(&self, py: Python<'_>) -> BindingResult<u32> {
        Ok(self.lock(py)?.pool().num_blocks().0)
    }

    /// Most blocks that a request may need.
    fn num_blocks_needed(
        &self,
        num_prompt_tokens: Arg<NumTokens>,
        max_tokens: Arg<NumTokens>,
    ) -> BindingResult<u32> {
        let num_prompt_tokens = num_prompt_tokens.named("num_prompt_tokens")?;
        let max_tokens = max_tokens.named("max_tokens")?;
        Ok(self.config.num_blocks_needed(num_prompt_tokens, max_tokens).0)
    }

    /// Most requests of a draft batch in which each has all its drafts.
    #[getter]
    fn max_num_draft_requests(&self) -> u32 {
        self.config.max_num_draft_requests()
    }

    /// Most rows that a step samples.
    #[getter]
    fn max_num_sample_rows(&self) -> u32 {
        self.config.max_num_sample_rows()
    }

    /// Most blocks of one request.
    #[getter]
    fn max_num_blocks_per_request(&self) -> u32 {
        self.config.max_num_blocks_per_request().0
    }
}

/// A threshold of 0 is none, as in vLLM.
fn chunked_prefill(is_enabled: bool, threshold: NumTokens) -> ChunkedPrefill {
    if !is_enabled {
        return ChunkedPrefill::Disabled;
    }
    let long_prefill_token_threshold = Some(threshold).filter(|threshold| threshold.0 > 0);
    ChunkedPrefill::Enabled { long_prefill_token_threshold }
}
