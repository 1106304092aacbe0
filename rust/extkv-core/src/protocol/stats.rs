//! Statistics that engines send along: of the scheduler, its caches, and prefills.

use super::codec::{Map, Untyped};

wire_map! {
    /// Use of the prefix cache since the last report.
    pub struct PrefixCacheStats {
        /// Whether the cache was emptied.
        reset: bool [or false];
        /// Requests that looked.
        requests: i64 [or 0];
        /// Tokens looked for.
        queries: i64 [or 0];
        /// Tokens found.
        hits: i64 [or 0];
        /// Preempted requests that looked again.
        preempted_requests: i64 [or 0];
        /// Tokens they looked for.
        preempted_queries: i64 [or 0];
        /// Tokens they found.
        preempted_hits: i64 [or 0];
        /// Tokens found by source.
        hits_by_source: Map<String, i64> [or Map::default(), since V0_32];
    }
}

wire_map! {
    /// Life of one evicted block.
    pub struct KvCacheEvictionEvent {
        /// From allocation to eviction.
        lifetime_seconds: f64 [required];
        /// From the last use to eviction.
        idle_seconds: f64 [required];
        /// Times between uses.
        reuse_gaps_seconds: Vec<f64> [required];
    }
}

wire_map! {
    /// Drafts since the last report.
    pub struct SpecDecodingStats {
        /// Tokens of a draft.
        num_spec_tokens: i64 [required];
        /// Drafts made.
        num_drafts: i64 [or 0];
        /// Tokens drafted.
        num_draft_tokens: i64 [or 0];
        /// Tokens accepted.
        num_accepted_tokens: i64 [or 0];
        /// Tokens accepted by position.
        num_accepted_tokens_per_pos: Vec<i64> [or Vec::new()];
        /// Tokens drafted by position.
        num_draft_tokens_per_pos: Vec<i64> [or Vec::new()];
    }
}

wire_map! {
    /// The CUDA graph of one step.
    pub struct CudaGraphStat {
        /// Tokens scheduled.
        num_unpadded_tokens: i64 [required];
        /// Tokens computed.
        num_padded_tokens: i64 [required];
        /// The difference.
        num_paddings: i64 [required];
        /// Mode of the graph.
        runtime_mode: String [required];
    }
}

wire_map! {
    /// What one step did.
    pub struct SchedulerIterationDetails {
        /// Number of the step.
        iteration_index: i64 [required];
        /// Requests in prefill.
        num_ctx_requests: i64 [required];
        /// Their tokens.
        num_ctx_tokens: i64 [required];
        /// Requests in decode.
        num_generation_requests: i64 [required];
        /// Their tokens.
        num_generation_tokens: i64 [required];
        /// Duration of the step.
        elapsed_ms: f64 [required];
        /// Inputs encoded.
        num_encoder_inputs: i64 [or 0];
        /// Tokens that encoders made.
        num_encoder_output_tokens: i64 [or 0];
        /// Whether the step kept other ranks company.
        is_dummy: bool [or false];
    }
}

wire_map! {
    /// Parts of [`PerfStats`].
    pub struct DebugPerfStats {
        /// Time spent on these figures.
        calc_duration: f64 [or 0.0];
        /// Requests in prefill.
        num_prefill_requests: i64 [or 0];
        /// Requests in decode.
        num_decode_requests: i64 [or 0];
        /// Context lengths by kind.
        context_breakdown: Option<Map<String, i64>> [or None];
        /// Operations by part.
        num_flops_per_gpu_breakdown: Option<Map<String, i64>> [or None];
        /// Bytes read by part.
        num_read_bytes_per_gpu_breakdown: Option<Map<String, i64>> [or None];
        /// Bytes written by part.
        num_write_bytes_per_gpu_breakdown: Option<Map<String, i64>> [or None];
    }
}

wire_map! {
    /// Estimated work of one step.
    pub struct PerfStats {
        /// Floating point operations.
        num_flops_per_gpu: i64 [or 0];
        /// Bytes read.
        num_read_bytes_per_gpu: i64 [or 0];
        /// Bytes written.
        num_write_bytes_per_gpu: i64 [or 0];
        /// Their parts.
        debug_stats: Option<DebugPerfStats> [or None];
    }
}

wire_map! {
    /// State of the scheduler after a step.
    pub struct SchedulerStats {
        /// Running requests.
        num_running_reqs: i64 [or 0];
        /// Waiting requests.
        num_waiting_reqs: i64 [or 0];
        /// Waiting requests that were passed over.
        num_skipped_waiting_reqs: i64 [or 0];
        /// Requests that fetch KV data, by stage.
        num_kv_fetch_reqs_by_stage: Map<String, i64> [or Map::default(), since V0_32];
        /// Steps of this data-parallel wave.
        step_counter: i64 [or 0];
        /// The data-parallel wave.
        current_wave: i64 [or 0];
        /// Used part of the KV cache.
        kv_cache_usage: f64 [or 0.0];
        /// What the step did.
        iteration_details: Option<SchedulerIterationDetails> [or None, since V0_26];
        /// Use of the prefix cache.
        prefix_cache_stats: PrefixCacheStats [or PrefixCacheStats::default()];
        /// Use of the connector's prefix cache.
        connector_prefix_cache_stats: Option<PrefixCacheStats> [or None];
        /// Blocks evicted.
        kv_cache_eviction_events: Vec<KvCacheEvictionEvent> [or Vec::new()];
        /// Speculative decoding.
        spec_decoding_stats: Option<SpecDecodingStats> [or None];
        /// The KV connector's own map.
        kv_connector_stats: Option<Untyped> [or None];
        /// The encoder-cache connector's own map.
        ec_connector_stats: Option<Untyped> [or None, since V0_32];
        /// Waiting requests by adapter.
        waiting_lora_adapters: Map<String, i64> [or Map::default()];
        /// Running requests by adapter.
        running_lora_adapters: Map<String, i64> [or Map::default()];
        /// The CUDA graph of the step.
        cudagraph_stats: Option<CudaGraphStat> [or None];
        /// Estimated work of the step.
        perf_stats: Option<PerfStats> [or None];
    }
}

wire_map! {
    /// Where the tokens of a prompt came from.
    pub struct PrefillStats {
        /// Tokens of the prompt.
        num_prompt_tokens: i64 [or 0];
        /// Tokens computed.
        num_computed_tokens: i64 [or 0];
        /// Tokens from a cache.
        num_cached_tokens: i64 [or 0];
        /// Of them, from this engine's cache.
        num_local_cached_tokens: i64 [or 0];
        /// Of them, from a connector.
        num_external_cached_tokens: i64 [or 0];
        /// Tokens that were added to a cache.
        num_cache_creation_tokens: i64 [or 0, since V0_26];
    }
}

wire_map! {
    /// Drafts of one request.
    pub struct RequestSpecDecodeMetrics {
        /// Tokens of a draft.
        num_spec_tokens: i64 [required];
        /// Steps by number of accepted tokens.
        histogram: Vec<i64> [or Vec::new()];
        /// Tokens drafted.
        num_draft_tokens: i64 [or 0];
        /// Tokens accepted in each step.
        per_step_accepted: Vec<i64> [or Vec::new()];
        /// Tokens drafted in each step.
        per_step_drafted: Vec<i64> [or Vec::new()];
    }
}
