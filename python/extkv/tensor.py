"""A byte tensor that grows and shrinks in place: names and behaviour of vLLM's ExtensibleTensor.

The address range is reserved once and never moves; physical memory is committed as a prefix of
each segment. Bytes past a segment's committed prefix are not backed: reading or writing them, also
by a kernel's masked tail, is a segmentation fault on the host and an illegal access on CUDA.
Source of the names: https://github.com/vllm-project/vllm/pull/47363.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from extkv import _extkv
from extkv.device import checked_size, open_device, resolve_device
from extkv.errors import InvalidArgumentError
from extkv.stats import MemoryStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from extkv.device import DeviceLike

_UINT8 = (1, 8, 1)  # DLPack code, bits, lanes


class ExtensibleTensor:
    """A one-dimensional byte tensor whose committed size changes while its address does not.

    With several segments the reservation is divided into equal parts that grow in lockstep: the
    committed bytes are a prefix of each. Segment ``i`` spans bytes
    ``[i * segment_capacity_bytes, (i + 1) * segment_capacity_bytes)`` of `full_view`. That is what
    a KV cache of shape ``(2, num_blocks, ...)`` needs.

    Any thread may call; the interpreter is released around driver calls. Every tensor handed out is
    a view that keeps the memory alive. A forked child cannot use its parent's tensors.

    Args:
        max_num_bytes: Bytes of address space to reserve, over all segments.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, an index, or a torch.device. None is the
            current CUDA device, or the host where there is none.
        num_segments: Number of equal segments.
        max_chunk_bytes: Largest physical handle. Few large handles map faster, many small ones can
            be given back in smaller pieces. None for the larger of 1/16 of what a growth adds and
            1/64 of what the segment holds.
        growth: ``"geometric"``: a growth adds at least 1/64 of what its segment holds already, so
            that small steps leave few handles; the surplus is at most 1.6 % and is left out when
            memory is short. ``"exact"``: commit what is asked, rounded up to granules.
        granularity: Bytes per granule, on the host only; None for 64 KiB.
        shareable: CUDA handles that other processes can import: ``"auto"`` where possible,
            ``"posix_fd"`` or an error, ``"none"``. `stats` tells the choice.
        gpu_direct_rdma: CUDA memory that network cards can be given: ``"auto"``, ``"on"`` or an
            error, ``"off"``.

    Raises:
        InvalidArgumentError: A size is negative, zero, or not divisible by `num_segments`.
        OutOfMemoryError: The process has no such address range left.
        DriverUnavailableError: The device's driver cannot be used; the message says why.

    Example:
        >>> with ExtensibleTensor(1 << 30, device="cpu") as cache:
        ...     first = cache.resize_(4)
        ...     _ = first.fill_(7)
        ...     cache.resize_(1 << 20)[:4].tolist()
        [7, 7, 7, 7]
    """

    def __init__(
        self,
        max_num_bytes: int,
        device: DeviceLike = None,
        num_segments: int = 1,
        *,
        max_chunk_bytes: int | None = None,
        growth: Literal["geometric", "exact"] = "geometric",
        granularity: int | None = None,
        shareable: Literal["auto", "posix_fd", "none"] = "auto",
        gpu_direct_rdma: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        if growth not in {"geometric", "exact"}:
            raise InvalidArgumentError(f"growth must be geometric or exact, got {growth!r}")
        if max_chunk_bytes is not None:
            max_chunk_bytes = checked_size("max_chunk_bytes", max_chunk_bytes)
        if granularity is not None:
            granularity = checked_size("granularity", granularity)
        self._max_num_bytes = checked_size("max_num_bytes", max_num_bytes)
        self._num_segments = checked_size("num_segments", num_segments)
        self._kind, self._index = resolve_device(device)
        self._native_device = open_device(
            self._kind,
            self._index,
            granularity=granularity,
            shareable=shareable,
            gpu_direct_rdma=gpu_direct_rdma,
        )
        self._buffer = _extkv.Buffer.equal(
            self._native_device,
            self._max_num_bytes,
            self._num_segments,
            max_chunk_bytes=max_chunk_bytes,
            is_exact=growth == "exact",
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The committed prefix, as a new view (uint8, [num_bytes]).

        Raises:
            InvalidArgumentError: With several segments; use `segment` or `full_view`.
        """
        self._check_single_segment("tensor")
        return self.segment(0)

    def segment(self, index: int) -> torch.Tensor:
        """Return the committed prefix of one segment (uint8, [bytes_per_segment]).

        Raises:
            InvalidArgumentError: If there is no such segment.
            FreedError: If the tensor was freed.
        """
        start = self._segment_start(index)
        return self._export(start, [self._buffer.size()], _UINT8, is_committed=True)

    def full_view(self) -> torch.Tensor:
        """Return all reserved bytes (uint8, [max_num_bytes]).

        Bytes past each segment's committed prefix must not be touched: ``repr``, ``sum`` or
        ``clone`` of the whole view fault.

        Raises:
            FreedError: If the tensor was freed.
        """
        return self._export(0, [self._max_num_bytes], _UINT8, is_committed=False)

    def view(
        self,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        *,
        segment: int = 0,
        full: bool = False,
    ) -> torch.Tensor:
        """Return a segment as a contiguous tensor of another dtype and shape.

        Args:
            dtype: Element type.
            shape: Shape; it must fill the bytes exactly. One dimension may be -1. None for a flat
                tensor.
            segment: Index of the segment.
            full: Span the segment's capacity instead of its committed prefix; bytes past the prefix
                must not be touched.

        Raises:
            InvalidArgumentError: If dtype or shape do not divide the bytes; names the numbers.
            FreedError: If the tensor was freed.
        """
        num_bytes = self.segment_capacity_bytes if full else self.bytes_per_segment
        if num_bytes % dtype.itemsize:
            raise InvalidArgumentError(
                f"{num_bytes} bytes are not divisible by the {dtype.itemsize} bytes of {dtype}"
            )
        start = self._segment_start(segment)
        if start % dtype.itemsize:
            raise InvalidArgumentError(
                f"segment {segment} starts at byte {start}, which is not aligned to {dtype}"
            )
        flat = self._export(start, [num_bytes], _UINT8, is_committed=not full).view(dtype)
        if shape is None:
            return flat
        dims = _resolved_shape(shape, num_bytes // dtype.itemsize)
        return flat.view(dims)

    def resize_(self, num_bytes: int) -> torch.Tensor:
        """Grow to `num_bytes` bytes and return the committed prefix.

        Raises:
            GrowOnlyError: If that is less than now.
            CapacityError: If that is more than reserved.
            InvalidArgumentError: With several segments.
            OutOfMemoryError: If the device is too full; nothing changed.
        """
        self._check_single_segment("resize_")
        self.resize_per_segment_(num_bytes)
        return self.tensor

    def append(self, num_bytes: int) -> torch.Tensor:
        """Grow by `num_bytes` bytes and return the committed prefix. Atomic among threads.

        Raises:
            CapacityError: If the new size is more than reserved.
            InvalidArgumentError: If the number is negative, or with several segments.
            OutOfMemoryError: If the device is too full; nothing changed.
        """
        self._check_single_segment("append")
        size = self._buffer.grow_by(checked_size("num_bytes", num_bytes), False)
        return self._export(0, [size], _UINT8, is_committed=True)

    def resize_per_segment_(self, bytes_per_segment: int, zero_new: bool = False) -> None:
        """Grow every segment's committed prefix, all of them or none.

        Kernels that run meanwhile are not waited for, and bytes below the old size keep their
        content. Does not return before the new bytes are usable, and zero if asked, on every
        stream. Zeroing runs on a stream of its own: it does not wait for earlier writes to bytes
        that are not committed yet, which nothing may write.

        Args:
            bytes_per_segment: New size of each prefix in bytes.
            zero_new: Set the newly committed bytes (and no others) to zero. Otherwise their content
                is undefined.

        Raises:
            GrowOnlyError: If that is less than now.
            CapacityError: If that is more than a segment reserved.
            OutOfMemoryError: If the device is too full; nothing changed.
            FreedError: If the tensor was freed.
        """
        size = checked_size("bytes_per_segment", bytes_per_segment)
        self._buffer.grow_to(size, bool(zero_new))

    def shrink_per_segment_(
        self, bytes_per_segment: int, streams: Iterable[torch.cuda.Stream] | None = None
    ) -> int:
        """Shrink every segment's committed prefix and give whole physical handles back.

        Waits first: for `streams`, or for the whole device if None. No work that uses the bytes may
        be running elsewhere, or be started before the call returns. A handle that also backs bytes
        below the new size stays. Content below the new size is untouched; growing again works.

        Args:
            bytes_per_segment: New size of each prefix in bytes.
            streams: CUDA streams that may use the bytes.

        Returns:
            Bytes of physical memory given back.

        Raises:
            InvalidArgumentError: If that is more than now.
            FreedError: If the tensor was freed.
        """
        size = checked_size("bytes_per_segment", bytes_per_segment)
        handles = None if streams is None else [int(stream.cuda_stream) for stream in streams]
        return _extkv.shrink_together([self._buffer], [size], handles)

    @property
    def native(self) -> _extkv.Buffer:
        """The native buffer, for growing several tensors as one."""
        return self._buffer

    @property
    def num_bytes(self) -> int:
        """Committed size in bytes, over all segments; 0 once freed."""
        return self._buffer.size() * self._num_segments

    @property
    def bytes_per_segment(self) -> int:
        """Committed size of each segment in bytes; 0 once freed."""
        return self._buffer.size()

    @property
    def num_segments(self) -> int:
        """Number of equal segments."""
        return self._num_segments

    @property
    def segment_capacity_bytes(self) -> int:
        """Largest size of each segment in bytes."""
        return self._buffer.max_size

    @property
    def capacity_bytes(self) -> int:
        """Reserved address space in bytes: `max_num_bytes` rounded up to granules."""
        return self._buffer.reserved_bytes

    @property
    def physical_bytes(self) -> int:
        """Physical memory mapped, in bytes."""
        return self.stats().committed_bytes

    @property
    def granularity(self) -> int:
        """Bytes per granule."""
        return self._buffer.granularity

    @property
    def base_ptr(self) -> int:
        """Address of the first byte. Never changes."""
        return self._buffer.base

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        import torch

        return torch.device("cpu") if self._kind == "cpu" else torch.device("cuda", self._index)

    @property
    def closed(self) -> bool:
        """Whether the tensor was freed."""
        return self._buffer.is_freed()

    def stats(self) -> MemoryStats:
        """Return what the tensor holds. Works on a freed tensor too."""
        return MemoryStats.of(self._buffer)

    def free(self, strict: bool = False) -> None:
        """Give the memory back: at once if no view lives, else when the last view dies.

        Waits for the device before unmapping. Freeing twice does nothing.

        Args:
            strict: Raise instead of waiting for views.

        Raises:
            LiveViewsError: With `strict`, if views live; nothing changed.
        """
        if strict:
            self._buffer.free_strict()
        else:
            self._buffer.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        name = self._native_device.name
        if self.closed:
            return f"ExtensibleTensor(freed, device='{name}')"
        return (
            f"ExtensibleTensor({self.num_bytes} of {self._max_num_bytes} bytes committed, "
            f"device='{name}', num_segments={self._num_segments}, base_ptr={self.base_ptr:#x})"
        )

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:  # noqa: ANN401 a capsule has no type
        """Export the committed prefix (uint8, [num_bytes]) as an owned view.

        `stream` is not needed: growth is complete on every stream when it returns.

        Raises:
            BufferError: If a copy or another device is asked for.
            InvalidArgumentError: With several segments.
        """
        self._check_single_segment("__dlpack__")
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("an ExtensibleTensor is exported without copy, on its own device")
        is_versioned = max_version is not None and max_version[0] >= 1
        return self._buffer.dlpack(0, [self._buffer.size()], _UINT8, True, is_versioned)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Kind and index of the device as DLPack counts them."""
        return self._native_device.dlpack_device

    def _check_single_segment(self, operation: str) -> None:
        if self._num_segments != 1:
            raise InvalidArgumentError(
                f"{operation} (a single committed prefix) is only valid for num_segments=1, this "
                f"tensor has {self._num_segments}; use resize_per_segment_, segment or full_view"
            )

    def _segment_start(self, index: SupportsIndex) -> int:
        number = checked_size("segment", index)
        if number >= self._num_segments:
            raise InvalidArgumentError(
                f"segment {number} does not exist: the tensor has {self._num_segments}"
            )
        return number * self.segment_capacity_bytes

    def _export(
        self, offset: int, shape: list[int], dtype: tuple[int, int, int], *, is_committed: bool
    ) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(self._buffer.dlpack(offset, shape, dtype, is_committed, False))


def _resolved_shape(shape: Sequence[int], num_items: int) -> list[int]:
    """Replace a -1 in a shape and check that it holds exactly `num_items` items."""
    dims = [int(dim) for dim in shape]
    known = math.prod(dim for dim in dims if dim != -1)
    if dims.count(-1) == 1 and known > 0 and num_items % known == 0:
        dims[dims.index(-1)] = num_items // known
    if any(dim < 0 for dim in dims) or math.prod(dims) != num_items:
        raise InvalidArgumentError(f"shape {list(shape)} does not hold exactly {num_items} items")
    return dims
