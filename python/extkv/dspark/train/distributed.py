"""Processes that train together, each on its share of the batches; or one alone."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Join the process group that `torchrun` describes, if it does, and leave it at the end.

    A group that was joined before is used and left alone.

    Args:
        device: Where the group computes.
    """
    joins = "WORLD_SIZE" in os.environ and not distributed.is_initialized()
    if joins:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(device)
        if joins:
            # One that leaves early would take the others down.
            distributed.barrier()
    finally:
        if joins:
            distributed.destroy_process_group()


class Ranks:
    """The processes of a run, by `torch.distributed` where it was initialised.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Ask torch who trains.

        Args:
            device: Where small agreements are made: the device of the process group.
        """
        is_together = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if is_together else 0
        self.size = distributed.get_world_size() if is_together else 1
        self._device = torch.device("cpu") if device is None else device

    def add(self, values: torch.Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.size > 1:
            distributed.all_reduce(values)

    def add_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace gradients by their sum over all processes, in one message."""
        if self.size == 1:
            return
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def first(self, value: float) -> float:
        """Return the value of the first process."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(tensor, 0)
        return float(tensor.item())

    def agree(self, answer: bool) -> bool:
        """Return whether the first process says yes."""
        return self.first(float(answer)) > 0
