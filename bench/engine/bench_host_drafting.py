"""Steps with drafts on the host at batch 1: SmolLM2 in float32 and a random drafter of 2 layers.

The drafter has layers of the target's shape, a vocabulary of 8192 tokens and a Markov head of rank
64. Acceptance is synthetic, so the text means nothing and the work is real. A step with drafts is
divided into the target's pass, the drafter's context, drafting, the decision and the engine's rest.
With one thread its processor time counts, which other programs disturb less.

Run from the repository root: `python -m bench.engine.bench_host_drafting --out FILE`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.engine.llm import LLM
from extkv.models import find_default_model, load_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams

from bench.engine.cpu_memory import prompts
from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.models import LoadedModel
    from extkv.models.dspark import DSparkModel

NUM_LAYERS, DRAFT_VOCAB_SIZE, MARKOV_RANK = 2, 8192, 64
# Accepted length 1.97 with seven drafts.
RATES = (0.55, 0.45, 0.4, 0.4, 0.4, 0.4, 0.4)
NUM_PROMPT_TOKENS, NUM_STEPS, NUM_WARMUP_STEPS = 128, 12, 3
# An accepted length of 1.8 is then 1.2 times as fast.
MOST_PLAIN_STEPS = 1.5
PARTS = ("target", "context", "draft", "decide")
# Replaced where there is one thread.
clock = time.perf_counter


class Peer:
    """An engine of one sequence whose steps are timed whole and in parts."""

    def __init__(self, target: LoadedModel, draft: DSparkModel | None, **options: Any) -> None:  # noqa: ANN401 speculative_config
        """Start an engine; `options` go to `speculative_config`."""
        config = None if draft is None else {"method": "dspark", **options}
        self.llm = LLM(
            target,
            draft,
            speculative_config=config,
            device="cpu",
            max_num_seqs=1,
            max_num_batched_tokens=NUM_PROMPT_TOKENS,
            enable_prefix_caching=False,
        )
        # Samples in us, by part.
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.num_tokens, self.total_s = 0, 0.0
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._seed = 0
        engine = self.llm.engine
        self._watch(engine.runner, "run", "target")
        if engine.drafting is None:
            self._watch(engine.sampler, "sample", "decide")
        else:
            self._watch(engine.runner.speculator, "store_context", "context")
            self._watch(engine.runner.speculator, "propose", "draft")
            self._watch(engine.drafting._verifier, "verify", "decide")  # noqa: SLF001 looks inside

    def forget(self) -> None:
        """Drop what was measured."""
        self.parts.clear()
        self.num_tokens, self.total_s = 0, 0.0

    def run(self, temperature: float) -> float:
        """Return the median time of a step in us, after a new prompt."""
        self._seed += 1
        prompt = prompts(1, NUM_PROMPT_TOKENS, self._seed)[0].tolist()
        params = SamplingParams(
            temperature=temperature, max_tokens=512, ignore_eos=True, detokenize=False, seed=5
        )
        (sequence,) = self.llm._add(prompt, params, 0).sequences  # noqa: SLF001 drives steps itself
        while len(sequence.token_ids) == 0:
            self.llm.engine.step()
        for _ in range(NUM_WARMUP_STEPS):
            self.llm.engine.step()
        before, times = len(sequence.token_ids), [self._step() for _ in range(NUM_STEPS)]
        self.num_tokens += len(sequence.token_ids) - before
        self.total_s += sum(times) / 1e6
        self.llm.engine.abort(sequence)
        return statistics.median(times)

    def _step(self) -> float:
        self._spent = dict.fromkeys(PARTS, 0.0)
        start = clock()
        self.llm.engine.step()
        elapsed = clock() - start
        spent = dict(self._spent)
        # The drafter's context is left inside the target's pass.
        spent["target"] -= spent["context"]
        spent["rest"] = elapsed - sum(spent.values())
        for part, seconds in spent.items():
            self.parts[part].append(seconds * 1e6)
        return elapsed * 1e6

    def _watch(self, owner: object, name: str, part: str) -> None:
        """Add the time of each call of a method to a part."""
        method: Callable[..., object] = getattr(owner, name)

        def timed(*arguments: object, **options: object) -> object:
            start = clock()
            result = method(*arguments, **options)
            self._spent[part] += clock() - start
            return result

        setattr(owner, name, timed)


def make_peers(target: LoadedModel, draft: DSparkModel, gammas: tuple[int, ...]) -> dict[str, Peer]:
    """Start an engine without drafts, and one for each way of drafting."""
    peers = {"no drafts": Peer(target, None)}
    for gamma in gammas:
        peers[f"{gamma} drafts, fixed"] = Peer(
            target,
            draft,
            num_speculative_tokens=gamma,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=RATES,
        )
    most = max(gammas)
    peers[f"{most} drafts, scheduled"] = Peer(
        target,
        draft,
        num_speculative_tokens=most,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=RATES,
        verification="scheduled",
        confidence="acceptance",
    )
    # By the law: nearly all of its drafts are rejected, so that each step draws from a residual.
    peers[f"{most} drafts, standard"] = Peer(target, draft, num_speculative_tokens=most)
    return peers


def compare(report: Report, peers: dict[str, Peer], temperature: float, rounds: int) -> None:
    """Add the rows of one temperature."""
    for peer in peers.values():
        peer.run(temperature)
        peer.forget()
    runs = {name: partial(peer.run, temperature) for name, peer in peers.items()}
    samples = alternate(runs, rounds)
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    plain = None
    for name, peer in peers.items():
        medians = {part: statistics.median(times) for part, times in peer.parts.items()}
        rate = peer.num_tokens / peer.total_s
        extra: dict[str, object] = {"tokens_per_s": rate, "part_us": medians}
        extra["tokens_per_step"] = peer.num_tokens / (rounds * NUM_STEPS)
        row = report.add(kind, name, samples[name], peer=plain, extra=extra)
        parts = ", ".join(f"{part} {us / 1e3:.2f}" for part, us in medians.items())
        length = extra["tokens_per_step"]
        print(f"    {rate:.1f} tokens/s, {length:.2f} a step; ms: {parts}", flush=True)
        if plain is None:
            plain = row
        elif name.endswith("fixed"):
            ratio = row.summary.median_us / plain.summary.median_us
            report.at_most(f"{kind}, {name}: over a plain step", ratio, MOST_PLAIN_STEPS)


def main() -> None:
    """Measure steps with and without drafts, greedy and drawn."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="runs of each engine")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="layers of the drafter")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.threads == 1:
        globals()["clock"] = time.thread_time
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    report = Report("bench_host_drafting", arguments)
    report.environment["num_threads"] = arguments.threads
    report.environment["clock"] = clock.__name__
    # Much above the number of threads, others used the cores.
    report.environment["load_average_at_start"] = os.getloadavg()[0]
    target = load_model(find_default_model())
    config = drafter_config(
        target.config,
        num_layers=arguments.layers,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        markov_rank=MARKOV_RANK,
    )
    draft = random_drafter(config, target.model)
    peers = make_peers(target, draft, (7,) if arguments.quick else (3, 5, 7))
    for name, peer in peers.items():
        cost_s = peer.llm.startup_s.get("step cost")
        if cost_s is not None:
            report.environment["step_cost_s"] = cost_s
            print(f"{name}: {cost_s:.2f} s to measure the costs of steps at start-up")
    for temperature in (0.0, 1.0):
        compare(report, peers, temperature, rounds)
    report.environment["load_average_at_end"] = os.getloadavg()[0]
    report.finish()


if __name__ == "__main__":
    main()
