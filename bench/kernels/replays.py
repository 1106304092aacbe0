"""Device time of kernels by CUDA graph replay, peers in turn, on inputs that rotate past the L2.

A graph runs an operation once on each of its input sets; the time of a replay over the number of
sets is one sample. Launch cost on the host does not count: an engine replays graphs too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.timing import MIB, Report, Row, alternate, cuda_event_us

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEVICE = torch.device("cuda", 0)
# Several times the 50 MiB of an H200's L2.
_ROTATED_BYTES = 384 * MIB
_MAX_SETS = 96


def num_input_sets(bytes_per_set: int) -> int:
    """Return how many input sets keep repeated runs out of the L2."""
    return max(2, min(_MAX_SETS, -(-_ROTATED_BYTES // max(bytes_per_set, 1))))


class Replayed:
    """A captured graph of one operation per input set."""

    def __init__(self, operations: Sequence[Callable[[], object]]) -> None:
        """Run every operation once, so that kernels are compiled, and capture them all."""
        self._num_operations = len(operations)
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for operation in operations:
                operation()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for operation in operations:
                operation()

    def __call__(self) -> float:
        """Return the device time of one operation in microseconds."""
        return cuda_event_us(self._graph.replay) / self._num_operations


def compare(
    report: Report,
    shape: str,
    peers: Mapping[str, Sequence[Callable[[], object]]],
    *,
    num_bytes: int,
    rounds: int,
    num_flops: int | None = None,
) -> dict[str, Row]:
    """Time the peers in turn and add one row each; the first is the reference.

    Args:
        report: Receives the rows.
        shape: Shapes and dtype of the case.
        peers: Operations by name, one per input set.
        num_bytes: Bytes that an operation must move at least.
        rounds: Samples per peer.
        num_flops: Floating-point operations, for the TFLOP/s beside the row.
    """
    timed: dict[str, Callable[[], float]] = {
        name: Replayed(operations) for name, operations in peers.items()
    }
    samples = alternate(timed, rounds, warmup_rounds=3)
    rows: dict[str, Row] = {}
    first: Row | None = None
    for name in peers:
        extra: dict[str, object] = {}
        if num_flops is not None:
            median = sorted(samples[name])[rounds // 2]
            extra["tflop_per_s"] = round(num_flops / median / 1e6, 2)
        row = report.add(shape, name, samples[name], num_bytes=num_bytes, peer=first, extra=extra)
        if extra:
            print(f"    {extra['tflop_per_s']} TFLOP/s", flush=True)
        first = first or row
        rows[name] = row
    return rows


def copy_gb_per_s() -> float:
    """Return the bandwidth of a 2 GiB device copy, bytes read plus bytes written."""
    source = torch.randint(0, 255, (2048 * MIB,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    samples = sorted(cuda_event_us(lambda: target.copy_(source)) for _ in range(9))
    return 2 * source.numel() / samples[4] / 1e3
