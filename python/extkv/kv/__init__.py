"""KV cache: what layers cache, where the bytes lie, and how many blocks fit.

Importing it imports no torch.
"""

from extkv.kv.cache import CacheStats, KVCache, PreparedCommit, Region
from extkv.kv.estimate import DeviceSize, EngineSettings, ModelEstimate, estimate_model
from extkv.kv.layout import CachePlan, Layer, Layout, hybrid_layers, plan_cache
from extkv.kv.probe import MemoryProbe, MemoryReading
from extkv.kv.ranks import RankGroup
from extkv.kv.sizing import SizeAfterCapture, SizingPlan
from extkv.kv.spec import (
    FullAttentionSpec,
    KVSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
    common_block_bytes,
)

__all__ = [
    "CachePlan",
    "CacheStats",
    "DeviceSize",
    "EngineSettings",
    "FullAttentionSpec",
    "KVCache",
    "KVSpec",
    "Layer",
    "Layout",
    "MLASpec",
    "MambaSpec",
    "MemoryProbe",
    "MemoryReading",
    "ModelEstimate",
    "PreparedCommit",
    "RankGroup",
    "Region",
    "SizeAfterCapture",
    "SizingPlan",
    "SlidingWindowSpec",
    "StateSpec",
    "common_block_bytes",
    "estimate_model",
    "hybrid_layers",
    "plan_cache",
]
