"""Host memory through which weights pass on their way to their place, dtype and device.

It is the only memory that loading needs beside the weights themselves. Reading straight into new
memory would be slower: the kernel faults in its pages one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Large enough to amortise one read and one copy, small beside any model.
CHUNK_BYTES = 16 * 1024 * 1024


class ChunkBuffers:
    """Fill tensors piece by piece from a source of bytes.

    On CUDA there are two pinned buffers, so that one is read into while the other is copied.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet: buffers come with the first chunk that needs one."""
        self._is_cuda = device.type == "cuda"
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def fill(
        self,
        destination: torch.Tensor,
        source_dtype: torch.dtype,
        read_into: Callable[[memoryview], None],
    ) -> None:
        """Fill a tensor with the next bytes of a source.

        Args:
            destination (any float dtype, any shape, any device): Contiguous.
            source_dtype: Dtype of the bytes.
            read_into: Fills the memory that it is given with the bytes that follow those of the
                call before.
        """
        flat = destination.view(-1)
        chunk_elements = CHUNK_BYTES // source_dtype.itemsize
        for start in range(0, flat.numel(), chunk_elements):
            chunk = flat[start : start + chunk_elements]
            turn = self._next_free_buffer()
            part = self._buffers[turn][: chunk.numel() * source_dtype.itemsize]
            read_into(part.numpy().data)
            if not self._take(chunk, part.view(source_dtype)):
                return
            if self._is_cuda:
                self._copied[turn].record(torch.cuda.current_stream(chunk.device))

    def _take(self, chunk: torch.Tensor, values: torch.Tensor) -> bool:
        """Use the next values of the source; return whether to go on."""
        chunk.copy_(values, non_blocking=self._is_cuda)
        return True

    def _next_free_buffer(self) -> int:
        num_buffers = 2 if self._is_cuda else 1
        while len(self._buffers) < num_buffers:
            self._buffers.append(
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
            )
            if self._is_cuda:
                self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._turn = (self._turn + 1) % num_buffers
        if self._is_cuda:
            # A new event has nothing to wait for.
            self._copied[self._turn].synchronize()
        return self._turn


class ChunkComparison(ChunkBuffers):
    """Compare tensors with a source of bytes instead of filling them; `fill` changes nothing.

    Attributes:
        is_equal: Whether all values so far were equal. Reading stops at the first that is not.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_equal = True

    def _take(self, chunk: torch.Tensor, values: torch.Tensor) -> bool:
        self.is_equal = self.is_equal and torch.equal(chunk, values.to(chunk))
        return self.is_equal
