"""What a wrong estimate costs: size first and capture later, against capture first and size after.

A stand-in for an engine on one GPU: weights, a step with a transient peak, and graphs whose memory
nobody knows before they are captured. The peer sizes its cache from a utilization and an estimate
of the graphs, as engines do; extkv measures.

Run from the repository root: `python -m bench.kv.bench_sizing --out FILE`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from extkv.kv import FullAttentionSpec, Layer, SizeAfterCapture

from bench.timing import GIB, MIB, Report, argument_parser, host_us

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = FullAttentionSpec(16, 8, 128, "bfloat16")
LAYERS = [Layer(f"layers.{index}", SPEC) for index in range(36)]
BYTES_PER_BLOCK = 36 * SPEC.bytes_per_block
WEIGHT_BYTES = 16 * GIB
GRAPH_BYTES = 5 * GIB
PEAK_BYTES = 2 * GIB


class StandInEngine:
    """Weights, graphs and a worst step of known size, all from torch's allocator."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.weights: torch.Tensor | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.pools: list[torch.Tensor] = []

    def load(self) -> None:
        """Put the weights on the device."""
        self.weights = torch.ones(WEIGHT_BYTES, dtype=torch.uint8, device="cuda")

    def worst_step(self) -> None:
        """Take the transient peak and give it back to the allocator."""
        torch.ones(PEAK_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def capture(self) -> None:
        """Capture graphs whose private pools hold `GRAPH_BYTES` together."""
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.pools.append(torch.zeros(GRAPH_BYTES // 5, dtype=torch.uint8, device="cuda"))
            self.graphs.append(graph)

    def release(self) -> None:
        """Give everything back."""
        self.weights = None
        self.pools.clear()
        self.graphs.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Free memory as the driver says."""
    return int(torch.cuda.mem_get_info()[0])


def size_first(utilization: float, estimated_graph_bytes: int) -> dict[str, object]:
    """Size from a profile and an estimate, then capture, then run the worst step."""
    engine = StandInEngine()
    engine.load()
    torch.cuda.reset_peak_memory_stats()
    engine.worst_step()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    used = total - free_bytes()
    budget = int(total * utilization) - used - PEAK_BYTES - estimated_graph_bytes
    num_blocks = budget // BYTES_PER_BLOCK
    result: dict[str, object] = {"num_blocks": num_blocks, "kv_bytes": num_blocks * BYTES_PER_BLOCK}
    held: list[torch.Tensor] = []
    try:
        held.append(torch.zeros(num_blocks * BYTES_PER_BLOCK, dtype=torch.uint8, device="cuda"))
        engine.capture()
        engine.worst_step()
        torch.cuda.empty_cache()
        result["unused_bytes"] = free_bytes() - PEAK_BYTES
        result["out_of_memory"] = False
    except torch.OutOfMemoryError:
        result["out_of_memory"] = True
    held.clear()
    engine.release()
    return result


def size_after() -> dict[str, object]:
    """Reserve, capture, measure, commit, then run the worst step."""
    engine = StandInEngine()
    sizer = SizeAfterCapture(LAYERS, device="cuda", max_model_len=4096)
    sizer.weights_loaded(engine.load)
    sizer.profile(engine.worst_step)
    cache = sizer.reserve()
    sizer.capture(engine.capture)
    sizer.measure(engine.worst_step)
    plan = sizer.plan()
    commit_us = host_us(sizer.commit)
    engine.worst_step()
    torch.cuda.empty_cache()
    result: dict[str, object] = {
        "num_blocks": cache.num_blocks,
        "kv_bytes": cache.num_blocks * BYTES_PER_BLOCK,
        "unused_bytes": free_bytes() - PEAK_BYTES,
        "out_of_memory": False,
        "commit_us": commit_us,
        "plan": plan.sentence,
        "parts": plan.parts,
    }
    cache.close()
    engine.release()
    return result


def show(report: Report, name: str, run: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Run one way to size and add a row; the time is of the whole start."""
    results: list[dict[str, object]] = []
    elapsed_us = host_us(lambda: results.append(run()))
    result = results[0]
    report.add("start-up of a 16 GiB model with 5 GiB of graphs", name, [elapsed_us], extra=result)
    kv = int(str(result["kv_bytes"])) / GIB
    end = (
        "OUT OF MEMORY"
        if result["out_of_memory"]
        else f"{int(str(result['unused_bytes'])) / MIB:.0f} MiB unused"
    )
    print(f"    KV {kv:.1f} GiB, {end}", flush=True)
    return result


def main() -> None:
    """Compare both ways."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_sizing", arguments)
    torch.ones(1, device="cuda")
    low = show(report, "size first, utilization 0.92", lambda: size_first(0.92, GIB))
    high = show(report, "size first, utilization 0.98", lambda: size_first(0.98, GIB))
    after = show(report, "extkv: size after capture", size_after)
    is_worse = bool(high["out_of_memory"]) or bool(low["out_of_memory"])
    unused = int(str(low.get("unused_bytes", 0))) - int(str(after["unused_bytes"]))
    report.at_least("0.92 leaves unused more than extkv, GiB", unused / GIB, 1.0)
    report.at_least("0.98 runs out of memory (1 is yes)", float(is_worse), 1.0)
    gain = int(str(after["kv_bytes"])) / int(str(low["kv_bytes"]))
    report.at_least("KV committed over size first at 0.92", gain, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
