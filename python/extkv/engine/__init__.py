"""Engine: one sequence, greedy decoding, a KV cache that grows with the text."""

from extkv.engine.greedy import GenerationResult, NonFiniteLogitsError, generate, stream_token_ids
from extkv.engine.growing_cache import DEFAULT_BLOCK_SIZE, GrowingKVCache

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "GenerationResult",
    "GrowingKVCache",
    "NonFiniteLogitsError",
    "generate",
    "stream_token_ids",
]
