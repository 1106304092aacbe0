"""Start-up, utility and coordinator messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from extkv.protocol.record import Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandshakeMessage(Message):
    """HELLO and READY, engine to front end."""

    status: Literal["HELLO", "READY"]
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineZmqAddresses(Message):
    """Where an engine finds its peers."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineHandshakeMetadata(Message):
    """INIT, front end to engine."""

    addresses: EngineZmqAddresses
    parallel_config: dict[str, int | str | list[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVEventsConfig(Message):
    """How an engine publishes its KV cache events."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineCoreReadyResponse(Message):
    """What an engine tells each client once its model is loaded.

    Fields are None where an older engine left them out; encoding for a profile that requires one
    needs its value.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str | None = None
    vllm_version: str | None = None
    world_size: int | None = None
    data_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    instance_id: str | None = None
    supports_lora: bool | None = None
    max_loras: int | None = None
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: KVEventsConfig | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UtilityCall(Message):
    """Call a method of the engine. `call_id` may be up to 2**64 - 1."""

    client_index: int
    call_id: int
    method: str
    args: list[object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartDpWave(Message):
    """Coordinator to engines: run this wave.

    `exclude` is the index of the engine that does not need it, None, or a socket identity, which
    vLLM 0.32 sends and no engine takes for its own.
    """

    wave: int
    exclude: int | bytes | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineLoad(Message):
    """How much one engine has to do."""

    num_waiting: int
    num_running: int
    kv_cache_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoordinatorNews(Message):
    """Coordinator to front ends; `loads` is None if only the wave changed."""

    loads: list[EngineLoad] | None
    wave: int
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstRequest(Message):
    """Front end to coordinator: a request was sent while the engines were paused."""

    exclude: int | bytes | None
    wave: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleElasticEp(Message):
    """Front end to coordinator: the number of engines changes."""

    num_engines: int
