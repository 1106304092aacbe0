"""Filling a model's weights from any kind of file, without a second copy.

Every tensor is checked before any memory is taken for weights. A tensor the model would not use is
refused: it means that the file asks for something the forward pass does not do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from extkv.errors import ModelFileError
from extkv.models.chunk_buffers import ChunkBuffers
from extkv.models.weights import allocate_weights, slot_view, weight_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extkv.models.config import ModelConfig
    from extkv.models.weights import ModelWeights, WeightSlot


class WeightSource(Protocol):
    """Give access to the tensors of a model file by slot."""

    def describe(self, slot: WeightSlot) -> str:
        """Return what errors call the tensor of a slot, with its file."""
        ...

    def check(self, slot: WeightSlot) -> None:
        """Raise ModelFileError where the tensor of a slot cannot be read as the slot says."""
        ...

    def check_rest(self, slots: Mapping[str, WeightSlot], *, is_tied: bool) -> None:
        """Raise ModelFileError where the file holds a tensor that no slot takes."""
        ...

    def fill(self, slot: WeightSlot, destination: torch.Tensor, buffers: ChunkBuffers) -> None:
        """Write the tensor of a slot that was checked into contiguous memory of its shape."""
        ...


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read all weights of a model.

    Args:
        source: File with the tensors.
        config: Says which tensors there must be.
        dtype: Dtype of the weights.
        device: Where they go.
        on_progress: Called with (tensors read, tensors in all) after each tensor.

    Raises:
        ModelFileError: If a tensor is missing, of another shape, unexpected, or holds a value that
            is not finite in `dtype`.
        OutOfMemoryError: If the weights do not fit on the device.
    """
    slots = {}
    for slot in weight_slots(config):
        source.check(slot)
        slots[slot.name] = slot
    source.check_rest(slots, is_tied=config.tie_word_embeddings)
    weights = allocate_weights(config, dtype, device)
    destinations = [(slot, slot_view(weights, slot)) for slot in slots.values()]
    fill_weights(source, destinations, device=device, on_progress=on_progress)
    return weights


def fill_weights(
    source: WeightSource,
    destinations: Sequence[tuple[WeightSlot, torch.Tensor]],
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read tensors that were checked into their places.

    Args:
        source: File with the tensors.
        destinations: Each slot with contiguous memory of its shape; not empty.
        device: Where the memory is.
        on_progress: Called with (tensors read, tensors in all) after each tensor.

    Raises:
        ModelFileError: If a tensor holds a value that is not finite in its place's dtype.
    """
    buffers = ChunkBuffers(device)
    # One tensor from the start: one per slot would keep the memory of chunks in pieces.
    extremes = destinations[0][1].new_empty(len(destinations), 2)
    for num_read, (slot, destination) in enumerate(destinations, start=1):
        source.fill(slot, destination, buffers)
        extremes[num_read - 1] = torch.stack(torch.aminmax(destination))
        if on_progress is not None:
            on_progress(num_read, len(destinations))
    _check_finite(source, [slot for slot, _ in destinations], extremes)


def _check_finite(source: WeightSource, slots: list[WeightSlot], extremes: torch.Tensor) -> None:
    """Check the least and greatest value of each tensor; NaN is both.

    Args:
        source: Names the tensors.
        slots: Slots in the order of `extremes`.
        extremes (float, [num_slots, 2]): Read on the host once, for all tensors.
    """
    is_finite = torch.isfinite(extremes).all(dim=1).tolist()
    for slot, is_good in zip(slots, is_finite, strict=True):
        if not is_good:
            msg = f"{source.describe(slot)} holds values that are not finite in {extremes.dtype}"
            raise ModelFileError(msg)
