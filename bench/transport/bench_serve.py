"""What serving costs: `extkv serve` behind vLLM's Rust front end against the engine in process.

Both run SmolLM2 on the host with the same options and number of threads, and take turns. The served
one is two more processes, and its client reads streamed HTTP from raw sockets, one chunk per token.
Compared are the time between tokens of one sequence, which shows what serving adds to a step,
and the time of a whole batch, from the first request to the last token. A host's steps vary by far
more than what is looked for, so that answers are short and the two alternate often. The difference
is taken between neighbours; its median is held to the target, with its 95 % interval beside it.

Run from the repository root, on a machine that does nothing else, after `.ci/vllm-rs.sh`:
`PYTHONPATH=tests python -m bench.transport.bench_serve --out FILE`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import selectors
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.engine.llm import LLM
from extkv.sampling_params import SamplingParams
from support.vllm_front_end import serving, write_model_directory

from bench.engine.cpu_memory import prompts
from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.vllm_front_end import Serving

MAX_NUM_SEQS = 16
NUM_PROMPT_TOKENS = 32
TIMEOUT_S = 120
# Tokens whose arrival a run does not count: the prompt's step and the first of its text.
NUM_SKIPPED = 4
IN_PROCESS = "extkv in process"
SERVED = "extkv serve, vllm-rs, HTTP stream"
MAX_ADDED_US = 300.0
MIN_THROUGHPUT_RATIO = 0.95


class InProcess:
    """The engine as `LLM` sets it up, stepped by the bench; it makes no text, as when it serves."""

    def __init__(self) -> None:
        self.llm = LLM(device="cpu", max_model_len=512, max_num_seqs=MAX_NUM_SEQS)

    def run(self, token_ids: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
        """Return seconds from the start to the last token, and when the first sequence got its."""
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        requests = [
            self.llm._add(prompt, params, 0)  # noqa: SLF001 the bench drives steps itself
            for prompt in token_ids
        ]
        sequences = [sequence for request in requests for sequence in request.sequences]
        marks: list[float] = []
        while self.llm.engine.has_unfinished:
            self.llm.engine.step()
            if len(marks) < len(sequences[0].token_ids):
                marks.append(time.perf_counter())
        return time.perf_counter() - start, marks

    def close(self) -> None:
        """Free the engine."""
        self.llm.close()


class Stream:
    """One streamed completion over a raw socket, so that reading costs the machine little."""

    def __init__(self, port: int, body: bytes) -> None:
        self.marks: list[float] = []
        self.is_done = False
        self._tail = b""
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    def read(self) -> None:
        """Take what is there and note when each chunk with a token came."""
        data = self.socket.recv(1 << 16)
        now = time.perf_counter()
        text = self._tail + data
        # The last line may go on in the next piece.
        lines, _, self._tail = text.rpartition(b"\n")
        self.marks += [now] * lines.count(b'"text":')
        self.is_done = not data or b"data: [DONE]" in text
        if b"HTTP/1.1" in text and b"HTTP/1.1 200" not in text:
            raise RuntimeError(text.decode(errors="replace"))


class Served:
    """The same engine behind vLLM's front end, in processes of their own."""

    def __init__(self, running: Serving) -> None:
        self._running = running

    def run(self, token_ids: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
        """Return seconds from the first request to the last token, and when chunks of it came."""
        options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = [
            json.dumps({"model": self._running.model, "prompt": prompt, **options}).encode()
            for prompt in token_ids
        ]
        start = time.perf_counter()
        streams = [Stream(self._running.port, body) for body in bodies]
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream.socket, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select(TIMEOUT_S):
                    key.data.read()
                    if key.data.is_done:
                        selector.unregister(key.fileobj)
        elapsed = time.perf_counter() - start
        for stream in streams:
            stream.socket.close()
        return elapsed, streams[0].marks


Contestant = InProcess | Served


def between_tokens_us(peer: Contestant, num_tokens: int) -> Callable[[], float]:
    """Return a run that gives the median time between tokens of one sequence."""
    seeds = itertools.count(1)

    def run() -> float:
        _, marks = peer.run(prompts(1, NUM_PROMPT_TOKENS, next(seeds)).tolist(), num_tokens)
        assert len(marks) >= num_tokens, f"{len(marks)} chunks for {num_tokens} tokens"
        times = [after - before for before, after in itertools.pairwise(marks)]
        return statistics.median(times[NUM_SKIPPED:num_tokens]) * 1e6

    return run


def batch_us(peer: Contestant, num_seqs: int, num_tokens: int) -> Callable[[], float]:
    """Return a run that gives the time of a whole batch."""
    seeds = itertools.count(1000)

    def run() -> float:
        token_ids = prompts(num_seqs, NUM_PROMPT_TOKENS, next(seeds)).tolist()
        return peer.run(token_ids, num_tokens)[0] * 1e6

    return run


def median_of_pairs(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Return the median of `second - first`, and an interval that holds it 95 times in 100.

    The interval ends at two order statistics, whose ranks follow from the sign test's binomial law.
    """
    differences = sorted(b - a for a, b in zip(first, second, strict=True))
    count = len(differences)
    margin = math.ceil(0.98 * math.sqrt(count))
    low, high = max(count // 2 - margin, 0), min((count - 1) // 2 + margin, count - 1)
    return statistics.median(differences), differences[low], differences[high]


def compare(report: Report, ours: InProcess, served: Served, *, is_quick: bool) -> None:
    """Measure both and hold them to the targets."""
    num_rounds, num_tokens = (6, 24) if is_quick else (250, 24)
    samples = alternate(
        {
            IN_PROCESS: between_tokens_us(ours, num_tokens),
            SERVED: between_tokens_us(served, num_tokens),
        },
        num_rounds,
        1,
    )
    shape = f"1 sequence, {num_tokens} tokens, between tokens"
    alone = report.add(shape, IN_PROCESS, samples[IN_PROCESS])
    added, low, high = median_of_pairs(samples[IN_PROCESS], samples[SERVED])
    pairs = {"added_us": added, "added_us_95_percent": [low, high]}
    report.add(shape, SERVED, samples[SERVED], peer=alone, extra=pairs)
    print(f"added per token: {added:.0f} us, between {low:.0f} and {high:.0f} with 95 %")
    report.at_most("added time between tokens, us", added, MAX_ADDED_US)
    num_rounds, num_tokens = (3, 32) if is_quick else (9, 64)
    samples = alternate(
        {
            IN_PROCESS: batch_us(ours, MAX_NUM_SEQS, num_tokens),
            SERVED: batch_us(served, MAX_NUM_SEQS, num_tokens),
        },
        num_rounds,
        1,
    )
    shape = f"{MAX_NUM_SEQS} sequences, {num_tokens} tokens each, all"
    alone = report.add(shape, IN_PROCESS, samples[IN_PROCESS])
    through = report.add(shape, SERVED, samples[SERVED], peer=alone)
    report.at_least(
        "throughput over that in process",
        alone.summary.median_us / through.summary.median_us,
        MIN_THROUGHPUT_RATIO,
    )


def main() -> None:
    """Start both, let them take turns, stop both."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    report = Report("bench_serve", arguments)
    report.environment["threads"] = arguments.threads
    ours = InProcess()
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        write_model_directory(logs)
        options = {"max_num_seqs": MAX_NUM_SEQS, "num_threads": arguments.threads}
        for running in serving(logs, logs, 1, **options):
            compare(report, ours, Served(running), is_quick=arguments.quick)
    ours.close()
    report.finish()


if __name__ == "__main__":
    main()
