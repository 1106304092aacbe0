"""A KV cache whose tensors have their final shape from the start and their memory later.

`KVCache.reserve` takes address space for the most blocks there can ever be and commits one; the
tensors it hands out never move, so graphs captured over them stay valid while `commit`, `grow` and
`shrink` change how many blocks are backed. All buffers change as one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv import _extkv
from extkv.device import checked_size, open_device, resolve_device
from extkv.errors import CapacityError, FreedError, GrowOnlyError, InvalidArgumentError
from extkv.kv.layout import CachePlan, Layer, plan_cache
from extkv.stats import MemoryStats

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Literal

    import torch
    from typing_extensions import Self

    from extkv.device import DeviceLike
    from extkv.kv.layout import Layout
    from extkv.kv.spec import KVSpec

_UINT8 = (1, 8, 1)  # DLPack code, bits, lanes


@dataclass(frozen=True)
class Region:
    """Committed bytes of one segment, as an RDMA library registers them.

    Attributes:
        layers: Names of the layers that lie in the buffer.
        segment: Index of the segment within the buffer.
        address: First byte.
        num_bytes: Committed bytes.
        num_handles: Physical handles behind them; libraries that register each want few.
    """

    layers: tuple[str, ...]
    segment: int
    address: int
    num_bytes: int
    num_handles: int


@dataclass(frozen=True)
class CacheStats:
    """Memory of a cache at one moment, over all buffers.

    Attributes:
        num_blocks: Blocks committed.
        capacity_blocks: Blocks reserved.
        bytes_per_block: Bytes of a block over all buffers.
        reserved_bytes: Address space.
        committed_bytes: Physical memory mapped.
        logical_bytes: Bytes of the committed blocks.
        rounding_bytes: Physical bytes past them.
        num_handles: Physical handles.
        num_views: Live tensors.
        buffers: Statistics of each buffer.
    """

    num_blocks: int
    capacity_blocks: int
    bytes_per_block: int
    reserved_bytes: int
    committed_bytes: int
    logical_bytes: int
    rounding_bytes: int
    num_handles: int
    num_views: int
    buffers: tuple[MemoryStats, ...]


class PreparedCommit:
    """Physical memory created for a growth that is not mapped yet; see `KVCache.prepare`."""

    def __init__(self, native: _extkv.PreparedGrowth, num_blocks: int) -> None:
        self._native = native
        self.num_blocks = num_blocks

    def commit(self) -> None:
        """Map the memory, zero the new blocks, and publish them. Works once.

        Raises:
            StaleGrowthError: If the cache changed since; everything is released.
            DriverError: If a driver call fails; everything is released, the cache is as before.
        """
        self._native.commit(True)

    def release(self) -> None:
        """Give the memory back without mapping it. Does nothing the second time."""
        self._native.release()


class KVCache:
    """Blocks of all layers of a model, reserved once and committed as memory allows.

    Make one with `reserve`. Any thread may call.
    """

    def __init__(
        self,
        plan: CachePlan,
        buffers: Sequence[_extkv.Buffer],
        device: tuple[str, int],
        *,
        extensible: bool,
    ) -> None:
        self._plan = plan
        self._buffers = list(buffers)
        self._kind, self._index = device
        self._extensible = extensible

    @classmethod
    def reserve(
        cls,
        specs: Mapping[str, KVSpec] | Sequence[Layer] | CachePlan,
        layouts: Mapping[str, Layout] | None = None,
        *,
        max_blocks: int | None = None,
        max_bytes: int | None = None,
        device: DeviceLike = None,
        extensible: bool = True,
        max_chunk_bytes: int | None = None,
        granularity: int | None = None,
        shareable: Literal["auto", "posix_fd", "none"] = "auto",
        gpu_direct_rdma: Literal["auto", "on", "off"] = "auto",
    ) -> KVCache:
        """Reserve address space for the most blocks there can ever be, and commit one block.

        Args:
            specs: What each layer caches: specs by layer name, a list of `Layer`, or a plan.
            layouts: Layout of a layer by its name, with specs by name; a missing one is the spec's
                usual layout.
            max_blocks: Most blocks, or
            max_bytes: most bytes over all layers; exactly one of the two unless `specs` is a plan.
            device: As for `ExtensibleTensor`.
            extensible: False commits all `max_blocks` at once and refuses to change them.
            max_chunk_bytes: Largest physical handle, as for `ExtensibleTensor`.
            granularity: Bytes per granule, on the host only.
            shareable: As for `ExtensibleTensor`.
            gpu_direct_rdma: As for `ExtensibleTensor`.

        Raises:
            LayoutError: If a layout does not tile, aliases, or does not fit its spec.
            InvalidArgumentError: If neither or both sizes are given, or a size is 0.
            OutOfMemoryError: If addresses, or memory for the first block (all blocks if not
                extensible), are not there; nothing is held.
        """
        plan = _plan_of(specs, layouts, max_blocks, max_bytes)
        kind, index = resolve_device(device)
        native = open_device(
            kind,
            index,
            granularity=granularity,
            shareable=shareable,
            gpu_direct_rdma=gpu_direct_rdma,
        )
        buffers = [
            _extkv.Buffer.unequal(
                native,
                [(capacity, per_block) for _, capacity, per_block in segments],
                max_chunk_bytes=max_chunk_bytes,
                is_exact=True,
            )
            for _, segments, _ in plan.buffers()
        ]
        cache = cls(plan, buffers, (kind, index), extensible=extensible)
        try:
            cache._grow(1 if extensible else plan.max_blocks)
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def plan(self) -> CachePlan:
        """Which buffer, segment and stride each layer has."""
        return self._plan

    @property
    def num_blocks(self) -> int:
        """Blocks that are committed: ids ``[0, num_blocks)`` may be used. 0 once closed."""
        return self._buffers[0].size()

    @property
    def capacity_blocks(self) -> int:
        """Blocks that are reserved, which is the block dimension of every tensor."""
        return self._plan.max_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self._plan.bytes_per_block

    @property
    def is_extensible(self) -> bool:
        """Whether the number of blocks can change."""
        return self._extensible

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        import torch

        return torch.device("cpu") if self._kind == "cpu" else torch.device("cuda", self._index)

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._buffers[0].is_freed()

    def tensors(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return each layer's tensor with its final shape and strides, over all reserved blocks.

        Recurrent layers have a list of state tensors, block dimension first. Blocks past
        `num_blocks` must not be touched. The cost does not depend on the number of blocks. Tensors
        keep the memory alive: `close` gives it back when the last one dies.

        Raises:
            FreedError: If the cache was closed.
        """
        flat = [self._flat(buffer) for buffer in self._buffers]
        named: dict[str, torch.Tensor | list[torch.Tensor]] = {}
        for name, buffer, parts in self._plan.layers():
            views = [_strided(flat[buffer], part[1:]) for part in parts]
            is_state = len(views) > 1 or bool(parts[0][0])
            named[name] = views if is_state else views[0]
        return named

    def commit(self, num_blocks: int) -> None:
        """Back blocks ``[0, num_blocks)``, all buffers or none.

        New blocks read zero on every stream when the call returns; old blocks keep their bytes.
        Kernels that run meanwhile are not waited for.

        Args:
            num_blocks: New number of blocks, not less than now.

        Raises:
            CapacityError: If that is more than reserved, or the cache is not extensible.
            GrowOnlyError: If that is less than now; `shrink` gives blocks back.
            OutOfMemoryError: If the device is too full; nothing changed.
            FreedError: If the cache was closed.
        """
        self._check_growth(num_blocks)
        self._grow(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` while serving; the same as `commit`."""
        self.commit(num_blocks)

    def prepare(self, num_blocks: int) -> PreparedCommit:
        """Create the memory of a growth and map none of it, so that ranks can agree in between.

        Raises:
            As `commit`; nothing is held then.
        """
        self._check_growth(num_blocks)
        sizes = [num_blocks] * len(self._buffers)
        return PreparedCommit(_extkv.prepare_together(self._buffers, sizes), num_blocks)

    def shrink(self, num_blocks: int, streams: Iterable[torch.cuda.Stream] | None = None) -> int:
        """Give back blocks from `num_blocks` on, and return the bytes of physical memory freed.

        Waits for `streams`, or for the device if None. No work that uses those blocks may be
        started before the call returns. Blocks below `num_blocks` are untouched.

        Raises:
            CapacityError: If the cache is not extensible.
            InvalidArgumentError: If that is more than now.
            FreedError: If the cache was closed.
        """
        checked_size("num_blocks", num_blocks)
        self._check_extensible(num_blocks)
        handles = None if streams is None else [int(stream.cuda_stream) for stream in streams]
        sizes = [num_blocks] * len(self._buffers)
        return _extkv.shrink_together(self._buffers, sizes, handles)

    def regions(self) -> list[Region]:
        """Return the committed bytes of every segment, for registration with a network library.

        Raises:
            FreedError: If the cache was closed.
        """
        names = [tuple(layers) for layers, _, _ in self._plan.buffers()]
        return [
            Region(
                layers=names[buffer],
                segment=segment,
                address=self._buffers[buffer].base + offset,
                num_bytes=length,
                num_handles=self._buffers[buffer].num_handles_in(offset, length),
            )
            for buffer, segment, offset, length in self._plan.regions(self.num_blocks)
        ]

    def stats(self) -> CacheStats:
        """Return memory and driver calls. The cost is one look at each buffer."""
        buffers = tuple(MemoryStats.of(buffer) for buffer in self._buffers)
        return CacheStats(
            num_blocks=self.num_blocks,
            capacity_blocks=self.capacity_blocks,
            bytes_per_block=self.bytes_per_block,
            reserved_bytes=sum(stats.reserved_bytes for stats in buffers),
            committed_bytes=sum(stats.committed_bytes for stats in buffers),
            logical_bytes=sum(stats.logical_bytes for stats in buffers),
            rounding_bytes=sum(stats.rounding_bytes for stats in buffers),
            num_handles=sum(stats.num_handles for stats in buffers),
            num_views=sum(stats.num_views for stats in buffers),
            buffers=buffers,
        )

    def close(self) -> None:
        """Give the memory back, now or with the last tensor. Closing twice does nothing."""
        for buffer in self._buffers:
            buffer.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.num_blocks} of {self.capacity_blocks} blocks"
        return f"KVCache({state}, {self.bytes_per_block} bytes per block, device={self.device})"

    def _grow(self, num_blocks: int) -> None:
        _extkv.grow_together(self._buffers, [num_blocks] * len(self._buffers), True)

    def _check_growth(self, num_blocks: int) -> None:
        checked_size("num_blocks", num_blocks)
        if self.closed:
            raise FreedError("commit on a cache that was closed")
        self._check_extensible(num_blocks)
        if num_blocks > self.capacity_blocks:
            raise CapacityError(
                f"cannot commit {num_blocks} blocks: {self.capacity_blocks} are reserved"
            )
        if num_blocks < self.num_blocks:
            raise GrowOnlyError(
                f"commit is grow-only: cannot go from {self.num_blocks} to {num_blocks} blocks; "
                "use shrink to give blocks back"
            )

    def _check_extensible(self, num_blocks: int) -> None:
        if not self._extensible and num_blocks != self.num_blocks:
            raise CapacityError(
                f"cannot change {self.num_blocks} blocks to {num_blocks}: the cache was made with "
                "extensible=False"
            )

    def _flat(self, buffer: _extkv.Buffer) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        num_bytes = buffer.capacity_bytes
        return from_dlpack(buffer.dlpack(0, [num_bytes], _UINT8, False, False))


def _plan_of(
    specs: Mapping[str, KVSpec] | Sequence[Layer] | CachePlan,
    layouts: Mapping[str, Layout] | None,
    max_blocks: int | None,
    max_bytes: int | None,
) -> CachePlan:
    if isinstance(specs, CachePlan):
        if layouts is not None or max_blocks is not None or max_bytes is not None:
            raise InvalidArgumentError("a plan has its layouts and its size already")
        return specs
    if isinstance(specs, Mapping):
        unknown = sorted(set(layouts or {}) - set(specs))
        if unknown:
            raise InvalidArgumentError(f"layouts names layers without a spec: {unknown}")
        chosen = layouts or {}
        layers = [Layer(name, spec, chosen.get(name)) for name, spec in specs.items()]
    else:
        if layouts is not None:
            raise InvalidArgumentError("layouts go with specs by name, layers have their own")
        layers = list(specs)
    if (max_blocks is None) == (max_bytes is None):
        raise InvalidArgumentError(
            f"exactly one of max_blocks and max_bytes is needed, got {max_blocks} and {max_bytes}"
        )
    return plan_cache(layers, max_blocks=max_blocks, max_bytes=max_bytes)


def _strided(flat: torch.Tensor, part: tuple[int, str, list[int], list[int]]) -> torch.Tensor:
    """Return a view of `flat` (uint8) at a byte offset, with dtype, shape and strides."""
    import torch

    offset, dtype_name, shape, strides = part
    dtype: torch.dtype = getattr(torch, dtype_name)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    span = (last + 1) * dtype.itemsize
    return flat[offset : offset + span].view(dtype).as_strided(shape, strides)
