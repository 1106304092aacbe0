"""CUDA graphs of decode steps, one per number of tokens, captured before the cache is sized."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.cuda import _POOL_HANDLE


class DecodeGraphs:
    """Replay the forward pass of the smallest captured size that holds a step.

    Graphs share one memory pool, largest first, so that the pool is as large as its largest graph
    needs.
    """

    def __init__(self) -> None:
        self.pool: _POOL_HANDLE | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes: list[int] = []

    @property
    def sizes(self) -> list[int]:
        """Captured sizes, ascending."""
        return list(self._sizes)

    def capture(
        self,
        sizes: Iterable[int],
        forward: Callable[[int], torch.Tensor],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture `forward` for each size, largest first, into `pool` where one is set.

        Args:
            sizes: Numbers of tokens, or of requests that are drafted for.
            forward: Runs a step of that size over persistent inputs and returns its logits; called
                once to warm up and once to be captured.
            on_progress: Called with the number of graphs done and of all.
        """
        descending = sorted(sizes, reverse=True)
        for done, size in enumerate(descending):
            forward(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = forward(size)
            self.pool = self.pool or graph.pool()
            self._graphs[size] = (graph, logits)
            if on_progress is not None:
                on_progress(done + 1, len(descending))
        self._sizes = sorted(self._graphs)

    def size_for(self, num_tokens: int) -> int | None:
        """Return the smallest captured size of at least `num_tokens`, None if there is none."""
        index = bisect.bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> torch.Tensor:
        """Replay a graph.

        Returns:
            Its logits (model dtype, [size, vocab_size]), overwritten by the next replay.
        """
        graph, logits = self._graphs[size]
        graph.replay()
        return logits
