"""How `extkv generate` shows answers: text as it comes, or a JSON object for each when it is done.

Answers appear in the order of the questions; what comes early waits for its turn.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.cli.questions import Question
    from extkv.dspark.verification import DraftCounts
    from extkv.kv import KVCache
    from extkv.outputs import RequestOutput

MIB = 1024 * 1024


class Answers(Protocol):
    """Show the answers to some questions."""

    def show(self, index: int, output: RequestOutput) -> None:
        """Take what there is of one answer."""

    def finish(self) -> None:
        """Show what was held back; nothing more comes."""


class TextAnswers:
    """Print the first unfinished answer as it grows, the others after it."""

    def __init__(self, questions: Sequence[Question], *, has_titles: bool) -> None:
        self._questions = questions
        self._has_titles = has_titles
        self._latest: dict[int, RequestOutput] = {}
        self._current = 0
        self._num_printed = 0
        self._has_begun = False

    def show(self, index: int, output: RequestOutput) -> None:
        """Print what is new of the current answer, and of those after it once it is done."""
        self._latest[index] = output
        while (current := self._latest.get(self._current)) is not None:
            self._print_news(current)
            if not current.finished:
                break
            self._end()

    def finish(self) -> None:
        """Print what is there of the answers that were cut off, and end the line."""
        for index in sorted(self._latest):
            if index >= self._current:
                self._current = index
                self._print_news(self._latest[index])
                self._end()

    def _print_news(self, output: RequestOutput) -> None:
        if self._has_titles and not self._has_begun:
            typer.echo(self._questions[self._current].title)
        self._has_begun = True
        text = output.outputs[0].text
        if len(text) > self._num_printed:
            typer.echo(text[self._num_printed :], nl=False)
            self._num_printed = len(text)

    def _end(self) -> None:
        typer.echo("\n" if self._has_titles else "")
        self._current += 1
        self._num_printed = 0
        self._has_begun = False


class JsonAnswers:
    """Print one JSON object per answer."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self._latest: dict[int, RequestOutput] = {}
        self._current = 0

    def show(self, index: int, output: RequestOutput) -> None:
        """Print the answers that are done, up to the first that is not."""
        self._latest[index] = output
        while (current := self._latest.get(self._current)) is not None and current.finished:
            self._print(self._current)
            self._current += 1

    def finish(self) -> None:
        """Print what is there of the answers that were cut off."""
        for index in sorted(self._latest):
            if index >= self._current:
                self._print(index)

    def _print(self, index: int) -> None:
        typer.echo(json.dumps(answer_dict(self._questions[index], self._latest[index])))


def answer_dict(question: Question, output: RequestOutput) -> dict[str, Any]:
    """Return an answer as `--json` prints it; times are seconds, None where none was reached."""
    (completion,) = output.outputs
    metrics = output.metrics
    return {
        "id": question.question_id,
        "turn": question.turn,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "queue_s": None if metrics is None else metrics.queue_s,
        "prefill_s": None if metrics is None else metrics.prefill_s,
        "decode_s": None if metrics is None else metrics.decode_s,
    }


def format_drafts(counts: DraftCounts) -> str:
    """Return what became of drafts: tokens per step, and the accepted share at each place."""
    shares = ", ".join(
        f"{accepted / drafted:.0%}"
        for accepted, drafted in zip(counts.num_accepted, counts.num_drafted, strict=True)
    )
    return (
        f"drafts: {counts.accepted_length:.2f} tokens per step in {counts.num_rounds} steps; "
        f"accepted by place {shares or 'none'}; "
        f"drafting {counts.draft_ms:.2f} ms, verifying {counts.verify_ms:.2f} ms a step"
    )


def drafts_dict(counts: DraftCounts) -> dict[str, Any]:
    """Return what became of drafts as `--json` prints it."""
    return {**asdict(counts), "accepted_length": counts.accepted_length}


def format_summary(num_answers: int, num_tokens: int, elapsed_s: float, cache: KVCache) -> str:
    """Return the last line of a run: speed, address space and memory of the KV cache."""
    stats = cache.stats()
    rate = num_tokens / elapsed_s if elapsed_s > 0 else 0.0
    answers = "" if num_answers == 1 else f"{num_answers} answers, "
    return (
        f"{answers}{num_tokens} tokens in {elapsed_s:.1f} s ({rate:.1f} tokens/s) · "
        f"KV cache: {stats.reserved_bytes / MIB:.1f} MiB address space reserved, "
        f"{stats.committed_bytes / MIB:.1f} MiB committed"
    )


def format_speedup(drafted: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> str:
    """Return how much faster answers came with drafts; prompts are not counted.

    Args:
        drafted: Answers with drafts.
        plain: Answers to the same prompts without.
    """
    rates = [_decode_rate(outputs) for outputs in (drafted, plain)]
    equal = sum(
        ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for ours, theirs in zip(drafted, plain, strict=True)
    )
    with_drafts, without = rates
    if not with_drafts or not without:
        return "speed: the answers are too short to compare"
    return (
        f"speed: {with_drafts:.1f} tokens/s with drafts, {without:.1f} without: "
        f"{with_drafts / without:.2f} x; {equal} of {len(drafted)} answers are the same"
    )


def _decode_rate(outputs: Sequence[RequestOutput]) -> float:
    """Return tokens after the first ones per second; 0 if there are none."""
    num_tokens = sum(max(len(output.outputs[0].token_ids) - 1, 0) for output in outputs)
    times = [output.metrics.decode_s or 0.0 for output in outputs if output.metrics is not None]
    longest = max(times, default=0.0)
    return num_tokens / longest if longest > 0 else 0.0
