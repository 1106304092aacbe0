"""How long parts of a step take on the device, without ever waiting for it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class SpanTimer:
    """Add up how long some work takes: on the host by its clock, on CUDA between two events.

    Events are read once they have passed, in a later call. So the sum may lack the last spans, and
    a span includes what other streams let it wait for.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin at zero.

        Args:
            device: Where the work runs.
        """
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._total_s = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure the work that is done, or on CUDA put on the current stream, inside."""
        if not self._is_cuda:
            start = time.perf_counter()
            yield
            self._total_s += time.perf_counter() - start
            return
        self._read()
        pair = self._free.pop() if self._free else (_event(), _event())
        stream = torch.cuda.current_stream(self._device)
        pair[0].record(stream)
        yield
        pair[1].record(stream)
        self._pending.append(pair)

    @property
    def total_s(self) -> float:
        """Seconds of all spans that are known to have ended."""
        self._read()
        return self._total_s

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            start, end = pair = self._pending.popleft()
            self._total_s += start.elapsed_time(end) / 1000
            self._free.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
