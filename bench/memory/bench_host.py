"""Commit cost of an ExtensibleTensor on the host device: per step, per call, and of `stats()`.

No page is touched: this times reservation book-keeping, memfd, mmap and page protection. The peer
does the same with one mmap and one mprotect per granule from Python. Needs no GPU.

Run from the repository root: `python -m bench.memory.bench_host --out FILE`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from typing import TYPE_CHECKING, Literal

import extkv

from bench.timing import GIB, MIB, Report, Row, alternate, argument_parser, host_us

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_BYTES = 2 * MIB
TIB = 1024 * GIB
NUM_STATS_CALLS = 1000
MAP_FAILED = ctypes.c_void_p(-1).value
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
PROT_NONE = 0


class Libc:
    """mmap, mprotect and munmap through ctypes; each failure raises OSError."""

    def __init__(self) -> None:
        """Declare the signatures."""
        self._lib = ctypes.CDLL(None, use_errno=True)
        size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        self._lib.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
        self._lib.mmap.restype = pointer
        self._lib.mprotect.argtypes = (pointer, size, number)
        self._lib.munmap.argtypes = (pointer, size)

    def mmap(self, address: int | None, num_bytes: int, flags: int, fd: int, offset: int) -> int:
        """Map without access and return the address."""
        result = self._lib.mmap(address, num_bytes, PROT_NONE, flags, fd, offset)
        if result is None or result == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap failed")
        return int(result)

    def make_accessible(self, address: int, num_bytes: int) -> None:
        """Allow reads and writes."""
        if self._lib.mprotect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def munmap(self, address: int, num_bytes: int) -> None:
        """Unmap a range."""
        if self._lib.munmap(address, num_bytes):
            raise OSError(ctypes.get_errno(), "munmap failed")


class PerGranuleHostBuffer:
    """The plain host version: reserve, then extend the memfd, map and unprotect each granule."""

    def __init__(self, libc: Libc, max_num_bytes: int, granularity: int) -> None:
        """Reserve `max_num_bytes` of address space."""
        self._libc = libc
        self._max_num_bytes = max_num_bytes
        self._granularity = granularity
        self._granules: set[int] = set()
        self._num_bytes = 0
        self._fd = os.memfd_create("per_granule_peer")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._base = libc.mmap(None, max_num_bytes, flags, -1, 0)

    def commit(self, num_bytes: int) -> None:
        """Back the first `num_bytes` bytes."""
        first = self._num_bytes // self._granularity
        for granule in range(first, -(-num_bytes // self._granularity)):
            if granule not in self._granules:
                self._commit_granule(granule)
        self._num_bytes = num_bytes

    def free(self) -> None:
        """Unmap everything and close the memfd."""
        self._libc.munmap(self._base, self._max_num_bytes)
        os.close(self._fd)

    def _commit_granule(self, granule: int) -> None:
        offset = granule * self._granularity
        os.ftruncate(self._fd, offset + self._granularity)
        flags = mmap.MAP_SHARED | MAP_FIXED
        self._libc.mmap(self._base + offset, self._granularity, flags, self._fd, offset)
        self._libc.make_accessible(self._base + offset, self._granularity)
        self._granules.add(granule)


def host_tensor(max_num_bytes: int, granularity: int | None) -> extkv.ExtensibleTensor:
    """Return an empty tensor on the host device."""
    return extkv.ExtensibleTensor(max_num_bytes, "cpu", granularity=granularity)


def time_peer_steps(libc: Libc, num_steps: int) -> float:
    """Return the peer's time per 2 MiB step in microseconds."""
    buffer = PerGranuleHostBuffer(libc, num_steps * STEP_BYTES, STEP_BYTES)

    def grow() -> None:
        for step in range(1, num_steps + 1):
            buffer.commit(step * STEP_BYTES)

    elapsed_us = host_us(grow)
    buffer.free()
    return elapsed_us / num_steps


def time_steps(
    num_steps: int, granularity: int | None, growth: Literal["geometric", "exact"] = "geometric"
) -> float:
    """Return extkv's time per 2 MiB step of `resize_per_segment_` in microseconds."""
    max_num_bytes = num_steps * STEP_BYTES
    with extkv.ExtensibleTensor(
        max_num_bytes, "cpu", granularity=granularity, growth=growth
    ) as tensor:

        def grow() -> None:
            for step in range(1, num_steps + 1):
                tensor.resize_per_segment_(step * STEP_BYTES)

        return host_us(grow) / num_steps


