"""Where a step's time goes at batch 1: on the host part by part, on the device kernel by kernel.

SmolLM2, or another model, without drafts and with those of a drafter, at temperature 0 and 1. A
part is what the host spends in one method, without other parts inside it; `device` is where it
waits. On CUDA a second run under PyTorch's profiler adds up kernels: `busy` is the time in which at
least one ran, `idle` the rest of the device's time between the first and the last. A profiled step
takes the host longer, so only its kernels are used.

Run from the repository root: `python -m bench.engine.bench_step_parts --device cuda --out FILE`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.dspark.drafting import Drafting
from extkv.dspark.rounds import RoundBook
from extkv.dspark.speculator import Speculator
from extkv.dspark.verification import Verifier
from extkv.engine.batch import InputBuffers
from extkv.engine.core import EngineCore
from extkv.engine.graphs import DecodeGraphs
from extkv.engine.llm import LLM
from extkv.engine.sampled_tokens import HostCopy
from extkv.engine.sampler import Sampler
from extkv.models import find_default_drafter, find_default_model
from extkv.op_modules import op_module
from extkv.sampling_params import SamplingParams

from bench.timing import Report, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "A farm has 12 cows. Each gives 8 litres of milk a day. How much is that in a week?"
WARMUP_TOKENS, NUM_TOKENS, PROFILED_TOKENS = 32, 256, 96
# Kernels that are named; the others are added up.
NUM_KERNELS = 14
REST = "rest of the step"
PARTS: dict[str, list[tuple[object, str]]] = {
    "device": [(HostCopy, "wait")],
    "schedule": [(EngineCore, "_schedule")],
    "fill inputs": [(InputBuffers, "fill"), (InputBuffers, "fill_decode")],
    "place drafts": [(Drafting, "place")],
    "replay graphs": [(DecodeGraphs, "replay")],
    "learn tokens": [(EngineCore, "_absorb")],
    "make text": [(EngineCore, "_advance")],
    "windows": [(Drafting, "_windows")],
    "prepare rows": [(Sampler, "prepare")],
    "verify": [(Verifier, "verify")],
    "sample": [(Sampler, "sample")],
    "open round": [(RoundBook, "next_round")],
    "close round": [(RoundBook, "end_step")],
    "draft requests": [(Drafting, "_requests")],
    "propose": [(Speculator, "propose")],
    "collect": [(EngineCore, "_collect")],
    REST: [(EngineCore, "step")],
}


class PartTimer:
    """Times of methods, each without the others that it calls.

    Attributes:
        spent_us: Microseconds by part.
    """

    def __init__(self, device: torch.device) -> None:
        self.spent_us: dict[str, float] = defaultdict(float)
        self._inner_us: list[float] = []
        kernels = [("rejection", "verify_drafts"), ("draft_block_inputs", "draft_block_inputs")]
        self._parts = PARTS | {
            f"launch {function}": [(op_module(device, name), function)]
            for name, function in kernels
        }

    def watch(self) -> ExitStack:
        """Return a context in which the methods are timed."""
        stack = ExitStack()
        for part, places in self._parts.items():
            for owner, name in places:
                timed = self._timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
        return stack

    def _timed(self, part: str, method: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object, **options: object) -> object:
            self._inner_us.append(0.0)
            start = time.perf_counter_ns()
            try:
                return method(*arguments, **options)
            finally:
                elapsed_us = (time.perf_counter_ns() - start) / 1e3
                self.spent_us[part] += elapsed_us - self._inner_us.pop()
                if self._inner_us:
                    self._inner_us[-1] += elapsed_us

        return timed


def generate(llm: LLM, temperature: float, num_tokens: int) -> tuple[int, float]:
    """Return the steps that an answer took, and its microseconds; both without the prompt's."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=5)
    engine = llm.engine
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}])
    (sequence,) = llm._add(prompt, params, 0).sequences  # noqa: SLF001 drives steps itself
    while not sequence.token_ids:
        engine.step()
    num_steps, start = 0, time.perf_counter_ns()
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    return num_steps, (time.perf_counter_ns() - start) / 1e3


def host_parts(
    report: Report, shape: str, llm: LLM, temperature: float, device: torch.device
) -> float:
    """Add the time of a step and its parts; returns the whole in us."""
    num_steps, whole_us = generate(llm, temperature, NUM_TOKENS)
    counts = None if llm.engine.drafting is None else llm.draft_counts
    extra: dict[str, Any] = {"steps": num_steps, "tokens_per_step": NUM_TOKENS / num_steps}
    if counts is not None:
        extra |= {"draft_ms": counts.draft_ms, "verify_ms": counts.verify_ms}
    step_us = whole_us / num_steps
    report.add(shape, "step", [step_us], extra=extra)
    timer = PartTimer(device)
    with timer.watch():
        num_steps, _ = generate(llm, temperature, NUM_TOKENS)
    for part, us in sorted(timer.spent_us.items(), key=lambda item: -item[1]):
        report.add(shape, f"host: {part}", [us / num_steps])
    return step_us


def device_parts(report: Report, shape: str, llm: LLM, temperature: float) -> None:
    """Add the device's busy and idle time of a step, and its longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        num_steps, _ = generate(llm, temperature, PROFILED_TOKENS)
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not kernels:
        print("the profiler saw no kernels")
        return
    of_name: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    busy_us, end = 0.0, kernels[0][0]
    for first, last, name in kernels:
        of_name[name] += last - first
        counts[name] += 1
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    report.add(shape, "device: busy", [busy_us / num_steps])
    report.add(shape, "device: idle", [(end - kernels[0][0] - busy_us) / num_steps])
    for name, us in of_name.most_common(NUM_KERNELS):
        extra = {"calls": counts[name] / num_steps, "kernel": name}
        report.add(shape, f"kernel: {name[:28]}", [us / num_steps], extra=extra)
    rest = sum(us for _, us in of_name.most_common()[NUM_KERNELS:])
    report.add(shape, "kernel: others", [rest / num_steps])


def main() -> None:
    """Measure without drafts and with them, at temperature 0 and 1."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", help="GGUF file or directory; SmolLM2 by default")
    parser.add_argument("--draft", help="directory of a drafter, by default the shipped one")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    report = Report("bench_step_parts", arguments)
    device = torch.device(arguments.device)
    model = arguments.model or find_default_model()
    for draft in (None, arguments.draft or find_default_drafter()):
        llm = LLM(model, draft, device=arguments.device, max_num_seqs=1)
        for temperature in (0.0, 1.0):
            name = "no drafts" if draft is None else "drafts"
            shape = f"{name}, T = {temperature:g}"
            generate(llm, temperature, WARMUP_TOKENS)
            host_parts(report, shape, llm, temperature, device)
            if device.type == "cuda":
                device_parts(report, shape, llm, temperature)
        llm.close()
    report.finish()


if __name__ == "__main__":
    main()
