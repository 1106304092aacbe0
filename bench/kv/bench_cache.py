"""Cost of a whole KV cache: commit, growth under load, Python calls, attention over grown blocks.

Run from the repository root: `python -m bench.kv.bench_cache --out FILE`.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from extkv.kv import FullAttentionSpec, KVCache, Layer, Layout, plan_cache

from bench.memory.bench_commit import REGIMES, AfterUse, CuMemAllocPeer
from bench.memory.bench_growth_under_load import NUM_DROPPED_COPIES, CopyLoad
from bench.memory.cuda_driver import CudaDriver
from bench.timing import GIB, Report, alternate, argument_parser, cuda_event_us, host_us

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LAYERS = 64
SPEC = FullAttentionSpec(16, 8, 128, "bfloat16")
LAYERS = [Layer(f"layers.{index}", SPEC) for index in range(NUM_LAYERS)]


class CacheCommit:
    """`commit` of a new cache of 64 layers with two segments each."""

    def __init__(self, num_bytes: int, reserve_factor: int) -> None:
        """Remember the sizes; reserves nothing."""
        self._num_bytes = num_bytes
        self._reserve_factor = reserve_factor
        self.num_handles = 0

    def __call__(self) -> float:
        """Return the host time of the commit, zeroing included, in microseconds."""
        cache = KVCache.reserve(
            LAYERS, max_bytes=self._num_bytes * self._reserve_factor, device="cuda"
        )
        num_blocks = self._num_bytes // cache.bytes_per_block
        elapsed_us = host_us(lambda: cache.commit(num_blocks))
        self.num_handles = cache.stats().num_handles
        cache.close()
        torch.cuda.synchronize()
        return elapsed_us

    def extra(self) -> dict[str, object]:
        """Return the untimed facts."""
        return {"num_handles": self.num_handles}


class ZeroedPeer(CuMemAllocPeer):
    """One cuMemAlloc of the same size, zeroed by cuMemsetD8."""

    def __call__(self) -> float:
        """Return the host time in microseconds; frees and synchronizes after."""
        start = time.perf_counter_ns()
        address = self._driver.mem_alloc(self._num_bytes)
        self._driver.memset_d8(address, 0, self._num_bytes)
        torch.cuda.synchronize()
        elapsed_us = (time.perf_counter_ns() - start) / 1e3
        self._driver.mem_free(address)
        torch.cuda.synchronize()
        return elapsed_us


def bench_commit(report: Report, rounds: int, num_bytes: int) -> None:
    """Compare the commit of a whole cache with one zeroed cuMemAlloc."""
    driver = CudaDriver()
    gib = num_bytes // GIB
    for regime, settle_s in REGIMES.items():
        peers: dict[str, AfterUse] = {
            "cuMemAlloc + memset": AfterUse(
                driver, num_bytes, settle_s, ZeroedPeer(driver, num_bytes)
            ),
            "extkv KVCache.commit": AfterUse(
                driver, num_bytes, settle_s, CacheCommit(num_bytes, 1)
            ),
            "extkv KVCache.commit, half of the reservation": AfterUse(
                driver, num_bytes, settle_s, CacheCommit(num_bytes, 2)
            ),
        }
        timed: dict[str, Callable[[], float]] = dict(peers)
        samples = alternate(timed, rounds)
        first = None
        for name, peer in peers.items():
            row = report.add(
                f"{NUM_LAYERS} layers x 2 segments, {gib} GiB, {regime}",
                name,
                samples[name],
                num_bytes=num_bytes,
                peer=first,
                extra=peer.extra(),
            )
            first = first or row
            if row.time_ratio is not None:
                report.at_most(f"{name}, {regime}: time over cuMemAlloc", row.time_ratio, 1.15)


GROWING_LAYERS = {
    "64 layers K/V-split, 128 segments": LAYERS,
    "64 layers block-major, 64 segments": [
        Layer(f"layers.{index}", SPEC, Layout.block_major(SPEC)) for index in range(NUM_LAYERS)
    ],
    "one stack BLHNC, 1 segment": [
        Layer.stacked(f"layers.{index}", SPEC, "BLHNC") for index in range(NUM_LAYERS)
    ],
}


def bench_growth(report: Report, name: str, layers: list[Layer], num_bytes: int) -> None:
    """Grow a serving cache from 50 to 100 % of `num_bytes`, 1 % at a time, while copies run."""
    cache = KVCache.reserve(layers, max_bytes=2 * num_bytes, device="cuda")
    step = max(1, num_bytes // cache.bytes_per_block // 100)
    cache.commit(50 * step)
    time.sleep(1.0)
    load = CopyLoad(4 * GIB, torch.cuda.Stream("cuda"))
    quiet_us = load.run(lambda: True, at_least=40)[NUM_DROPPED_COPIES:]

    def grow() -> list[float]:
        times_us = []
        for percent in range(51, 101):
            times_us.append(host_us(lambda p=percent: cache.commit(p * step)))
            time.sleep(0.02)
        return times_us

    shape = f"growth by 1 %, {name}"
    with ThreadPoolExecutor(max_workers=1) as worker:
        future = worker.submit(grow)
        busy_us = load.run(future.done, at_least=1)
        growth = report.add(shape, "growth under load (host)", future.result())
    quiet = report.add(shape, "copy, quiet (device)", quiet_us)
    busy = report.add(shape, "copy, growing", busy_us, peer=quiet)
    report.at_most(f"{shape}: p99, ms", growth.summary.p99_us / 1e3, 5.0)
    if busy.time_ratio is not None:
        report.at_most(f"{shape}: copy median over quiet", busy.time_ratio, 1.02)
    cache.close()
    del load
    torch.cuda.empty_cache()


def bench_python(report: Report, device: str) -> None:
    """Show that Python's cost does not grow with the number of blocks."""
    rows = []
    for num_blocks in (100, 100_000):
        cache = KVCache.reserve(LAYERS, max_blocks=num_blocks, device=device)
        times_us = [host_us(cache.tensors) for _ in range(50)]
        rows.append(
            report.add(
                f"tensors() of {NUM_LAYERS} layers",
                f"{num_blocks} blocks",
                times_us,
                peer=rows[0] if rows else None,
            )
        )
        cache.close()
    if rows[1].time_ratio is not None:
        report.at_most("tensors(): 100,000 blocks over 100", rows[1].time_ratio, 1.2)
    plan_us = [host_us(lambda: plan_cache(LAYERS, max_blocks=100_000)) for _ in range(20)]
    report.add("plan_cache of 64 layers", "100000 blocks", plan_us)


