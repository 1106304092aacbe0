"""Ranks that grow together or not at all: two and three processes over gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from typing import TYPE_CHECKING

import extkv
import pytest
from extkv.kv import FullAttentionSpec, KVCache, RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = FullAttentionSpec(16, 2, 64, "float16")
GRANULE = 64 << 10


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def enter(rank: int, world_size: int, port: int, timeout_s: float) -> RankGroup:
    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    return RankGroup.connect(timeout_s=timeout_s)


def run_rank(work, where: tuple[int, int, int, float], answers) -> None:
    rank = where[0]
    try:
        ranks = enter(*where)
        cache = KVCache.reserve({"a": SPEC}, max_blocks=64, device="cpu")
        answers.put((rank, work(rank, ranks, cache), cache.num_blocks))
    except BaseException:  # noqa: BLE001 the parent shows it
        answers.put((rank, traceback.format_exc(), -1))


def run_ranks(
    work: Callable[[int, RankGroup, KVCache], object], world_size: int, timeout_s: float = 20.0
) -> dict[int, tuple[object, int]]:
    """Run `work` on each rank; return what it answered and its number of blocks at the end."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=run_rank,
            args=(work, (rank, world_size, port, timeout_s), answers),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        assert not process.is_alive(), "a rank hangs"
    results = {}
    while not answers.empty():
        rank, answer, num_blocks = answers.get()
        results[rank] = (answer, num_blocks)
    return results


def error_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except extkv.RankError as error:
        return str(error)
    return "no error"


def agree(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    blocks = ranks.minimum_blocks([40, 17, 33][rank])
    ranks.commit(cache, blocks)
    ranks.commit(cache, blocks + 5)
    return blocks, bool(cache.tensors()["a"][:, : cache.num_blocks].any())


@pytest.mark.parametrize("world_size", [2, 3])
def test_b81_ranks_commit_the_smallest_number(world_size: int):
    results = run_ranks(agree, world_size)
    assert results == dict.fromkeys(range(world_size), ((17, False), 22))


def one_out_of_memory(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    if rank == 1:
        info = extkv.memory_info("cpu")
        extkv.set_host_memory_budget(info.total - info.free + GRANULE)
    before = cache.stats().committed_bytes, extkv.memory_info("cpu").free
    message = error_of(lambda: ranks.commit(cache, 64))
    assert (cache.stats().committed_bytes, extkv.memory_info("cpu").free) == before
    extkv.set_host_memory_budget(None)
    ranks.commit(cache, 30)
    return message


def test_one_rank_out_of_memory_makes_all_fail_and_a_retry_works():
    results = run_ranks(one_out_of_memory, 3)
    messages = {answer for answer, _ in results.values()}
    assert len(messages) == 1, messages
    (message,) = messages
    assert "rank 1 failed: cannot commit" in str(message)
    assert {blocks for _, blocks in results.values()} == {30}


def disagree(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    return error_of(lambda: ranks.commit(cache, 10 + rank))


def test_different_numbers_are_refused_everywhere():
    results = run_ranks(disagree, 2)
    messages = {answer for answer, _ in results.values()}
    assert messages == {
        "ranks cannot agree (prepare): ranks ask for different numbers of blocks: [10, 11]"
    }
    assert {blocks for _, blocks in results.values()} == {1}


def one_is_killed(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    ranks.commit(cache, 5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    message = error_of(lambda: ranks.commit(cache, 20))
    assert time.monotonic() - start < 15
    return message


def test_a_killed_rank_makes_the_others_fail_in_time():
    results = run_ranks(one_is_killed, 3, timeout_s=3.0)
    assert set(results) == {0, 2}
    messages = {answer for answer, _ in results.values()}
    assert messages == {"ranks cannot agree (prepare): rank 1 did not answer within 3 s (prepare)"}
    assert {blocks for _, blocks in results.values()} == {5}


def first_is_killed(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    ranks.commit(cache, 5)
    if rank == 0:
        time.sleep(1)  # the last decision must be read first
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: ranks.commit(cache, 20))


def test_without_its_first_rank_nobody_commits():
    results = run_ranks(first_is_killed, 2, timeout_s=2.0)
    (message, blocks) = results[1]
    assert "rank 0 gave no decision" in str(message)
    assert blocks == 5


def one_is_late(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    if rank == 1:
        time.sleep(4)
    message = error_of(lambda: ranks.commit(cache, 20))
    if rank == 0:
        time.sleep(4)  # its process hosts the store that the late rank reads
    return message


def test_a_late_rank_hears_that_the_others_gave_up():
    results = run_ranks(one_is_late, 2, timeout_s=2.0)
    messages = {answer for answer, _ in results.values()}
    assert messages == {"ranks cannot agree (prepare): rank 1 did not answer within 2 s (prepare)"}
    assert {blocks for _, blocks in results.values()} == {1}


class FailingCommit:
    """A cache whose mapping step fails on one rank."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    def prepare(self, num_blocks: int):
        prepared = self._cache.prepare(num_blocks)

        class Failing:
            def commit(self) -> None:
                prepared.release()
                raise extkv.DriverError("set_access failed")

            def release(self) -> None:
                prepared.release()

        return Failing()


def one_fails_to_map(rank: int, ranks: RankGroup, cache: KVCache) -> object:
    before = cache.stats().committed_bytes
    target = FailingCommit(cache) if rank == 1 else cache
    message = error_of(lambda: ranks.commit(target, 50))
    assert cache.stats().committed_bytes == before
    return message


def test_a_rank_that_fails_to_map_takes_the_growth_back_everywhere():
    results = run_ranks(one_fails_to_map, 2)
    messages = {answer for answer, _ in results.values()}
    assert messages == {"ranks cannot agree (map): rank 1 failed: set_access failed"}
    assert {blocks for _, blocks in results.values()} == {1}


def test_a_rank_out_of_range_is_refused():
    with pytest.raises(extkv.InvalidArgumentError, match="rank 2"):
        RankGroup(None, 2, 2)
    with pytest.raises(extkv.InvalidArgumentError, match="timeout_s"):
        RankGroup(None, 0, 1, timeout_s=0)
