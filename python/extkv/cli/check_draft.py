"""`extkv check-draft`: what a target accepts of a drafter, and whether the file is read rightly."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extkv.cli.generate import DeviceOption, DtypeName, DtypeOption, load
from extkv.cli.progress import progress_bars
from extkv.cli.questions import read_questions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv import LLM, RequestOutput
    from extkv.cli.questions import Question
    from extkv.dspark.check import Acceptance, CheckReport
    from extkv.models import LoadedModel

TargetArgument = Annotated[
    Path, typer.Argument(exists=True, help="GGUF file or Hugging Face directory of the target.")
]
DraftArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Directory of the drafter.")
]

# Exit code where the drafter is useless, or another reading of the file is clearly better.
BETTER_EXIT_CODE = 3
# Texts that are written at once.
MOST_SEQS = 16
BUILT_IN_PROMPTS = (
    "Explain why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many in both?",
    "List the planets of the solar system with one fact about each.",
    "Translate into French: The train leaves at seven in the morning.",
    "Tell a short story about a lighthouse keeper.",
)


def check_draft(
    target: TargetArgument,
    draft: DraftArgument,
    *,
    prompts_path: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="JSON lines as for extkv generate; a few built-in prompts by default.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send prompts as chat messages, or as they are; built-in prompts as messages "
            "where the model has a chat template.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the target writes after each prompt.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="Of the target's text, and of both models' laws.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the target's text.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how many drafts of DRAFT are accepted by TARGET, on text that TARGET writes.

    Then try what lies next to the drafter's file: taps one layer off, the other layout, positions
    one off, the norm elsewhere, other mask tokens, the target's embedding and head. Exit code 3
    says that one of them is clearly better, or that the drafter is of no use.
    """
    if temperature <= 0:
        raise typer.BadParameter(
            f"is {temperature}, expected a positive number", param_hint="--temperature"
        )
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    built_in = BUILT_IN_PROMPTS if prompts_path is None else ()
    questions = read_questions(built_in, prompts_path, sampling, chat=chat)
    # Its cache is for the texts alone, and goes before the drafter comes.
    llm = load(
        target,
        device=device,
        dtype=dtype.value,
        max_num_seqs=min(len(questions), MOST_SEQS),
        enforce_eager=True,
    )
    with closing(llm):
        texts = write_texts(llm, questions, chat=chat, is_built_in=prompts_path is None)
    report = run_check(llm.model, draft, texts, temperature)
    typer.echo(json.dumps(report.to_dict()) if as_json else format_report(report))
    if report.better or report.is_useless:
        raise typer.Exit(BETTER_EXIT_CODE)


def write_texts(
    llm: LLM, questions: Sequence[Question], *, chat: bool | None, is_built_in: bool
) -> list[tuple[list[int], int]]:
    """Let the target answer, and return prompts with answers, and the length of each prompt."""
    wants_chat = is_built_in and chat is None and llm.model.chat_template is not None
    prompts: list[str | list[int]] = []
    for question in questions:
        if question.prompt is None:
            prompts.append(llm.chat_prompt(question.messages))
        elif wants_chat:
            prompts.append(llm.chat_prompt([{"role": "user", "content": str(question.prompt)}]))
        else:
            prompts.append(question.prompt)
    # Texts of their own, whatever the prompts have in common.
    sampling = [
        replace(question.sampling, seed=(question.sampling.seed or 0) + index)
        for index, question in enumerate(questions)
    ]
    texts = []
    with progress_bars() as on_progress:
        outputs: dict[int, RequestOutput] = {}
        with closing(llm.stream_many(prompts, sampling)) as stream:
            for index, output in stream:
                outputs[index] = output
                done = sum(found.finished for found in outputs.values())
                on_progress("writing texts", done, len(prompts))
    for _, output in sorted(outputs.items()):
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        texts.append((token_ids, len(output.prompt_token_ids)))
    return texts


def run_check(
    loaded: LoadedModel,
    draft: Path,
    texts: Sequence[tuple[Sequence[int], int]],
    temperature: float,
) -> CheckReport:
    """Load the drafter and check it."""
    from extkv.dspark import check
    from extkv.models.dspark import load_drafter

    with progress_bars() as on_progress:
        drafter = load_drafter(
            draft,
            loaded.model,
            on_progress=lambda done, total: on_progress(f"loading {draft.name}", done, total),
        )
        return check.check_draft(
            loaded.model,
            drafter,
            texts,
            keys=check.read_file_keys(draft),
            temperature=temperature,
            on_progress=lambda done, total: on_progress("measuring blocks", done, total),
        )


def format_report(report: CheckReport) -> str:
    """Return a report for people."""
    own = report.acceptance
    lines = [
        f"{own.num_blocks} blocks of the target's own text at temperature {report.temperature:g}",
        _format_acceptance(own),
        "",
        "read otherwise      drafts accepted   difference ± standard error",
    ]
    lines += [
        f"  {found.neighbour.name:18}{found.acceptance.accepted_tokens:14.2f}   "
        f"{found.gain:+10.3f} ± {found.standard_error:.3f}{'  better' if found.is_better else ''}"
        for found in report.comparisons
    ]
    lines.append("")
    if report.is_useless:
        lines.append(
            "No reading makes this drafter useful here: it is of another target, or not trained."
        )
    if not report.better:
        lines.append("Nothing is clearly better than what the file says.")
        return "\n".join(lines)
    best, *others = report.better
    lines.append(f"Clearly better: {best.neighbour.fault}.")
    lines.append(f"Change the file: {best.neighbour.change}. Then check again.")
    if others:
        names = ", ".join(found.neighbour.name for found in others)
        lines.append(f"Less good, but better than the file too: {names}.")
    return "\n".join(lines)


def _format_acceptance(acceptance: Acceptance) -> str:
    drawn = " ".join(f"{share:5.0%}" for share in acceptance.by_slot)
    greedy = " ".join(f"{share:5.0%}" for share in acceptance.greedy_by_slot)
    return (
        f"drawn drafts:  {acceptance.accepted_tokens:.2f} accepted per block; by slot {drawn}\n"
        f"greedy drafts: {acceptance.greedy_accepted_tokens:.2f} accepted per block; "
        f"by slot {greedy}"
    )
