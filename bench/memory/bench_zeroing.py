"""Bandwidth of `zero_new` against `tensor.zero_()` and cuMemsetD8 on the same memory.

The fill alone: the whole tensor is one physical handle, so shrinking to one granule gives nothing
back and growing again maps nothing; what is left of the call is the fill. All peers are timed on
the host clock from an idle device to an idle device.

Run from the repository root: `python -m bench.memory.bench_zeroing --out FILE`.
"""

from __future__ import annotations

import extkv
import torch

from bench.memory.bench_commit import driver_call_deltas
from bench.memory.cuda_driver import CudaDriver
from bench.timing import (
    GIB,
    MIB,
    Report,
    Row,
    alternate,
    argument_parser,
    cuda_event_us,
    synchronized_us,
)

DEVICE = "cuda:0"
WHOLE_RUN = 1024 * GIB
KEPT_BYTES = 2 * MIB
POISON = 0xAB
NUM_CHECKED_BYTES = 65_536


class ZeroingPeers:
    """One committed tensor of `num_bytes` and ways to zero all of it but the first 2 MiB."""

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Commit the tensor as one physical handle."""
        self._driver = driver
        self._num_bytes = num_bytes
        self.zeroed_bytes = num_bytes - KEPT_BYTES
        self.tensor = extkv.ExtensibleTensor(
            num_bytes, DEVICE, max_chunk_bytes=WHOLE_RUN, growth="exact"
        )
        self.tensor.resize_per_segment_(num_bytes)
        self.call_us: list[float] = []
        self.num_creates = 0

    def extkv_zero_new(self) -> float:
        """Return the time of a growth that only zeroes, in microseconds; checks the bytes."""
        self._poison()
        self.tensor.shrink_per_segment_(KEPT_BYTES)
        before = self.tensor.stats()
        elapsed_us = synchronized_us(
            lambda: self.tensor.resize_per_segment_(self._num_bytes, zero_new=True)
        )
        calls = driver_call_deltas(before, self.tensor.stats())
        names = ("fill", "synchronize")
        self.call_us.append(sum(calls[name]["total_us"] for name in names if name in calls))
        self.num_creates += int(calls["create"]["count"]) if "create" in calls else 0
        self._check_zeroed()
        return elapsed_us

    def torch_zero(self) -> float:
        """Return the time of `tensor.zero_()` over uint8, in microseconds."""
        view = self.tensor.tensor[KEPT_BYTES:]
        return synchronized_us(view.zero_)

    def torch_zero_event(self) -> float:
        """Return the device time of `tensor.zero_()` over uint8, in microseconds."""
        view = self.tensor.tensor[KEPT_BYTES:]
        return cuda_event_us(view.zero_)

    def torch_zero_int64(self) -> float:
        """Return the time of `zero_()` over the same bytes seen as int64, in microseconds."""
        view = self.tensor.tensor[KEPT_BYTES:].view(torch.int64)
        return synchronized_us(view.zero_)

    def cumemset(self) -> float:
        """Return the time of one cuMemsetD8, in microseconds."""
        start = self.tensor.base_ptr + KEPT_BYTES
        return synchronized_us(lambda: self._driver.memset_d8(start, 0, self.zeroed_bytes))

    def _poison(self) -> None:
        self._driver.memset_d8(self.tensor.base_ptr, POISON, self._num_bytes)
        torch.cuda.synchronize()

    def _check_zeroed(self) -> None:
        view = self.tensor.tensor
        kept, new = view[:KEPT_BYTES], view[KEPT_BYTES:]
        sample = new[:: max(new.numel() // NUM_CHECKED_BYTES, 1)]
        is_zeroed = not bool(sample.any()) and not bool(new[-1:].any())
        if not (is_zeroed and bool((kept == POISON).all())):
            message = "zero_new did not zero the new bytes, or touched the old ones"
            raise RuntimeError(message)


def commit_and_zero(num_bytes: int, *, zero_new: bool) -> float:
    """Return the time of committing a new tensor with default chunks, in microseconds."""
    with extkv.ExtensibleTensor(num_bytes, DEVICE) as tensor:
        elapsed_us = synchronized_us(
            lambda: tensor.resize_per_segment_(num_bytes, zero_new=zero_new)
        )
    torch.cuda.synchronize()
    return elapsed_us


def bench_fill(report: Report, driver: CudaDriver, num_bytes: int, rounds: int) -> None:
    """Compare the fill alone with its peers at one size."""
    peers = ZeroingPeers(driver, num_bytes)
    samples = alternate(
        {
            "tensor.zero_()": peers.torch_zero,
            "tensor.zero_() (device time)": peers.torch_zero_event,
            "zero_() on an int64 view": peers.torch_zero_int64,
            "cuMemsetD8": peers.cumemset,
            "extkv zero_new": peers.extkv_zero_new,
        },
        rounds,
        warmup_rounds=2,
    )
    shape = f"fill {num_bytes // GIB} GiB"
    first: Row | None = None
    rows: dict[str, Row] = {}
    for name, timed in samples.items():
        row = report.add(shape, name, timed, num_bytes=peers.zeroed_bytes, peer=first)
        first = first or row
        rows[name] = row
    calls = peers.call_us[-rounds:]
    extra = {"num_creates": peers.num_creates}
    report.add(
        shape, "extkv fill + synchronize calls", calls, num_bytes=peers.zeroed_bytes, extra=extra
    )
    if peers.num_creates:
        print(f"    note: {peers.num_creates} handles were created, so this is not the fill alone")
    rate = rows["extkv zero_new"].gb_per_s or 0.0
    zero_rate = rows["tensor.zero_()"].gb_per_s or 0.0
    report.at_least(f"{shape}: zero_new bandwidth over zero_()", rate / zero_rate, 1.25)
    report.at_least(f"{shape}: zero_new bandwidth, TB/s", rate / 1e3, 4.3)
    peers.tensor.free(strict=True)
    torch.cuda.synchronize()


def bench_end_to_end(report: Report, num_bytes: int, rounds: int) -> None:
    """Time committing a new tensor without and with zeroing."""
    samples = alternate(
        {
            "extkv commit": lambda: commit_and_zero(num_bytes, zero_new=False),
            "extkv commit + zero_new": lambda: commit_and_zero(num_bytes, zero_new=True),
        },
        rounds,
        warmup_rounds=1,
    )
    shape = f"end to end {num_bytes // GIB} GiB"
    first: Row | None = None
    for name, timed in samples.items():
        row = report.add(shape, name, timed, num_bytes=num_bytes, peer=first)
        first = first or row


def main() -> None:
    """Run all sizes that fit."""
    arguments = argument_parser(__doc__).parse_args()
    rounds = 5 if arguments.quick else 15
    torch.ones(1, device=DEVICE)
    free_bytes, _ = torch.cuda.mem_get_info(0)
    wanted = (1, 4, 16) if arguments.quick else (1, 4, 16, 64)
    sizes = [gib * GIB for gib in wanted if (gib + 2) * GIB <= free_bytes]
    driver = CudaDriver()
    report = Report("bench_zeroing", arguments)
    for size in sizes:
        bench_fill(report, driver, size, rounds)
    for size in sizes:
        bench_end_to_end(report, size, min(rounds, 7))
    report.finish()


if __name__ == "__main__":
    main()