def bench_attention(report: Report, rounds: int) -> None:
    """Attend over gathered blocks of a grown cache and of the same cache from torch.empty."""
    num_blocks = 60_000
    grown = KVCache.reserve({"a": SPEC}, max_blocks=num_blocks, device="cuda")
    for percent in range(10, 101, 10):
        grown.commit(max(1, num_blocks * percent // 100))
    tensor = grown.tensors()["a"]
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    tensor.normal_()
    plain.copy_(tensor)
    generator = torch.Generator(device="cuda").manual_seed(0)
    table = torch.randint(0, num_blocks, (64, 256), device="cuda", generator=generator)
    query = torch.randn(64, 32, 1, 128, dtype=torch.bfloat16, device="cuda")

    def attend(cache: torch.Tensor) -> torch.Tensor:
        keys = cache[0][table].flatten(1, 2).transpose(1, 2)
        values = cache[1][table].flatten(1, 2).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, enable_gqa=True
        )

    if not torch.equal(attend(tensor), attend(plain)):
        raise SystemExit("attention over the grown cache differs")
    peers: dict[str, Callable[[], float]] = {
        "torch.empty": lambda: cuda_event_us(lambda: attend(plain)),
        "extkv, grown in ten steps": lambda: cuda_event_us(lambda: attend(tensor)),
    }
    samples = alternate(peers, rounds)
    first = report.add("gather and SDPA, 64 x 4096 tokens", "torch.empty", samples["torch.empty"])
    name = "extkv, grown in ten steps"
    row = report.add("gather and SDPA, 64 x 4096 tokens", name, samples[name], peer=first)
    if row.time_ratio is not None:
        report.at_most("attention over a grown cache, time over torch.empty", row.time_ratio, 1.01)
    grown.close()


def main() -> None:
    """Run all parts that the machine can."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repeats per peer")
    arguments = parser.parse_args()
    # A growth ends in Python: it must not wait 5 ms for the interpreter lock.
    sys.setswitchinterval(1e-4)
    report = Report("bench_cache", arguments)
    bench_python(report, "cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        bench_attention(report, 60)
        torch.cuda.empty_cache()
        for name, layers in GROWING_LAYERS.items():
            bench_growth(report, name, layers, 100 * GIB)
        bench_commit(report, arguments.rounds, 100 * GIB)
    report.finish()


if __name__ == "__main__":
    main()