def time_append_steps(num_steps: int) -> float:
    """Return extkv's time per 2 MiB `append`, which also makes a torch view, in microseconds."""
    with host_tensor(num_steps * STEP_BYTES, None) as tensor:

        def grow() -> None:
            for _ in range(num_steps):
                tensor.append(STEP_BYTES)

        return host_us(grow) / num_steps


def time_one_growth(num_granules: int, granularity: int) -> float:
    """Return the time of one call that commits `num_granules` granules, in microseconds."""
    with host_tensor(num_granules * granularity, granularity) as tensor:
        return host_us(lambda: tensor.resize_per_segment_(num_granules * granularity))


def time_peer_growth(libc: Libc, num_granules: int, granularity: int) -> float:
    """Return the peer's time to commit `num_granules` granules, in microseconds."""
    buffer = PerGranuleHostBuffer(libc, num_granules * granularity, granularity)
    elapsed_us = host_us(lambda: buffer.commit(num_granules * granularity))
    buffer.free()
    return elapsed_us


def time_stats(tensor: extkv.ExtensibleTensor) -> float:
    """Return the time of one `stats()` in microseconds, over many calls."""

    def call() -> None:
        for _ in range(NUM_STATS_CALLS):
            tensor.stats()

    return host_us(call) / NUM_STATS_CALLS


def bench_steps(report: Report, libc: Libc, rounds: int) -> None:
    """Commit 1 GiB in 2 MiB steps."""
    num_steps = GIB // STEP_BYTES
    peers: dict[str, Callable[[], float]] = {
        "mmap + mprotect per granule": lambda: time_peer_steps(libc, num_steps),
        "extkv granularity=2 MiB": lambda: time_steps(num_steps, 2 * MIB),
        "extkv granularity=2 MiB, exact": lambda: time_steps(num_steps, 2 * MIB, "exact"),
        "extkv granularity=default": lambda: time_steps(num_steps, None),
        "extkv granularity=default, exact": lambda: time_steps(num_steps, None, "exact"),
        "extkv append, with its view": lambda: time_append_steps(num_steps),
    }
    samples = alternate(peers, rounds, warmup_rounds=1)
    first: Row | None = None
    for name, timed in samples.items():
        row = report.add("1 GiB in 2 MiB steps, per step", name, timed, peer=first)
        first = first or row
        if name.startswith("extkv granularity"):
            report.at_most(f"{name}: us per 2 MiB step", row.summary.median_us, 10)


def bench_stats(report: Report, rounds: int) -> None:
    """Call `stats()` on a small and on a huge, partly committed reservation."""
    with host_tensor(MIB, None) as small, host_tensor(TIB, None) as huge:
        small.resize_per_segment_(MIB)
        huge.resize_per_segment_(GIB)
        samples = alternate(
            {
                "1 MiB reservation": lambda: time_stats(small),
                "1 TiB reservation, 1 GiB committed": lambda: time_stats(huge),
            },
            rounds,
            warmup_rounds=1,
        )
    rows: list[Row] = []
    for name, timed in samples.items():
        rows.append(report.add("stats()", name, timed, peer=rows[0] if rows else None))
    report.at_most("stats(): 1 TiB over 1 MiB", rows[1].time_ratio or 0.0, 1.5)


def bench_growth_size(report: Report, libc: Libc, rounds: int) -> None:
    """Commit k granules of 64 KiB in one call, for growing k."""
    granularity = 64 * 1024
    rows: list[Row] = []
    for num_granules in (1, 16, 256, 4096, 16384):
        peers: dict[str, Callable[[], float]] = {
            "mmap + mprotect per granule": partial(
                time_peer_growth, libc, num_granules, granularity
            ),
            "extkv one call": partial(time_one_growth, num_granules, granularity),
        }
        samples = alternate(peers, rounds, warmup_rounds=1)
        shape = f"{num_granules} granules of 64 KiB"
        names = list(samples)
        peer = report.add(shape, names[0], samples[names[0]])
        rows.append(report.add(shape, names[1], samples[names[1]], peer=peer))
    growth = rows[-1].summary.median_us - rows[0].summary.median_us
    report.at_most("one call: added us per added granule", growth / 16383, 0.1)


def main() -> None:
    """Run all parts."""
    arguments = argument_parser(__doc__).parse_args()
    rounds = 5 if arguments.quick else 21
    report = Report("bench_host", arguments)
    libc = Libc()
    bench_steps(report, libc, rounds)
    bench_stats(report, rounds)
    bench_growth_size(report, libc, rounds)
    report.finish()


if __name__ == "__main__":
    main()
