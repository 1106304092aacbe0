"""Commit time of a CUDA ExtensibleTensor against cuMemAlloc and against a per-granule Python loop.

Only `resize_per_segment_` is timed, on the host clock, and peers take turns. The driver scrubs
freed memory in the background for some 0.4 s, and an allocation that gets there first waits for it.
So each timed call comes after the same thing: the whole size was allocated, written and freed by
cuMemAlloc, either just before (`at once`) or a second before (`settled`).

Run from the repository root: `python -m bench.memory.bench_commit --out FILE`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import extkv
import torch

from bench.memory.cuda_driver import CudaDriver
from bench.memory.per_granule_ctypes import PerGranuleBuffer
from bench.timing import GIB, MIB, Report, Row, alternate, argument_parser, host_us

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda:0"
# Address space that no chunk can fill: every run becomes one physical handle.
WHOLE_RUN = 1024 * GIB
SPARE_BYTES = 2 * GIB
CUMEMALLOC = "cuMemAlloc"
# Seconds between the free of the memory and its next allocation.
REGIMES = {"at once": 0.0, "settled": 1.0}
SMALL_CHUNKS = (2 * MIB, 32 * MIB)
LARGE_CHUNKS = (256 * MIB, GIB, 4 * GIB, None, WHOLE_RUN)


class CuMemAllocPeer:
    """cuMemAlloc and cuMemFree of the same total size."""

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Remember the size; allocates nothing."""
        self._driver = driver
        self._num_bytes = num_bytes
        self.free_us: list[float] = []

    def __call__(self) -> float:
        """Return the host time of cuMemAlloc in microseconds; frees and synchronizes after."""
        start = time.perf_counter_ns()
        address = self._driver.mem_alloc(self._num_bytes)
        elapsed_us = (time.perf_counter_ns() - start) / 1e3
        self.free_us.append(host_us(lambda: self._driver.mem_free(address)))
        torch.cuda.synchronize()
        return elapsed_us

    def extra(self) -> dict[str, object]:
        """Return the untimed facts of all repeats."""
        return {"free_us": self.free_us}


class AfterUse:
    """A peer whose every call comes after the same use of the same memory."""

    def __init__(self, driver: CudaDriver, num_bytes: int, settle_s: float, peer: Peer) -> None:
        """Remember the peer and how long the driver may scrub before it is timed."""
        self._driver = driver
        self._num_bytes = num_bytes
        self._settle_s = settle_s
        self._peer = peer

    def __call__(self) -> float:
        """Return the peer's time in microseconds."""
        address = self._driver.mem_alloc(self._num_bytes)
        self._driver.memset_d8(address, 1, self._num_bytes)
        torch.cuda.synchronize()
        self._driver.mem_free(address)
        torch.cuda.synchronize()
        time.sleep(self._settle_s)
        return self._peer()

    def extra(self) -> dict[str, object]:
        """Return the peer's untimed facts."""
        return self._peer.extra()


