"""Statistics that engines send along. Fields that a wire profile lacks keep their default."""

from __future__ import annotations

from dataclasses import dataclass, field

from extkv.protocol.record import Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixCacheStats(Message):
    """Use of the prefix cache since the last report, in tokens."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCacheEvictionEvent(Message):
    """Life of one evicted block."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpecDecodingStats(Message):
    """Drafts since the last report."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CUDAGraphStat(Message):
    """The CUDA graph of one step."""

    num_unpadded_tokens: int
    num_padded_tokens: int
    num_paddings: int
    runtime_mode: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerIterationDetails(Message):
    """What one step did."""

    iteration_index: int
    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    num_encoder_inputs: int = 0
    num_encoder_output_tokens: int = 0
    is_dummy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DebugPerfStats(Message):
    """Parts of `PerfStats`."""

    calc_duration: float = 0.0
    num_prefill_requests: int = 0
    num_decode_requests: int = 0
    context_breakdown: dict[str, int] | None = None
    num_flops_per_gpu_breakdown: dict[str, int] | None = None
    num_read_bytes_per_gpu_breakdown: dict[str, int] | None = None
    num_write_bytes_per_gpu_breakdown: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerfStats(Message):
    """Estimated work of one step."""

    num_flops_per_gpu: int = 0
    num_read_bytes_per_gpu: int = 0
    num_write_bytes_per_gpu: int = 0
    debug_stats: DebugPerfStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerStats(Message):
    """State of the scheduler after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = field(default_factory=dict)
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: SchedulerIterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = field(default_factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, object] | None = None
    ec_connector_stats: dict[str, object] | None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: CUDAGraphStat | None = None
    perf_stats: PerfStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillStats(Message):
    """Where the tokens of a prompt came from."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSpecDecodeMetrics(Message):
    """Drafts of one request."""

    num_spec_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
