"""Several tensors grown or shrunk as one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv import _extkv
from extkv.device import checked_size
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from extkv.tensor import ExtensibleTensor


def resize_together(
    tensors: Sequence[ExtensibleTensor], bytes_per_segment: Sequence[int], zero_new: bool = False
) -> None:
    """Grow several tensors as one transaction: all of them reach their size, or none changes.

    Args:
        tensors: The tensors, each once.
        bytes_per_segment: New size of each tensor's segments in bytes.
        zero_new: Set newly committed bytes to zero.

    Raises:
        OutOfMemoryError: If they do not fit together; `requested` counts all of them.
        InvalidArgumentError: If the lists differ in length or a tensor stands twice.
        GrowOnlyError, CapacityError, FreedError: As `ExtensibleTensor.resize_per_segment_`.
    """
    buffers, sizes = _pairs(tensors, bytes_per_segment)
    _extkv.grow_together(buffers, sizes, bool(zero_new))


def shrink_together(
    tensors: Sequence[ExtensibleTensor],
    bytes_per_segment: Sequence[int],
    streams: Iterable[torch.cuda.Stream] | None = None,
) -> int:
    """Shrink several tensors as one transaction and return the bytes of physical memory given back.

    Waits for `streams`, or for the devices if None; see `ExtensibleTensor.shrink_per_segment_`.

    Raises:
        InvalidArgumentError: If a size is more than now, the lists differ in length, or a tensor
            stands twice.
        FreedError: If a tensor was freed.
    """
    buffers, sizes = _pairs(tensors, bytes_per_segment)
    handles = None if streams is None else [int(stream.cuda_stream) for stream in streams]
    return _extkv.shrink_together(buffers, sizes, handles)


def _pairs(
    tensors: Sequence[ExtensibleTensor], bytes_per_segment: Sequence[int]
) -> tuple[list[_extkv.Buffer], list[int]]:
    if len(tensors) != len(bytes_per_segment):
        raise InvalidArgumentError(
            f"{len(tensors)} tensors but {len(bytes_per_segment)} sizes were given"
        )
    sizes = [checked_size("bytes_per_segment", size) for size in bytes_per_segment]
    return [tensor.native for tensor in tensors], sizes
