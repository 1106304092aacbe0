"""Accepted length of a drafter through the engine, by prompts, temperature and place in a block."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from extkv.bench.comparison import environment
from extkv.bench.provenance import run_facts
from extkv.errors import InvalidArgumentError
from extkv.prompt_files import read_turns
from extkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from extkv.dspark.verification import DraftCounts
    from extkv.engine.llm import LLM

    Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AcceptanceRow:
    """What one set of prompts gave at one temperature.

    Attributes:
        prompts: Name of the set.
        temperature: Temperature of the answers.
        num_answers: Answers, one per turn.
        num_tokens: Their tokens.
        num_rounds: Rounds with drafts.
        accepted_length: Tokens per round, the one after the accepted drafts included.
        acceptance_by_place: Share of verified drafts accepted, by place in the block; a draft
            counts as accepted where all before it are too.
        tokens_per_s: Tokens of all answers over the time they took together.
        plain_tokens_per_s: The same without drafts; None where that was not run.
        equal_ratio: Share of answers that are the same without drafts; None where that was not run.
    """

    prompts: str
    temperature: float
    num_answers: int
    num_tokens: int
    num_rounds: int
    accepted_length: float
    acceptance_by_place: tuple[float, ...]
    tokens_per_s: float
    plain_tokens_per_s: float | None = None
    equal_ratio: float | None = None


@dataclass(frozen=True)
class AcceptanceSettings:
    """Say what is measured.

    Attributes:
        paths: JSON-lines files of prompts, objects with `turns`.
        temperatures: Temperatures of the answers.
        max_tokens: Most tokens of an answer.
        num_prompts: Prompts of each file; None for all.
        seed: Seed of draws.
    """

    paths: tuple[Path, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    num_prompts: int | None = None
    seed: int = 0


def measure_acceptance(
    llm: LLM,
    settings: AcceptanceSettings,
    *,
    plain: LLM | None = None,
    on_progress: Progress | None = None,
) -> list[AcceptanceRow]:
    """Answer sets of prompts and count what became of the drafts.

    Args:
        llm: An engine with a drafter.
        settings: What is measured.
        plain: The same engine without drafts, to compare with.
        on_progress: Told a phase, what is done and how much there is.

    Raises:
        InvalidArgumentError: If the engine has no drafter, or a file has no prompts.
    """
    if llm.draft_counts is None:
        raise InvalidArgumentError("the engine has no drafter whose drafts could be accepted")
    rows = []
    total = len(settings.paths) * len(settings.temperatures)
    for path in settings.paths:
        conversations = read_turns(path)[: settings.num_prompts]
        for temperature in settings.temperatures:
            params = SamplingParams(
                temperature=temperature, max_tokens=settings.max_tokens, seed=settings.seed
            )
            before = copy.deepcopy(llm.draft_counts)
            answers, elapsed_s = _converse(llm, conversations, params)
            found = _difference(llm.draft_counts, before)
            row = _row(path.stem, temperature, answers, elapsed_s, found)
            if plain is not None:
                others, plain_s = _converse(plain, conversations, params)
                row = _compared(row, answers, others, plain_s)
            rows.append(row)
            if on_progress is not None:
                on_progress("measuring acceptance", len(rows), total)
    return rows


def to_json(rows: Sequence[AcceptanceRow], **facts: Any) -> str:  # noqa: ANN401, any JSON
    """Return rows with facts about the run as one JSON object."""
    where = environment() | run_facts()
    values = {**facts, "rows": [asdict(row) for row in rows], "environment": where}
    return json.dumps(values)


def table(rows: Sequence[AcceptanceRow]) -> str:
    """Return rows for people."""
    lines = [f"{'prompts':<12}{'T':>4}{'length':>8}{'rounds':>8}{'tokens/s':>10}  by place"]
    for row in rows:
        places = " ".join(f"{share:.2f}" for share in row.acceptance_by_place)
        line = (
            f"{row.prompts:<12}{row.temperature:>4.1f}{row.accepted_length:>8.3f}"
            f"{row.num_rounds:>8}{row.tokens_per_s:>10.0f}  {places}"
        )
        if row.plain_tokens_per_s is not None:
            speedup = row.tokens_per_s / row.plain_tokens_per_s
            line += f"  {speedup:.2f} x of no drafts, {row.equal_ratio:.0%} equal"
        lines.append(line)
    return "\n".join(lines)


def _converse(
    llm: LLM, conversations: Sequence[Sequence[str]], params: SamplingParams
) -> tuple[list[tuple[int, ...]], float]:
    """Answer all turns; return the tokens of the answers, and the time that the engine took."""
    messages: list[list[dict[str, str]]] = [[] for _ in conversations]
    answers: list[tuple[int, ...]] = []
    elapsed_s = 0.0
    for turn in range(max(map(len, conversations))):
        going = [index for index, turns in enumerate(conversations) if turn < len(turns)]
        for index in going:
            messages[index].append({"role": "user", "content": conversations[index][turn]})
        prompts = [llm.chat_prompt(messages[index]) for index in going]
        limit = llm.config.max_model_len - 1
        fitting = [
            (index, prompt)
            for index, prompt in zip(going, prompts, strict=True)
            if len(prompt) <= limit
        ]
        start = time.perf_counter()
        outputs = llm.generate([prompt for _, prompt in fitting], params, use_tqdm=False)
        elapsed_s += time.perf_counter() - start
        for (index, _), output in zip(fitting, outputs, strict=True):
            (completion,) = output.outputs
            answers.append(tuple(completion.token_ids))
            messages[index].append({"role": "assistant", "content": completion.text})
    return answers, elapsed_s


def _row(
    name: str,
    temperature: float,
    answers: Sequence[tuple[int, ...]],
    elapsed_s: float,
    counts: DraftCounts,
) -> AcceptanceRow:
    pairs = zip(counts.num_accepted, counts.num_drafted, strict=True)
    num_tokens = sum(map(len, answers))
    return AcceptanceRow(
        prompts=name,
        temperature=temperature,
        num_answers=len(answers),
        num_tokens=num_tokens,
        num_rounds=counts.num_rounds,
        accepted_length=counts.accepted_length,
        acceptance_by_place=tuple(hit / total for hit, total in pairs),
        tokens_per_s=num_tokens / elapsed_s,
    )


def _compared(
    row: AcceptanceRow,
    answers: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    plain_s: float,
) -> AcceptanceRow:
    equal = [ours == theirs for ours, theirs in zip(answers, others, strict=False)]
    values = asdict(row) | {
        "plain_tokens_per_s": sum(map(len, others)) / plain_s,
        "equal_ratio": sum(equal) / max(len(equal), 1),
    }
    return AcceptanceRow(**values)


def _difference(after: DraftCounts, before: DraftCounts) -> DraftCounts:
    found = copy.deepcopy(after)
    found.num_rounds -= before.num_rounds
    for place, (drafted, accepted) in enumerate(
        zip(before.num_drafted, before.num_accepted, strict=True)
    ):
        found.num_drafted[place] -= drafted
        found.num_accepted[place] -= accepted
    while found.num_drafted and found.num_drafted[-1] == 0:
        found.num_drafted.pop()
        found.num_accepted.pop()
    return found
