"""Size a KV cache after everything else has taken its memory.

`SizeAfterCapture` is driven by an engine in this order: `weights_loaded`, `profile`, `reserve`,
`capture`, `measure`, `plan`, `commit`. It reads the driver's free memory at each step, so the size
follows from what is left and not from an estimate of what graphs will take; the plan explains every
byte, prints, and can be replayed from JSON on a machine without the device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from extkv import _extkv
from extkv.errors import InvalidArgumentError, SizingError, SizingOrderError
from extkv.kv.cache import KVCache
from extkv.kv.layout import plan_cache
from extkv.kv.probe import MemoryProbe, MemoryReading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from extkv.device import DeviceLike
    from extkv.kv.layout import Layer
    from extkv.kv.ranks import RankGroup

DEFAULT_RESERVE_BYTES = 256 << 20
_PHASES = ("start", "weights_loaded", "profiled", "reserved", "captured", "measured")


class Probe(Protocol):
    """How memory is read; `MemoryProbe` for real devices."""

    def total(self) -> int:
        """Bytes of the device."""

    def read(self) -> MemoryReading:
        """Read the driver and the allocator."""

    def empty_caches(self) -> None:
        """Give cached allocator memory back."""

    def reset_peak(self) -> None:
        """Let the peak count from now on."""

    def foreign_bytes(self) -> int:
        """Bytes of other processes."""


@dataclass(frozen=True)
class SizingPlan:
    """The size of a cache and where every byte of the device goes.

    Attributes:
        num_blocks: Blocks to commit.
        num_tokens: Tokens they hold.
        concurrency: Requests of `max_model_len` tokens that fit at once.
        max_model_len: Tokens of the longest request.
        bytes_per_block: Bytes of a block over all layers.
        limit: What bounds the size: ``free_memory``, ``utilization``, ``reservation``,
            ``manual_size`` or ``other_rank``.
        parts: Bytes by part (weights, graphs, kv, unused, ...); their sum is the device.
        warnings: What looked odd; none of it stopped the plan.
        table: The plan for people.
        sentence: The plan in one line.
        record: Trace and plan as JSON.
    """

    num_blocks: int
    num_tokens: int
    concurrency: float
    max_model_len: int
    bytes_per_block: int
    limit: str
    parts: dict[str, int]
    warnings: tuple[str, ...]
    table: str
    sentence: str
    record: str

    @classmethod
    def from_native(cls, native: tuple[str, str, str]) -> SizingPlan:
        """Take record, table and sentence as the native functions return them."""
        record, table, sentence = native
        read = json.loads(record)
        plan = read["plan"]
        return cls(
            num_blocks=plan["blocks"],
            num_tokens=plan["num_tokens"],
            concurrency=plan["blocks"] / plan["blocks_per_request"],
            max_model_len=plan["max_model_len"],
            bytes_per_block=plan["cache"]["bytes_per_block"],
            limit=plan["limit"],
            parts=dict(plan["parts"]),
            warnings=tuple(str(warning) for warning in plan["warnings"]),
            table=table,
            sentence=sentence,
            record=record,
        )

    @classmethod
    def from_trace(cls, trace: dict[str, Any]) -> SizingPlan:
        """Size from measurements.

        Raises:
            SizingError: If the trace contradicts itself or has no room.
            CacheTooSmallError: If one request of `max_model_len` does not fit; says the longest
                length that does and what to change.
        """
        return cls.from_native(_extkv.size_from_trace(json.dumps(trace)))

    @classmethod
    def from_json(cls, text: str) -> SizingPlan:
        """Read a record and size again from its trace, without a device.

        Raises:
            InvalidArgumentError: If it is no record, or its plan is not what its trace gives.
        """
        return cls.from_native(_extkv.replay_record(text))

    def to_json(self) -> str:
        """Return trace and plan as JSON, for a bug report or a replay."""
        return self.record

    def __str__(self) -> str:
        return self.table


class SizeAfterCapture:
    """The flow reserve, capture, measure, commit, for one rank.

    Args:
        layers: What the model caches.
        device: Where the cache lives.
        max_model_len: Tokens of the longest request.
        max_num_batched_tokens: Most tokens of one step.
        gpu_memory_utilization: Share of the device that this process may use.
        reserve_bytes: Left free on purpose, beside the measured transient peak.
        kv_cache_memory_bytes: Size set by hand; only with ``extensible=False``.
        extensible: False commits once, at the planned size, and needs no reservation.
        max_blocks: Blocks to reserve addresses for; None for as many as the device could hold.
        encoder_cache: ``(cache_size, embed_size, dtype)`` of a multimodal encoder cache, held at
            full size from `profile` on; a size of 0 holds none.
        ranks: The other ranks, if there are several.
        loaded_weight_bytes: Weights that are on the device already; the plan shows them as weights.
        probe: How memory is read.

    Raises:
        SizingError: If a size set by hand is given together with the extensible path.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        device: DeviceLike = None,
        max_model_len: int,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 1.0,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        kv_cache_memory_bytes: int | None = None,
        extensible: bool = True,
        max_blocks: int | None = None,
        encoder_cache: tuple[int, int, torch.dtype] | None = None,
        ranks: RankGroup | None = None,
        loaded_weight_bytes: int = 0,
        probe: Probe | None = None,
    ) -> None:
        if extensible and kv_cache_memory_bytes is not None:
            raise SizingError(
                f"kv_cache_memory_bytes = {kv_cache_memory_bytes} and the extensible cache exclude "
                "each other: leave it out to size from what is free, or set extensible=False"
            )
        self._device = device
        self._probe: Probe = MemoryProbe(device) if probe is None else probe
        self._ranks = ranks
        self._encoder_shape = encoder_cache
        self.encoder_cache: torch.Tensor | None = None
        self.cache: KVCache | None = None
        self._plan: SizingPlan | None = None
        self._layers = list(layers)
        self._phases: list[dict[str, Any]] = []
        self._transient_peak_bytes = 0
        total = self._probe.total()
        one = plan_cache(self._layers, max_blocks=1)
        if max_blocks is None:
            max_blocks = _extkv.reservation_blocks(
                total, gpu_memory_utilization, one.bytes_per_block
            )
        self._max_blocks = max_blocks
        self._facts = json.loads(one.facts_json(max_model_len, max_num_batched_tokens))
        self._settings = {
            "device_total_bytes": total,
            "reserve_bytes": reserve_bytes,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "mode": "extensible" if extensible else "fixed",
        }
        start = self._probe.read()
        # As if this had been made before they were loaded.
        start = replace(
            start,
            driver_free_bytes=min(total, start.driver_free_bytes + loaded_weight_bytes),
            allocated_bytes=max(0, start.allocated_bytes - loaded_weight_bytes),
            reserved_bytes=max(0, start.reserved_bytes - loaded_weight_bytes),
        )
        self._record("start", start, start)

    def weights_loaded(self, load: Callable[[], object] | None = None) -> None:
        """Run `load`, or say that the weights are on the device by now."""
        self._run("weights_loaded", load)

    def profile(self, step: Callable[[], object]) -> None:
        """Run one worst-case step with encoder caches held, before anything is captured."""
        if self._encoder_shape is not None and self.encoder_cache is None:
            self.encoder_cache = self._hold_encoder_cache(*self._encoder_shape)
        self._run("profiled", step)

    def reserve(self, num_warmup_blocks: int = 1) -> KVCache:
        """Reserve the cache and commit the blocks that warm-up and capture write to.

        With several ranks all commit the same number.

        Raises:
            OutOfMemoryError: If memory for those blocks is not there.
            RankError: If ranks cannot agree.
        """
        before = self._probe.read()
        if self._settings["mode"] == "fixed":
            raise SizingOrderError("reserve needs extensible=True: a fixed cache is made by commit")
        plan = plan_cache(self._layers, max_blocks=self._max_blocks)
        self.cache = KVCache.reserve(plan, device=self._device)
        num_blocks = max(1, min(num_warmup_blocks, self._max_blocks))
        if self._ranks is not None:
            num_blocks = self._ranks.minimum_blocks(num_blocks)
        self.cache.commit(num_blocks)
        self._record("reserved", before, self._probe.read())
        return self.cache

    def capture(self, capture: Callable[[], object]) -> None:
        """Warm up and capture every graph, of target and drafter."""
        self._run("captured", capture)

    def measure(self, step: Callable[[], object]) -> None:
        """Empty caches, run the worst real step, and read what it takes and what is left."""
        self._probe.empty_caches()
        self._probe.reset_peak()
        before = self._probe.read()
        step()
        after = self._probe.read()
        rise = after.peak_allocated_bytes - before.allocated_bytes
        self._transient_peak_bytes = max(0, rise)
        self._record("measured", before, after)

    def trace(self) -> dict[str, Any]:
        """Return everything that was measured and set: the input of the plan.

        Raises:
            SizingOrderError: If `measure` was not called.
        """
        if not self._phases or self._phases[-1]["phase"] != "measured":
            raise SizingOrderError("measure comes before plan")
        stats = None if self.cache is None else self.cache.stats()
        granule = self._granule()
        encoder = self.encoder_cache
        return {
            **self._settings,
            "phases": self._phases,
            "committed_bytes": 0 if stats is None else stats.committed_bytes,
            "transient_peak_bytes": self._transient_peak_bytes,
            "foreign_bytes": self._probe.foreign_bytes(),
            "encoder_cache_bytes": 0 if encoder is None else encoder.nbytes,
            "granule_bytes": granule,
            "cache": self._facts,
            "reserved_blocks": None if stats is None else stats.capacity_blocks,
        }

    def plan(self) -> SizingPlan:
        """Size the cache; with several ranks the smallest of their sizes.

        Raises:
            CacheTooSmallError: If one request of `max_model_len` does not fit.
            RankError: If ranks cannot agree, or one of them has no plan.
        """
        try:
            own = SizingPlan.from_trace(self.trace())
        except SizingError as error:
            if self._ranks is not None:
                self._ranks.share_failure("minimum", error)
            raise
        if self._ranks is not None:
            agreed = self._ranks.minimum_blocks(own.num_blocks)
            own = SizingPlan.from_native(_extkv.limit_record(own.record, agreed))
        self._plan = own
        return own

    def commit(self) -> KVCache:
        """Commit the planned blocks and return the cache.

        Looks at free memory once more: if some is gone since, fewer blocks are committed (on all
        ranks), as long as one request still fits.

        Raises:
            OutOfMemoryError: If the device is too full; the cache has its old size.
            RankError: If a rank failed; every rank keeps its old size.
        """
        plan = self._plan or self.plan()
        committed = 0 if self.cache is None else self.cache.stats().committed_bytes
        free = self._probe.read().driver_free_bytes
        checked = SizingPlan.from_native(_extkv.check_commit(plan.record, free, committed))
        num_blocks = checked.num_blocks
        if self._ranks is not None:
            num_blocks = self._ranks.minimum_blocks(num_blocks)
        if num_blocks < plan.num_blocks:
            checked = SizingPlan.from_native(_extkv.limit_record(plan.record, num_blocks))
        self._plan = checked
        if self.cache is None:
            fixed = plan_cache(self._layers, max_blocks=num_blocks)
            self.cache = KVCache.reserve(fixed, device=self._device, extensible=False)
        elif self._ranks is not None:
            self._ranks.commit(self.cache, num_blocks)
        else:
            self.cache.commit(num_blocks)
        return self.cache

    def _granule(self) -> int:
        if self.cache is not None:
            return self.cache.stats().buffers[0].granularity
        from extkv.device import open_device, resolve_device

        return open_device(*resolve_device(self._device)).granularity

    def _hold_encoder_cache(
        self, cache_size: int, embed_size: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        import torch

        if cache_size < 0 or embed_size < 0:
            raise InvalidArgumentError(
                f"an encoder cache of {cache_size} x {embed_size} has a negative size"
            )
        if cache_size == 0 or embed_size == 0:
            return None
        return torch.zeros(cache_size, embed_size, dtype=dtype, device=self._torch_device())

    def _torch_device(self) -> torch.device:
        import torch

        from extkv.device import resolve_device

        kind, index = resolve_device(self._device)
        return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index)

    def _run(self, phase: str, work: Callable[[], object] | None) -> None:
        before = MemoryReading(**self._phases[-1]["after"]) if work is None else self._probe.read()
        if work is not None:
            work()
        self._record(phase, before, self._probe.read())

    def _record(self, phase: str, before: MemoryReading, after: MemoryReading) -> None:
        last = self._phases[-1]["phase"] if self._phases else None
        if last is not None and _PHASES.index(phase) <= _PHASES.index(last):
            raise SizingOrderError(f"{phase} cannot come after {last}")
        self._phases.append({"phase": phase, "before": asdict(before), "after": asdict(after)})
