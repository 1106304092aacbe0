"""How much an engine has to do, in vLLM's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from extkv.dspark.verification import DraftCounts
    from extkv.sched import Scheduler
    from extkv.sched.steps import PrefixCacheStats


class Load(NamedTuple):
    """Count requests.

    Attributes:
        num_running: Those that hold blocks and a place in the batch.
        num_waiting: The others, preempted ones included.
    """

    num_running: int
    num_waiting: int


class _PrefixTotals(NamedTuple):
    requests: int = 0
    queries: int = 0
    hits: int = 0

    @classmethod
    def of(cls, stats: PrefixCacheStats) -> _PrefixTotals:
        return cls(stats.num_requests, stats.num_query_tokens, stats.num_hit_tokens)

    def since(self, before: _PrefixTotals) -> _PrefixTotals:
        return _PrefixTotals(*(new - old for new, old in zip(self, before, strict=True)))


class _DraftTotals(NamedTuple):
    num_rounds: int
    drafted: list[int]
    accepted: list[int]

    @classmethod
    def of(cls, counts: DraftCounts, num_drafts: int) -> _DraftTotals:
        """Copy counts, with zeros for places that no window had yet."""
        zeros = [0] * (num_drafts - len(counts.num_drafted))
        return cls(counts.num_rounds, counts.num_drafted + zeros, counts.num_accepted + zeros)


class LoadStats:
    """Read the scheduler's statistics, and remember what of its counts was told.

    Args:
        scheduler: The scheduler.
        draft_counts: Counts of a drafter; None without one.
        num_drafts: Most drafts of a sequence in a step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        draft_counts: DraftCounts | None = None,
        num_drafts: int = 0,
    ) -> None:
        self._scheduler = scheduler
        self._draft_counts = draft_counts
        self._num_drafts = num_drafts
        self._stats = scheduler.stats()
        self._told_prefix = _PrefixTotals()
        self._told_resumed = _PrefixTotals()
        self._told_resets = 0
        self._told_drafts = _DraftTotals(0, [0] * num_drafts, [0] * num_drafts)

    def look(self, num_held: int) -> Load:
        """Read the statistics and return the load.

        Args:
            num_held: Requests that the scheduler does not know yet.
        """
        self._stats = self._scheduler.stats()
        return Load(self._stats.num_running, self._stats.num_waiting + num_held)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests held at the last look."""
        return 1.0 - self._stats.num_free_blocks / self._stats.num_blocks

    def counts(self, load: Load) -> dict[str, Any]:
        """Return fields of vLLM's `SchedulerStats` for a coordinator, which wants no more."""
        return {
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "kv_cache_usage": self.kv_cache_usage,
        }

    def take(self, load: Load, *, num_resets: int = 0) -> dict[str, Any]:
        """Return fields of vLLM's `SchedulerStats` for a client; each count is told once.

        Args:
            load: The load of the last look.
            num_resets: How often the prefix cache was forgotten.
        """
        prefix = _PrefixTotals.of(self._stats.prefix_cache)
        resumed = _PrefixTotals.of(self._stats.prefix_cache_resumed)
        new, again = prefix.since(self._told_prefix), resumed.since(self._told_resumed)
        fields = {
            **self.counts(load),
            "prefix_cache_stats": {
                "reset": num_resets > self._told_resets,
                **new._asdict(),
                **{f"preempted_{name}": count for name, count in again._asdict().items()},
            },
            "spec_decoding_stats": self._take_drafts(),
        }
        self._told_prefix, self._told_resumed, self._told_resets = prefix, resumed, num_resets
        return fields

    def _take_drafts(self) -> dict[str, Any] | None:
        counts = self._draft_counts
        if counts is None:
            return None
        before, self._told_drafts = self._told_drafts, _DraftTotals.of(counts, self._num_drafts)
        new = self._told_drafts
        if new.num_rounds == before.num_rounds:
            return None
        drafted = [now - old for now, old in zip(new.drafted, before.drafted, strict=True)]
        accepted = [now - old for now, old in zip(new.accepted, before.accepted, strict=True)]
        return {
            "num_spec_tokens": self._num_drafts,
            "num_drafts": new.num_rounds - before.num_rounds,
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": accepted,
            "num_draft_tokens_per_pos": drafted,
        }
