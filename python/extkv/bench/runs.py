"""The benches: how many tokens per second a load gives, and how long one batch waits."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from extkv.bench.comparison import Comparison, Row, turns
from extkv.bench.contestants import (
    Engine,
    Transformers,
    random_prompts,
    share_of_equal,
    timed,
)
from extkv.bench.transformers_model import require_transformers
from extkv.engine import LLM
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extkv.bench.contestants import Contestant, Prompts


@dataclass(frozen=True)
class BenchSettings:
    """Say what to run.

    Attributes:
        model: GGUF file or Hugging Face directory; None for the default model.
        device: Device; None for CUDA where there is one.
        dtype: Dtype of weights and KV cache.
        num_prompts: Prompts of a round.
        batch_size: Most prompts at once.
        input_len: Tokens of each prompt.
        output_len: Tokens of each answer.
        num_rounds: Rounds that count, after one that does not.
    """

    model: Path | None = None
    device: str | None = None
    dtype: str = "auto"
    num_prompts: int = 16
    batch_size: int = 16
    input_len: int = 128
    output_len: int = 64
    num_rounds: int = 3

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_prompts", "batch_size", "input_len", "output_len", "num_rounds"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected at least 1")


class _Bench:
    """Both contestants over one loaded model, and extkv's start-up."""

    def __init__(
        self, settings: BenchSettings, on_progress: Callable[[str, int, int], None] | None
    ) -> None:
        require_transformers()
        self.settings = settings
        llm = LLM(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            max_model_len=settings.input_len + settings.output_len,
            max_num_seqs=settings.batch_size,
            # Rounds repeat nothing, but prompts of a round may share a beginning by chance.
            enable_prefix_caching=False,
            on_progress=on_progress,
        )
        self.llm = llm
        self.contestants: dict[str, Contestant] = {
            "extkv": Engine(llm),
            "transformers": Transformers(llm.model.model, settings.batch_size),
        }
        start = time.perf_counter()
        self.contestants["extkv"].run(self.prompts(0)[:1], 1)
        self.startup_s = {**llm.startup_s, "first token": time.perf_counter() - start}
        self._on_progress = on_progress

    def prompts(self, number: int) -> Prompts:
        """Return the prompts of a round."""
        settings = self.settings
        vocab_size = self.llm.model.config.vocab_size
        return random_prompts(settings.num_prompts, settings.input_len, vocab_size, number)

    def measure(
        self, output_lens: tuple[int, ...]
    ) -> tuple[dict[str, list[list[float]]], list[float]]:
        """Time each output length in each round.

        Returns:
            For each contestant a list per output length of seconds per round, and the share of
            equal answers per round.
        """
        num_rounds = self.settings.num_rounds + 1
        seconds: dict[str, list[list[float]]] = {
            name: [[] for _ in output_lens] for name in self.contestants
        }
        equal = []
        for number, order in turns(num_rounds):
            prompts, answers = self.prompts(number), {}
            for name in order:
                for place, output_len in enumerate(output_lens):
                    elapsed_s, answers[name] = timed(self.contestants[name], prompts, output_len)
                    # The first round warms both up.
                    if number > 0:
                        seconds[name][place].append(elapsed_s)
            equal.append(share_of_equal(answers["extkv"], answers["transformers"]))
            if self._on_progress is not None:
                self._on_progress("rounds", number + 1, num_rounds)
        return seconds, equal

    def finish(self, title: str, rows: tuple[Row, ...], equal: list[float]) -> Comparison:
        """Return the result and give the cache back."""
        settings: dict[str, Any] = asdict(self.settings)
        settings["model"] = str(self.llm.model.path.name)
        settings["device"] = str(self.llm.model.model.device)
        settings["dtype"] = str(self.llm.model.model.dtype).removeprefix("torch.")
        self.llm.close()
        return Comparison(title, settings, self.startup_s, rows, sum(equal) / len(equal))


def bench_throughput(
    settings: BenchSettings, on_progress: Callable[[str, int, int], None] | None = None
) -> Comparison:
    """Compare tokens per second over all prompts; transformers takes `batch_size` at a time.

    Raises:
        MissingPackageError: If transformers is not installed.
        InvalidArgumentError: If a setting cannot work.
    """
    bench = _Bench(settings, on_progress)
    seconds, equal = bench.measure((settings.output_len,))
    num_output = settings.num_prompts * settings.output_len
    num_all = num_output + settings.num_prompts * settings.input_len

    def row(name: str, num_tokens: int) -> Row:
        rates = {
            who: tuple(num_tokens / elapsed_s for elapsed_s in lists[0])
            for who, lists in seconds.items()
        }
        return Row(name, "tokens/s", rates["extkv"], rates["transformers"], is_rate=True)

    rows = (row("output tokens", num_output), row("prompt and output tokens", num_all))
    return bench.finish("throughput", rows, equal)


def bench_latency(
    settings: BenchSettings, on_progress: Callable[[str, int, int], None] | None = None
) -> Comparison:
    """Compare how long one batch waits for its first tokens, each next one, and its last ones.

    The time of the next tokens is that of an answer less that of its first token, both measured.

    Raises:
        MissingPackageError: If transformers is not installed.
        InvalidArgumentError: If a setting cannot work, or `output_len` is 1.
    """
    if settings.output_len == 1:
        raise InvalidArgumentError("output_len is 1, expected at least 2")
    bench = _Bench(settings, on_progress)
    seconds, equal = bench.measure((1, settings.output_len))

    def row(name: str, of: Callable[[float, float], float]) -> Row:
        figures = {
            who: tuple(1e3 * of(first, whole) for first, whole in zip(*lists, strict=True))
            for who, lists in seconds.items()
        }
        return Row(name, "ms", figures["extkv"], figures["transformers"])

    rows = (
        row("first token", lambda first, _: first),
        row("each next token", lambda first, whole: (whole - first) / (settings.output_len - 1)),
        row("whole answer", lambda _, whole: whole),
    )
    return bench.finish("latency", rows, equal)
