"""What an engine is told once: limits, sizes, and which memory path it takes."""

from __future__ import annotations

from dataclasses import dataclass

from extkv.errors import InvalidArgumentError

DEFAULT_BLOCK_SIZE = 16
# Memory of a cache on the host, where nothing else bounds it: what the sequences can use, up to
# this.
HOST_CACHE_BYTES = 4 << 30
# Batch sizes of decode graphs are multiples of this above it, powers of two below.
GRAPH_BATCH_STEP = 8


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine; names and meanings are vLLM's.

    Attributes:
        max_model_len: Most tokens of one sequence, prompt and output.
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Most tokens of one step.
        block_size: Tokens per block.
        gpu_memory_utilization: Share of the device that the engine may use.
        enable_extensible_kv_cache: Reserve the cache before graphs are captured and size it after;
            False commits one fixed size.
        kv_cache_memory_bytes: Size of a fixed cache set by hand.
        num_gpu_blocks_override: Commit this many blocks at start-up, if they fit, instead of all.
        enable_prefix_caching: Reuse blocks of equal prefixes.
        enforce_eager: Capture no graphs.
        async_scheduling: Do the host's work on a step's tokens while the device computes the next
            step; None for yes on CUDA.
        seed: Seeds requests that have no seed of their own.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = DEFAULT_BLOCK_SIZE
    gpu_memory_utilization: float = 1.0
    enable_extensible_kv_cache: bool = True
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what the parts below do not check themselves."""
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}, expected at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, expected (0, 1]"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, which is less than "
                f"max_num_seqs = {self.max_num_seqs}: each running sequence decodes one token a "
                "step"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def graph_batch_sizes(self) -> list[int]:
        """Batch sizes to capture decode graphs for: 1, 2, 4, then multiples of 8."""
        sizes = {size for size in (1, 2, 4) if size <= self.max_num_seqs}
        sizes.update(range(GRAPH_BATCH_STEP, self.max_num_seqs + 1, GRAPH_BATCH_STEP))
        sizes.add(self.max_num_seqs)
        return sorted(sizes)

    def graph_token_sizes(self, max_query_len: int) -> list[int]:
        """Numbers of tokens to capture graphs of drafts' windows for.

        2, 4, then steps of 8 up to 128, and from there steps of a sixteenth to an eighth.
        """
        most = self.max_num_seqs * max_query_len
        sizes, size, step = {2, 4, most}, GRAPH_BATCH_STEP, GRAPH_BATCH_STEP
        while size < most:
            sizes.add(size)
            if size >= 16 * step:
                step *= 2
            size += step
        return sorted(size for size in sizes if size <= most)