class PerGranulePeer:
    """The per-granule Python loop."""

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Remember the size; reserves nothing."""
        self._driver = driver
        self._num_bytes = num_bytes
        self.free_us: list[float] = []

    def __call__(self) -> float:
        """Return the host time of the commit in microseconds; frees and synchronizes after."""
        buffer = PerGranuleBuffer(self._driver, self._num_bytes)
        elapsed_us = host_us(lambda: buffer.commit(self._num_bytes))
        self.free_us.append(host_us(buffer.free))
        torch.cuda.synchronize()
        return elapsed_us

    def extra(self) -> dict[str, object]:
        """Return the untimed facts of all repeats."""
        return {"free_us": self.free_us}


class ExtkvCommit:
    """`resize_per_segment_` from zero to `num_bytes` in total, on a new reservation each time."""

    def __init__(
        self,
        num_bytes: int,
        num_segments: int = 1,
        reserve_factor: int = 1,
        max_chunk_bytes: int | None = None,
    ) -> None:
        """Remember the case; with `reserve_factor` 2 segments end half full and do not touch."""
        self._num_bytes = num_bytes
        self._num_segments = num_segments
        self._reserve_factor = reserve_factor
        self._max_chunk_bytes = max_chunk_bytes
        self.free_us: list[float] = []
        self.num_handles = 0
        self.driver_calls: dict[str, dict[str, float]] = {}

    def __call__(self) -> float:
        """Return the host time of the commit in microseconds; frees and synchronizes after."""
        tensor = extkv.ExtensibleTensor(
            self._num_bytes * self._reserve_factor,
            DEVICE,
            self._num_segments,
            max_chunk_bytes=self._max_chunk_bytes,
        )
        bytes_per_segment = self._num_bytes // self._num_segments
        before = tensor.stats()
        elapsed_us = host_us(lambda: tensor.resize_per_segment_(bytes_per_segment))
        after = tensor.stats()
        self.num_handles = after.num_handles
        self.driver_calls = driver_call_deltas(before, after)
        # The commit counts only if both ends can be written.
        tensor.segment(0)[:1].fill_(1)
        tensor.segment(self._num_segments - 1)[-1:].fill_(1)
        torch.cuda.synchronize()
        self.free_us.append(host_us(tensor.free))
        torch.cuda.synchronize()
        return elapsed_us

    def extra(self) -> dict[str, object]:
        """Return the untimed facts: frees of all repeats; handles and driver calls of the last."""
        return {
            "free_us": self.free_us,
            "num_handles": self.num_handles,
            "driver_calls": self.driver_calls,
        }


Peer = CuMemAllocPeer | PerGranulePeer | ExtkvCommit | AfterUse


def driver_call_deltas(
    before: extkv.MemoryStats, after: extkv.MemoryStats
) -> dict[str, dict[str, float]]:
    """Return count and total microseconds per driver call between two snapshots."""
    deltas: dict[str, dict[str, float]] = {}
    for name, now in after.driver_calls.items():
        then = before.driver_calls.get(name)
        count = now.count - (0 if then is None else then.count)
        total_us = now.total_us - (0.0 if then is None else then.total_us)
        if count:
            deltas[name] = {"count": count, "total_us": round(total_us, 3)}
    return deltas


def run_peers(
    report: Report, shape: str, num_bytes: int, peers: dict[str, Peer], rounds: int
) -> dict[str, Row]:
    """Time the peers in turn and add one row each; the first is the reference."""
    timed: dict[str, Callable[[], float]] = dict(peers)
    samples = alternate(timed, rounds)
    rows: dict[str, Row] = {}
    first: Row | None = None
    for name, peer in peers.items():
        extra = peer.extra()
        if first is not None:
            ordered = sorted(samples[name])
            extra["min_ratio"] = round(ordered[0] / first.summary.min_us, 4)
            extra["max_ratio"] = round(ordered[-1] / first.summary.max_us, 4)
        row = report.add(shape, name, samples[name], num_bytes=num_bytes, peer=first, extra=extra)
        first = first or row
        rows[name] = row
        print_details(row)
    return rows


def print_details(row: Row) -> None:
    """Print min and max, the free time and the driver calls of one row."""
    summary = row.summary
    parts = [f"min {summary.min_us / 1e3:.2f} max {summary.max_us / 1e3:.2f} ms"]
    if "num_handles" in row.extra:
        parts.append(f"handles {row.extra['num_handles']}")
    calls = row.extra.get("driver_calls")
    if isinstance(calls, dict):
        parts += [f"{k} {v['count']:.0f}x {v['total_us']:.0f}us" for k, v in calls.items()]
    print("    " + " | ".join(parts), flush=True)


def compare_segments(report: Report, driver: CudaDriver, num_bytes: int, rounds: int) -> None:
    """Compare 1, 2 and 128 segments with cuMemAlloc of the same total size."""
    gib = num_bytes // GIB
    for regime, settle_s in REGIMES.items():
        peers: dict[str, Peer] = {
            CUMEMALLOC: AfterUse(driver, num_bytes, settle_s, CuMemAllocPeer(driver, num_bytes))
        }
        for num_segments, reserve_factor in ((1, 1), (2, 2), (128, 1), (128, 2)):
            commit = ExtkvCommit(num_bytes, num_segments, reserve_factor)
            name = f"extkv segments={num_segments} reserve={reserve_factor}x"
            peers[name] = AfterUse(driver, num_bytes, settle_s, commit)
        rows = run_peers(report, f"commit {gib} GiB, {regime}", num_bytes, peers, rounds)
        for name, row in rows.items():
            if gib > 16 and row.time_ratio is not None:
                label = f"{name}, {gib} GiB, {regime}: time over cuMemAlloc"
                report.at_most(label, row.time_ratio, 1.1)


def sweep_chunks(report: Report, driver: CudaDriver, num_bytes: int, rounds: int) -> None:
    """Compare physical chunk sizes at one total size, one segment; 2 and 32 MiB only at 16 GiB."""
    gib = num_bytes // GIB
    chunks = (*SMALL_CHUNKS, *LARGE_CHUNKS) if gib <= 16 else LARGE_CHUNKS
    regime, settle_s = "settled", REGIMES["settled"]
    peers: dict[str, Peer] = {
        CUMEMALLOC: AfterUse(driver, num_bytes, settle_s, CuMemAllocPeer(driver, num_bytes))
    }
    for chunk in chunks:
        commit = ExtkvCommit(num_bytes, max_chunk_bytes=chunk)
        name = f"extkv chunk={chunk_label(chunk)}"
        peers[name] = AfterUse(driver, num_bytes, settle_s, commit)
    run_peers(report, f"chunk sweep {gib} GiB, {regime}", num_bytes, peers, rounds)


def chunk_label(chunk_bytes: int | None) -> str:
    """Return a chunk size as text."""
    if chunk_bytes is None:
        return "default"
    return "whole run" if chunk_bytes == WHOLE_RUN else f"{chunk_bytes // MIB} MiB"


def compare_per_granule(report: Report, driver: CudaDriver, num_bytes: int, rounds: int) -> None:
    """Compare with the per-granule Python loop."""
    peers: dict[str, Peer] = {
        "per-granule ctypes": PerGranulePeer(driver, num_bytes),
        "extkv": ExtkvCommit(num_bytes),
    }
    gib = num_bytes // GIB
    rows = run_peers(report, f"per granule {gib} GiB", num_bytes, peers, rounds)
    speedup = rows["per-granule ctypes"].summary.median_us / rows["extkv"].summary.median_us
    report.at_least(f"{gib} GiB, times faster than the per-granule loop", speedup, 20)


def sizes_that_fit(free_bytes: int, *, is_quick: bool) -> list[int]:
    """Return 16, 64 and 120 GiB, each cut to the largest multiple of 8 GiB that fits."""
    largest = (free_bytes - SPARE_BYTES) // (8 * GIB) * 8 * GIB
    wanted = (16, 64) if is_quick else (16, 64, 120)
    sizes = sorted({min(gib * GIB, largest) for gib in wanted})
    return [size for size in sizes if size > 0]


def main() -> None:
    """Run all comparisons."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="repeats per peer; default 5")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    torch.ones(1, device=DEVICE)
    free_bytes, _ = torch.cuda.mem_get_info(0)
    sizes = sizes_that_fit(free_bytes, is_quick=arguments.quick)
    driver = CudaDriver()
    report = Report("bench_commit", arguments)
    # The first call of each peer loads code; it is not timed.
    CuMemAllocPeer(driver, sizes[-1])()
    ExtkvCommit(sizes[-1])()
    for size in sizes:
        compare_segments(report, driver, size, rounds)
    compare_per_granule(report, driver, sizes[0], rounds)
    for size in sizes:
        sweep_chunks(report, driver, size, min(rounds, 3))
    report.finish()


if __name__ == "__main__":
    main()
