"""`extkv bench`: the engine against transformers, in one run and on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.generate import DeviceOption, DtypeName, DtypeOption, ModelOption
from extkv.cli.progress import progress_bars

if TYPE_CHECKING:
    from extkv.bench.comparison import Comparison

bench = typer.Typer(
    name="bench",
    help="Compare the engine with transformers, both in one run and on the same weights.",
    no_args_is_help=True,
    add_completion=False,
)

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


def _run(name: str, as_json: bool, out: Path | None, **settings: Any) -> None:  # noqa: ANN401
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.bench import runs

    with progress_bars() as on_progress:
        compare = runs.bench_throughput if name == "throughput" else runs.bench_latency
        comparison: Comparison = compare(runs.BenchSettings(**settings), on_progress)
    if out is not None:
        out.write_text(comparison.to_json() + "\n", encoding="utf-8")
    typer.echo(comparison.to_json() if as_json else comparison.table())
