"""Decode steps of a Qwen3-8B shape with random weights, against the bytes they must read.

Run from the repository root: `python -m bench.engine.bench_decode --out FILE`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from extkv.engine.llm import LLM
from extkv.engine.sampling_params import SamplingParams
from extkv.models import QWEN3_8B, GenerationDefaults, LoadedModel, kernel_ops, random_model

from bench.timing import GIB, Report, argument_parser, cuda_event_us

# Step times of vLLM 0.25.0 on one H200, from docs of the project's design; not of this run.
VLLM_STEP_MS = {1: 5.16, 8: 5.46, 64: 6.28, 256: 11.66}
NUM_STEPS = 60


class NumberTokenizer:
    """Tokens have no text."""

    vocab_size = QWEN3_8B.vocab_size
    stop_token_ids = frozenset({0})

    def decode(self, token_ids: list[int]) -> str:
        """Return nothing."""
        del token_ids
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return nothing."""
        del token_id
        return b""


def copy_bandwidth() -> float:
    """Return the bytes per second of a large device-to-device copy, reads and writes."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = sorted(cuda_event_us(lambda: target.copy_(source)) for _ in range(20))
    return 2 * GIB / (times[10] / 1e6)


def weight_bytes(llm: LLM) -> int:
    """Bytes of the weights that a decode step reads; the embedding is looked up only."""
    weights = llm.model.model.weights
    total = weights.lm_head.nbytes + weights.final_norm.nbytes
    for layer in weights.layers:
        total += sum(v.nbytes for v in vars(layer).values() if isinstance(v, torch.Tensor))
    return total


def step_times(llm: LLM, batch: int) -> tuple[list[float], float]:
    """Return host times of a full batch's decode steps and its graph's device time, in us."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_STEPS + 30, ignore_eos=True, detokenize=False
    )
    generator = torch.Generator().manual_seed(batch)
    sequences = []
    for _ in range(batch):
        prompt = torch.randint(1, QWEN3_8B.vocab_size, (32,), generator=generator).tolist()
        request = llm._add(prompt, params, 0)  # noqa: SLF001 the bench drives steps itself
        sequences += request.sequences
    while any(not sequence.token_ids for sequence in sequences):
        llm.engine.step()
    for _ in range(10):
        llm.engine.step()
    times_us = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter_ns()
        llm.engine.step()
        times_us.append((time.perf_counter_ns() - start) / 1e3)
    device_us = graph_time(llm, batch)
    while llm.engine.has_unfinished:
        llm.engine.step()
    return times_us, device_us


def graph_time(llm: LLM, batch: int) -> float:
    """Return the device time of one replay of the batch's graph in microseconds.

    Its inputs are those of the last step: it writes again what that step wrote.
    """
    graphs = llm.engine.runner._graphs  # noqa: SLF001 the bench looks inside
    size = graphs.size_for(batch)
    times = sorted(cuda_event_us(lambda: graphs.replay(size)) for _ in range(15))
    return times[7]


def main() -> None:
    """Measure start-up, cache size and decode steps."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_decode", arguments)
    torch.ones(1, device="cuda")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    model = random_model(
        QWEN3_8B, dtype=torch.bfloat16, device="cuda", max_model_len=4096, ops=kernel_ops()
    )
    torch.cuda.synchronize()
    built = time.perf_counter()
    loaded = LoadedModel(Path("qwen3-8b"), model, NumberTokenizer(), None, GenerationDefaults())
    llm = LLM(loaded, device="cuda", max_num_seqs=256)
    ready = time.perf_counter()
    print(llm.sizing_plan)
    report.add("start-up", "random weights", [(built - start) * 1e6])
    extra = {"plan": llm.sizing_plan.sentence, "parts": llm.sizing_plan.parts}
    report.add("start-up", "profile, capture, size", [(ready - built) * 1e6], extra=extra)
    floor_us = weight_bytes(llm) / bandwidth * 1e6
    report.add("decode step", "weight bytes over copy bandwidth", [floor_us])
    for batch in (1, 8, 64, 256):
        times_us, device_us = step_times(llm, batch)
        row = report.add(
            "decode step",
            f"batch {batch}",
            times_us,
            extra={"graph_us": device_us, "vllm_step_ms": VLLM_STEP_MS[batch]},
        )
        median_ms = row.summary.median_us / 1e3
        print(
            f"    graph {device_us / 1e3:.3f} ms, vLLM's step {VLLM_STEP_MS[batch]} ms", flush=True
        )
        report.at_most(f"batch {batch}: ms per step", median_ms, VLLM_STEP_MS[batch])
        if batch == 1:
            report.at_most("batch 1: over the weight floor", median_ms * 1e3 / floor_us, 1.25)
    free = torch.cuda.mem_get_info()[0]
    kv_gib = llm.kv_cache.stats().logical_bytes / GIB
    report.at_least("KV committed, GiB", kv_gib, 120.5)
    report.at_most("free after the load, GiB", free / GIB, 1.5)
    report.finish()


if __name__ == "__main__":
    main()
