"""Decode steps of a Qwen3-8B shape with random weights, against the bytes they must read.

Also: start-up of a fresh process, the size of the KV cache and what a load of 256 requests leaves
free, and transformers' eager `generate` with the same weights in the same process.

Run from the repository root: `python -m bench.engine.bench_decode --out FILE`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from extkv.engine.llm import LLM
from extkv.models import QWEN3_8B, GenerationDefaults, LoadedModel, kernel_ops, random_model
from extkv.sampling_params import SamplingParams

from bench.timing import GIB, Report, argument_parser, cuda_event_us

if TYPE_CHECKING:
    import argparse

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


def read_bytes(llm: LLM) -> int:
    """Bytes of the weights that a decode step reads; the embedding is looked up only."""
    weights = llm.model.model.weights
    return weights.num_bytes - weights.embedding.nbytes


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
    graphs = llm.engine.runner._graphs[1]  # noqa: SLF001 the bench looks inside
    size = graphs.size_for(batch)
    times = sorted(cuda_event_us(lambda: graphs.replay(size)) for _ in range(15))
    return times[7]


def make_llm() -> tuple[LLM, dict[str, float]]:
    """Make the engine, and say how many seconds each phase of its start took."""
    start = time.perf_counter()
    model = random_model(
        QWEN3_8B, dtype=torch.bfloat16, device="cuda", max_model_len=4096, ops=kernel_ops()
    )
    torch.cuda.synchronize()
    loaded = LoadedModel(Path("qwen3-8b"), model, NumberTokenizer(), None, GenerationDefaults())
    phases = {"random weights": time.perf_counter() - start}
    start = time.perf_counter()
    llm = LLM(loaded, device="cuda", max_num_seqs=256)
    phases["profile, capture, size"] = time.perf_counter() - start
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([list(range(1, 33))], params, use_tqdm=False)
    phases["first token"] = time.perf_counter() - start
    return llm, phases


def process_start_s() -> float:
    """Return the seconds from the start of a process to its first token, caches warm."""
    command = [sys.executable, "-m", "bench.engine.bench_decode", "--start-only"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def generate_s(llm: LLM, prompt: list[int], num_tokens: int) -> float:
    """Return the seconds of one answer by the engine."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start


def transformers_generate_s(llm: LLM, prompt: list[int], num_tokens: int) -> list[float]:
    """Return the seconds of answers by transformers, over the same weights."""
    from extkv.models.weights import slot_view, weight_slots
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=QWEN3_8B.vocab_size,
        hidden_size=QWEN3_8B.hidden_size,
        intermediate_size=QWEN3_8B.intermediate_size,
        num_hidden_layers=QWEN3_8B.num_layers,
        num_attention_heads=QWEN3_8B.num_heads,
        num_key_value_heads=QWEN3_8B.num_kv_heads,
        head_dim=QWEN3_8B.head_dim,
        rms_norm_eps=QWEN3_8B.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": QWEN3_8B.rope_theta},
        max_position_embeddings=QWEN3_8B.context_length,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config, device="cuda")
    weights = llm.model.model.weights
    state = {slot.name: slot_view(weights, slot) for slot in weight_slots(QWEN3_8B)}
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = rotary
    model.eval()
    token_ids = torch.tensor([prompt], device="cuda")
    options = {
        "attention_mask": torch.ones_like(token_ids),
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(token_ids, **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def compare_with_transformers(llm: LLM, report: Report) -> None:
    """Time one answer of 64 tokens by both; closes the engine's cache in between."""
    prompt, num_tokens = list(range(1, 33)), 64
    ours = [generate_s(llm, prompt, num_tokens) for _ in range(4)][1:]
    llm.close()
    torch.cuda.empty_cache()
    theirs = transformers_generate_s(llm, prompt, num_tokens)
    shape = f"generate, batch 1, {num_tokens} tokens"
    peer = report.add(shape, "transformers, eager", [s * 1e6 for s in theirs])
    row = report.add(shape, "extkv", [s * 1e6 for s in ours], peer=peer)
    if row.time_ratio is not None:
        report.at_least("generate: transformers' time over ours", 1 / row.time_ratio, 8)


def run(arguments: argparse.Namespace) -> None:
    """Measure start-up, cache size and decode steps."""
    report = Report("bench_decode", arguments)
    torch.ones(1, device="cuda")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    llm, phases = make_llm()
    print(llm.sizing_plan)
    extra = {"plan": llm.sizing_plan.sentence, "parts": llm.sizing_plan.parts}
    for name, seconds in phases.items():
        report.add("start-up", name, [seconds * 1e6], extra=extra)
    floor_us = read_bytes(llm) / bandwidth * 1e6
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
    compare_with_transformers(llm, report)
    # Weights too: the fresh process takes the whole device.
    del llm
    torch.cuda.empty_cache()
    seconds = process_start_s()
    report.add("start-up", "process start to first token, warm caches", [seconds * 1e6])
    report.at_most("process start to first token, s", seconds, 20)
    report.finish()


def main() -> None:
    """Run all, or only a start."""
    parser = argument_parser(__doc__)
    parser.add_argument("--start-only", action="store_true", help="start the engine and end")
    arguments = parser.parse_args()
    if arguments.start_only:
        make_llm()
    else:
        run(arguments)


if __name__ == "__main__":
    main()
