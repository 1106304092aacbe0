"""Times of whole steps, without waiting for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

# A step is untypical if the host stood still between two steps for more than this part of it.
_MAX_IDLE_RATIO = 0.5


@dataclass(frozen=True)
class Mark:
    """A moment: on the device's clock where there is one, and on the host's."""

    event: torch.cuda.Event | None
    host_s: float


class StepTimer:
    """Measures from the end of one verification to that of the next: draft pass, gaps and all."""

    def __init__(self, device: torch.device) -> None:
        """Make a timer for a device."""
        self._device = device
        self._ended_s = self._idle_s = 0.0
        self._seen: set[Hashable] = set()

    def begin(self) -> None:
        """Note that the host starts a step."""
        self._idle_s = time.perf_counter() - self._ended_s

    def mark(self) -> Mark:
        """Mark the end of a verification in the stream."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Mark(event, time.perf_counter())

    def end(self) -> None:
        """Note that the host knows a step's tokens."""
        self._ended_s = time.perf_counter()

    @property
    def idle_s(self) -> float:
        """How long before the step begun last the host did nothing for the engine."""
        return self._idle_s

    def typical_us(
        self, start: Mark, end: Mark, idle_s: float, shape: Hashable
    ) -> tuple[float, bool]:
        """Return the microseconds between two marks, and whether they say what a step costs.

        They do not the first time that a shape of step runs, nor where the host stood still.

        Args:
            start: End of the verification before.
            end: End of this one; its tokens are known.
            idle_s: `idle_s` as the step began.
            shape: What kernels and graphs depend on.
        """
        if start.event is not None and end.event is not None:
            # The tokens' copy comes right before this event.
            end.event.synchronize()
            elapsed_us = start.event.elapsed_time(end.event) * 1e3
        else:
            elapsed_us = (end.host_s - start.host_s) * 1e6
        is_new = shape not in self._seen
        self._seen.add(shape)
        return elapsed_us, not is_new and idle_s * 1e6 <= _MAX_IDLE_RATIO * elapsed_us
