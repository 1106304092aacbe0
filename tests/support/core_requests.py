"""Requests for EngineCore tests."""

from __future__ import annotations

from extkv import protocol


def core_request(request_id: str = "r1", **fields: object) -> protocol.EngineCoreRequest:
    """Make a small request."""
    usual: dict[str, object] = {
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": protocol.SamplingParams(max_tokens=4),
        "pooling_params": None,
        "arrival_time": 1.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return protocol.EngineCoreRequest(request_id=request_id, **(usual | fields))
