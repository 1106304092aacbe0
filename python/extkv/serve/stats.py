"""How much an engine has to do, in vLLM's terms, without asking the scheduler too often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from extkv.sched import Scheduler

# The scheduler's own statistics take time with the number of blocks.
REFRESH_S = 0.5


class Load(NamedTuple):
    """Count requests.

    Attributes:
        num_running: Those whose first step has begun.
        num_waiting: The others.
    """

    num_running: int
    num_waiting: int


class LoadStats:
    """Count steps and requests, and remember the scheduler's statistics for a while.

    Args:
        scheduler: Asked at most every `REFRESH_S`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_steps = 0
        self._next_refresh_s = float("-inf")
        self._kv_cache_usage = 0.0
        self._prefix_totals = (0, 0, 0)
        self._prefix_news = (0, 0, 0)

    def note_step(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def take(self, load: Load, *, wave: int, now_s: float) -> dict[str, Any]:
        """Return fields of vLLM's `SchedulerStats`; counts of the prefix cache are told once."""
        if now_s >= self._next_refresh_s:
            self._next_refresh_s = now_s + REFRESH_S
            self._refresh()
        requests, queries, hits = self._prefix_news
        self._prefix_news = (0, 0, 0)
        return {
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "step_counter": self._num_steps,
            "current_wave": wave,
            "kv_cache_usage": self._kv_cache_usage,
            "prefix_cache_stats": {"requests": requests, "queries": queries, "hits": hits},
        }

    def _refresh(self) -> None:
        stats = self._scheduler.stats()
        self._kv_cache_usage = 1.0 - stats.num_free_blocks / stats.num_blocks
        prefix = stats.prefix_cache
        totals = (prefix.num_requests, prefix.num_query_tokens, prefix.num_hit_tokens)
        self._prefix_news = tuple(  # type: ignore[assignment]
            new + total - before
            for new, total, before in zip(
                self._prefix_news, totals, self._prefix_totals, strict=True
            )
        )
        self._prefix_totals = totals
