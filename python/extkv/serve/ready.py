"""What an engine tells its clients of itself."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extkv.engine.llm import LLM

# The vLLM release whose wire each profile is, as clients are told it.
VERSION_OF_PROFILE = {
    "0.25": "0.25.1+extkv",
    "0.26": "0.26.0+extkv",
    "0.32": "0.32.0+extkv",
    "0.33": "0.33.0+extkv",
}


def ready_response(llm: LLM, *, profile: str, rank: int, num_engines: int) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineCoreReadyResponse` for a started engine.

    Args:
        llm: The engine.
        profile: Wire profile.
        rank: The engine's index.
        num_engines: Number of engines behind the front end.
    """
    config = llm.config
    num_blocks = llm.engine.scheduler.num_blocks
    num_tokens = num_blocks * config.block_size
    return {
        "max_model_len": config.max_model_len,
        "num_gpu_blocks": num_blocks,
        "block_size": config.block_size,
        "dp_stats_address": None,
        "dtype": str(llm.model.model.dtype).removeprefix("torch."),
        "vllm_version": VERSION_OF_PROFILE[profile],
        "world_size": 1,
        "data_parallel_size": num_engines,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": rank,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "instance_id": uuid.uuid4().hex,
        "supports_lora": False,
        "max_loras": 0,
        "kv_cache_size_tokens": num_tokens,
        "kv_cache_max_concurrency": num_blocks / config.max_blocks_per_seq,
    }
