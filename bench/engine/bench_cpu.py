"""SmolLM2 in float32 on the host: extkv's engine against transformers, and the memory of each.

Run from the repository root: `python -m bench.engine.bench_cpu --out FILE`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.engine.llm import LLM
from extkv.models import find_default_model
from extkv.sampling_params import SamplingParams

from bench.engine.cpu_memory import prompts
from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_THREADS = 2
# Sequences, prompt tokens, tokens of a run: every step but the first two of a run counts.
DECODE = ((1, 128, 24), (16, 128, 16))
PREFILL_TOKENS = 512
# As much as the weights and the KV cache take, and this.
MEMORY_ALLOWANCE = 300 * 10**6


class Extkv:
    """The engine as `LLM` sets it up; without prefix reuse, so that each prompt is computed."""

    def __init__(self) -> None:
        self.llm = LLM(device="cpu", max_model_len=1024, enable_prefix_caching=False)

    def times(self, token_ids: torch.Tensor, num_tokens: int) -> list[float]:
        """Return the seconds until every sequence has a token, then those of each step."""
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens + 8, ignore_eos=True, detokenize=False
        )
        marks = [time.perf_counter()]
        requests = [
            self.llm._add(prompt, params, 0)  # noqa: SLF001 the bench drives steps itself
            for prompt in token_ids.tolist()
        ]
        sequences = [sequence for request in requests for sequence in request.sequences]
        while any(not sequence.token_ids for sequence in sequences):
            self.llm.engine.step()
        marks.append(time.perf_counter())
        while len(marks) <= num_tokens:
            self.llm.engine.step()
            marks.append(time.perf_counter())
        for sequence in sequences:
            self.llm.engine.abort(sequence)
        return [end - start for start, end in itertools.pairwise(marks)]


class Transformers:
    """`generate` of transformers as it comes, with its dynamic cache and SDPA attention."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        path = find_default_model()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        )

    @torch.inference_mode()
    def times(self, token_ids: torch.Tensor, num_tokens: int) -> list[float]:
        """Return the seconds until every sequence has a token, then those of each step."""
        marks = [time.perf_counter()]

        def mark(ids: torch.Tensor, scores: torch.Tensor, **_options: object) -> torch.Tensor:
            del scores
            marks.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[mark],
        )
        return [end - start for start, end in itertools.pairwise(marks)]


def decode_us(
    peer: Extkv | Transformers, num_seqs: int, num_prompt: int, num_tokens: int
) -> Callable[[], float]:
    """Return a run that gives the median time of its decode steps, each run with new prompts."""
    state = {"seed": 0}

    def run() -> float:
        state["seed"] += 1
        times = peer.times(prompts(num_seqs, num_prompt, state["seed"]), num_tokens)
        return statistics.median(times[2:]) * 1e6

    return run


def prefill_us(peer: Extkv | Transformers) -> Callable[[], float]:
    """Return a run that gives the time until the first token of a new prompt."""
    state = {"seed": 100}

    def run() -> float:
        state["seed"] += 1
        return peer.times(prompts(1, PREFILL_TOKENS, state["seed"]), 1)[0] * 1e6

    return run


def memory(name: str) -> dict[str, int]:
    """Return what `cpu_memory` measures of one engine in a fresh process."""
    command = [sys.executable, "-m", "bench.engine.cpu_memory", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_memory(report: Report) -> None:
    """Print the peaks of both engines, and hold extkv to its plan."""
    ours, theirs = memory("extkv"), memory("transformers")
    report.environment["memory_bytes"] = {"extkv": ours, "transformers": theirs}
    for name, found in (("extkv", ours), ("transformers", theirs)):
        parts = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in found.items())
        print(f"memory of {name}, MB: {parts}", flush=True)
    planned = ours["weights"] + ours["kv"]
    own = ours["peak"] - ours["libraries"]
    report.at_most(
        "peak memory past the libraries, MB", own / 1e6, (planned + MEMORY_ALLOWANCE) / 1e6
    )
    report.at_most("peak memory over transformers'", ours["peak"] / theirs["peak"], 1.0)


def main() -> None:
    """Measure decode steps, prefill and memory."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="runs of each peer")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    report = Report("bench_cpu", arguments)
    report.environment["num_threads"] = NUM_THREADS
    # Above 0 at the start, or much above the number of threads at the end, others used the cores.
    report.environment["load_average_at_start"] = os.getloadavg()[0]
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    ours, theirs = Extkv(), Transformers()
    for num_seqs, num_prompt, num_tokens in DECODE:
        peers = {
            "transformers": decode_us(theirs, num_seqs, num_prompt, num_tokens),
            "extkv": decode_us(ours, num_seqs, num_prompt, num_tokens),
        }
        shape = f"decode step, batch {num_seqs}, {num_prompt} tokens cached"
        limit = 1.0 if num_seqs == 1 else 1.3
        compare(report, shape, alternate(peers, rounds, warmup_rounds=1), limit)
    peers = {"transformers": prefill_us(theirs), "extkv": prefill_us(ours)}
    samples = alternate(peers, 2 * rounds, warmup_rounds=1)
    compare(report, f"prefill of {PREFILL_TOKENS} tokens", samples, 1.0)
    report.environment["load_average_at_end"] = os.getloadavg()[0]
    compare_memory(report)
    report.finish()


def compare(report: Report, shape: str, samples: dict[str, list[float]], limit: float) -> None:
    """Add both peers' rows and the target of extkv's speed."""
    peer = report.add(shape, "transformers", samples["transformers"])
    row = report.add(shape, "extkv", samples["extkv"], peer=peer)
    speed = peer.summary.median_us / row.summary.median_us
    report.at_least(f"{shape}: speed over transformers'", speed, limit)


if __name__ == "__main__":
    main()
