"""Several ranks that grow their caches together, or not at all.

Growth is two-phase. Every rank creates its physical memory and votes; the first rank decides; only
if all agreed does each rank map, and a second vote makes the growth final or takes it back. A rank
that fails, disagrees, is late or dies makes every other rank raise the same `RankError` and keep
its old size: no call waits longer than the time-outs.

Votes go through a `torch.distributed` store and not through collectives: a collective that one rank
never enters hangs the others and leaves its process group unusable.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from extkv.errors import ExtkvError, InvalidArgumentError, RankError

if TYPE_CHECKING:
    import torch.distributed as dist

    from extkv.kv.cache import KVCache

DEFAULT_TIMEOUT_S = 30.0


class Store(Protocol):
    """A key-value store that all ranks share, as `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> Any:  # noqa: ANN401 bytes, typed loosely by torch
        """Return a key's value."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when all keys are there; RuntimeError when the time is up."""


@dataclass(frozen=True)
class Vote:
    """What one rank says: a number of blocks, and the error that keeps it from having them."""

    num_blocks: int
    error: str | None = None


class RankGroup:
    """Ranks that agree on numbers of blocks.

    Every rank calls the same methods in the same order. Make one per cache with `connect`.

    Args:
        store: Key-value store that all ranks share; keys begin with ``extkv/``.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long the first rank waits for a vote. Others wait twice as long for its
            decision.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(f"rank {rank} is not in [0, {world_size})")
        if not timeout_s > 0:
            raise InvalidArgumentError(f"timeout_s must be positive, got {timeout_s}")
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._num_rounds = 0

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RankGroup:
        """Connect the ranks of an initialised process group (gloo or NCCL; None is the default).

        A collective call. The group's first rank hosts a store of its own, at ``MASTER_ADDR``
        where that is set.

        Raises:
            RankError: If the store cannot be reached.
        """
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        timeout = timedelta(seconds=timeout_s)
        address: list[object] = [None, None]
        store = None
        if rank == 0:
            host = _own_address()
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            address = [host, store.port]
        source = dist.get_global_rank(group, 0) if group is not None else 0
        dist.broadcast_object_list(address, src=source, group=group)
        if store is None:
            try:
                store = TCPStore(str(address[0]), int(str(address[1])), timeout=timeout)
            except RuntimeError as error:
                raise RankError(f"rank {rank} cannot reach rank 0 at {address}: {error}") from error
        return cls(store, rank, world_size, timeout_s)

    def minimum_blocks(self, num_blocks: int) -> int:
        """Return the smallest number of blocks over all ranks.

        Raises:
            RankError: If a rank is missing; the same on every rank that is left.
        """
        return self._agree("minimum", Vote(num_blocks)).num_blocks

    def share_failure(self, what: str, error: Exception) -> None:
        """Take part in the next agreement as a rank that failed, so that the others fail too.

        Raises:
            RankError: Always, naming this rank's error.
        """
        self._agree(what, Vote(0, str(error)))

    def commit(self, cache: KVCache, num_blocks: int) -> None:
        """Grow this rank's cache to `num_blocks` if every rank can and does.

        Raises:
            RankError: If a rank failed, asked for another number, was late or died. Every rank
                raises it, with the same message, and keeps its old size.
        """
        before = cache.num_blocks
        prepared = None
        vote = Vote(num_blocks)
        try:
            prepared = cache.prepare(num_blocks)
        except ExtkvError as error:
            vote = Vote(num_blocks, str(error))
        try:
            self._agree("prepare", vote, must_be_equal=True)
        except RankError:
            if prepared is not None:
                prepared.release()
            raise
        if prepared is None:
            # Unreachable: a vote with an error never passes.
            raise RankError("a failed preparation was agreed to")
        vote = Vote(num_blocks)
        try:
            prepared.commit()
        except ExtkvError as error:
            vote = Vote(num_blocks, str(error))
        try:
            self._agree("map", vote, must_be_equal=True)
        except RankError:
            # Nothing uses the new blocks: they were not published to anybody yet.
            if vote.error is None and cache.num_blocks > before:
                cache.shrink(before, streams=())
            raise

    def _agree(self, what: str, vote: Vote, *, must_be_equal: bool = False) -> Vote:
        """Vote, let the first rank decide, and return its decision."""
        prefix = f"extkv/{self._num_rounds}/{what}"
        self._num_rounds += 1
        try:
            self._store.set(f"{prefix}/{self.rank}", json.dumps([vote.num_blocks, vote.error]))
            if self.rank == 0:
                decision = self._lead(prefix, what, must_be_equal=must_be_equal)
            else:
                decision = self._follow(prefix)
        except RuntimeError as error:  # the store's errors derive from it
            raise RankError(
                f"ranks cannot agree ({what}): rank 0 gave no decision within "
                f"{2 * self._timeout_s:g} s"
            ) from error
        num_blocks, reason = decision
        if reason is not None:
            raise RankError(f"ranks cannot agree ({what}): {reason}")
        return Vote(num_blocks)

    def _lead(self, prefix: str, what: str, *, must_be_equal: bool) -> tuple[int, str | None]:
        """Decide on the first rank, and stay until the others have read the decision.

        The first rank hosts the store: if its process ended sooner, the others could not know.
        """
        votes = self._votes(prefix)
        decision = self._decide(votes, what, must_be_equal=must_be_equal)
        self._store.set(f"{prefix}/decision", json.dumps(decision))
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self.world_size):
            if rank in votes:
                self._has_key(f"{prefix}/{rank}/read", deadline)
        return decision

    def _follow(self, prefix: str) -> tuple[int, str | None]:
        """Wait for the first rank's decision, and tell it that it was read."""
        key = f"{prefix}/decision"
        self._store.wait([key], timedelta(seconds=2 * self._timeout_s))
        num_blocks, reason = json.loads(self._store.get(key))
        self._store.set(f"{prefix}/{self.rank}/read", "1")
        return num_blocks, reason

    def _votes(self, prefix: str) -> dict[int, Vote]:
        """Collect the votes that come in time, by rank."""
        deadline = time.monotonic() + self._timeout_s
        return {
            rank: Vote(*json.loads(self._store.get(f"{prefix}/{rank}")))
            for rank in range(self.world_size)
            if self._has_key(f"{prefix}/{rank}", deadline)
        }

    def _has_key(self, key: str, deadline: float) -> bool:
        """Wait for a key until a time; return whether it came."""
        left_s = max(deadline - time.monotonic(), 0.01)
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError:
            return False
        return True

    def _decide(
        self, votes: dict[int, Vote], what: str, *, must_be_equal: bool
    ) -> tuple[int, str | None]:
        """Return the number of blocks that the votes agree on, or why there is none."""
        for rank in range(self.world_size):
            if rank not in votes:
                return 0, f"rank {rank} did not answer within {self._timeout_s:g} s ({what})"
        for rank, vote in votes.items():
            if vote.error is not None:
                return 0, f"rank {rank} failed: {vote.error}"
        numbers = [vote.num_blocks for vote in votes.values()]
        if must_be_equal and len(set(numbers)) > 1:
            return 0, f"ranks ask for different numbers of blocks: {numbers}"
        return min(numbers), None


def _own_address() -> str:
    """Name under which other ranks reach this host."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return "localhost"
    return host
