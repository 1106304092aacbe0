"""Drafting with a random drafter of the published shape beside a Qwen3-8B shape, weights random.

Acceptance is synthetic (0.7, 0.5, 0.3, …): the text means nothing, the work is real. Tokens per
second stand beside the same engine's without drafts, the draft round beside the bytes it must read.

Run from the repository root: `python -m bench.engine.bench_drafting --out FILE`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from extkv.engine.llm import LLM
from extkv.models import QWEN3_8B, GenerationDefaults, LoadedModel, kernel_ops, random_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams

from bench.engine.bench_decode import NumberTokenizer, copy_bandwidth
from bench.timing import GIB, Report, argument_parser, cuda_event_us

if TYPE_CHECKING:
    from extkv.models.dspark import DSparkModel

NUM_DRAFTS = 7
RATES = [0.7, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3]
# vLLM 0.25.0 on one H200 with DSpark, from the project's design; not of this run.
VLLM_STEP_MS = {1: 6.83, 8: 7.15, 64: 18.6}
VLLM_ROUND_US = {1: 1302, 64: 3648}
STEP_TARGET_MS = {1: 6.0, 64: 15.0}


def run_batch(llm: LLM, batch: int, num_tokens: int) -> tuple[float, list[float]]:
    """Return tokens per second of a full batch, and the host times of its steps in us."""
    params = SamplingParams(
        temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=5
    )
    generator = torch.Generator().manual_seed(batch)
    sequences = []
    for _ in range(batch):
        prompt = torch.randint(1, QWEN3_8B.vocab_size, (32,), generator=generator).tolist()
        sequences += llm._add(prompt, params, 0).sequences  # noqa: SLF001 drives steps itself
    while any(not sequence.token_ids for sequence in sequences):
        llm.engine.step()
    for _ in range(5):
        llm.engine.step()
    before, start = sum(len(s.token_ids) for s in sequences), time.perf_counter()
    times_us = []
    # Only while all sequences run.
    while all(len(s.token_ids) < num_tokens - 2 - NUM_DRAFTS for s in sequences):
        step_start = time.perf_counter_ns()
        llm.engine.step()
        times_us.append((time.perf_counter_ns() - step_start) / 1e3)
    elapsed = time.perf_counter() - start
    rate = (sum(len(s.token_ids) for s in sequences) - before) / elapsed
    while llm.engine.has_unfinished:
        llm.engine.step()
    return rate, times_us


def make(draft: DSparkModel | None, model: LoadedModel) -> LLM:
    """Make the engine."""
    speculative = None
    if draft is not None:
        speculative = {
            "method": "dspark",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": RATES,
        }
    return LLM(model, draft, speculative_config=speculative, device="cuda", max_num_seqs=256)


def round_bytes(draft: DSparkModel) -> int:
    """Bytes that a round of one sequence must read: backbone, head, Markov matrix per step."""
    weights = draft.weights.backbone
    backbone = weights.num_bytes - weights.embedding.nbytes - weights.lm_head.nbytes
    markov = 0 if draft.markov_weight is None else NUM_DRAFTS * draft.markov_weight.nbytes
    return backbone + draft.lm_head.nbytes + markov


def draft_round_us(llm: LLM, batch: int) -> float:
    """Return the device time of a draft round in us."""
    graphs = llm.engine.runner.speculator._graphs  # noqa: SLF001 the bench looks inside
    size = graphs.size_for(batch)
    return sorted(cuda_event_us(lambda: graphs.replay(size)) for _ in range(9))[4]


def main() -> None:
    """Measure without drafts, then with them."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_drafting", arguments)
    torch.ones(1, device="cuda")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    ops = kernel_ops()
    target = random_model(
        QWEN3_8B, dtype=torch.bfloat16, device="cuda", max_model_len=4096, ops=ops
    )
    loaded = LoadedModel(Path("qwen3-8b"), target, NumberTokenizer(), None, GenerationDefaults())
    batches = (1, 64) if arguments.quick else (1, 8, 64)
    rates, llm = {}, make(None, loaded)
    for batch in batches:
        rates[batch], times = run_batch(llm, batch, 80)
        extra = {"tokens_per_second": rates[batch]}
        report.add("plain step", f"batch {batch}", times, extra=extra)
    llm.close()
    del llm
    torch.cuda.empty_cache()
    config = drafter_config(QWEN3_8B)
    draft = random_drafter(
        config, target, dtype=torch.bfloat16, device="cuda", max_model_len=4096, ops=ops
    )
    llm = make(draft, loaded)
    print(llm.sizing_plan)
    floor_us = round_bytes(draft) / bandwidth * 1e6
    report.add("draft round", "bytes over copy bandwidth, batch 1", [floor_us])
    for batch in batches:
        rate, times = run_batch(llm, batch, 200)
        counts = llm.draft_counts
        round_us = draft_round_us(llm, batch)
        extra = {
            "tokens_per_second": rate,
            "over_plain": rate / rates[batch],
            "accepted_length": counts.accepted_length,
            "draft_round_us": round_us,
            "vllm_step_ms": VLLM_STEP_MS[batch],
            "vllm_round_us": VLLM_ROUND_US.get(batch),
        }
        row = report.add("step with drafts", f"batch {batch}", times, extra=extra)
        print(
            f"    {rate:.0f} tokens/s, {rate / rates[batch]:.2f} x plain, accepted length "
            f"{counts.accepted_length:.2f}, draft round {round_us:.0f} us",
            flush=True,
        )
        step_ms = row.summary.median_us / 1e3
        report.at_most(f"batch {batch}: ms per step (vLLM)", step_ms, VLLM_STEP_MS[batch])
        if batch in STEP_TARGET_MS:
            report.at_most(f"batch {batch}: ms per step", step_ms, STEP_TARGET_MS[batch])
        if batch == 1:
            report.at_most("draft round at batch 1: over its bytes", round_us / floor_us, 1.3)
    kv_gib = llm.kv_cache.stats().logical_bytes / GIB
    report.at_least("KV committed, GiB", kv_gib, 115)
    run_batch(llm, 256, 40)
    report.at_most("free after 256 sequences, GiB", torch.cuda.mem_get_info()[0] / GIB, 3)
    report.finish()


if __name__ == "__main__":
    main()
