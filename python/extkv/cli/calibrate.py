"""`extkv calibrate`: rounds of a drafter on prompts, and the temperatures fitted to them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.generate import DeviceOption, DtypeName, DtypeOption
from extkv.cli.pairs import MaxModelLenOption, MaxNumSeqsOption, open_pinned, tokens_of
from extkv.cli.progress import progress_bars
from extkv.cli.questions import read_questions
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extkv.bench.recording import Recording
    from extkv.cli.questions import Question
    from extkv.dspark.calibration import Rounds, TemperatureFit, Temperatures


def calibrate(
    *,
    target: Annotated[
        str | None, typer.Argument(help="GGUF file or Hugging Face directory of the target.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Argument(help="Directory of a DSpark drafter with a confidence head.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Prompts as JSON lines, as `extkv generate` takes them; held out from training.",
        ),
    ] = None,
    rounds: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Fit to rounds recorded before; no model is loaded."
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the recorded rounds to this file.")
    ] = None,
    temperatures: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Fit nothing: measure the temperatures of this file on the rounds.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the temperatures to this file.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE.png", help="Draw reliability before and after."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="Of the answers; heads are trained at 1.")
    ] = 1.0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Send prompts as chat messages or not.")
    ] = None,
    min_rounds: Annotated[
        int, typer.Option(min=1, help="Refuse a fit to fewer rounds at some position.")
    ] = 1000,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit a temperature per draft position, so that confidences mean what they say.

    Answers PROMPTS with every draft verified, records what the confidence head said and what was
    accepted, and fits by sequential temperature scaling. The file goes into `speculative_config` as
    `confidence_temperatures`. With `--temperatures` it says how true that file is on other rounds.
    """
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.bench.plots import require_matplotlib
    from extkv.bench.reliability import measure_temperatures
    from extkv.dspark.calibration import Temperatures, check_pairing

    if temperatures is not None and out is not None:
        raise InvalidArgumentError(
            f"--temperatures {temperatures} are measured and none fitted: {out} cannot be written"
        )
    if plot is not None:
        require_matplotlib()
    given = {"TARGET": target, "DRAFT": draft, "--prompts": prompts, "--record": record}
    if rounds is not None:
        recording = _recorded(rounds, given)
    else:
        if target is None or draft is None or prompts is None:
            raise InvalidArgumentError("give TARGET, DRAFT and --prompts, or --rounds")
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        questions = read_questions([], prompts, sampling, chat=chat)
        options = {
            "device": device,
            "dtype": dtype.value,
            "max_model_len": max_model_len,
        }
        recording = _record(target, draft, questions, options, max_num_seqs)
    if record is not None:
        recording.save(record)
    found = recording.to_rounds()
    check_pairing(found)
    if temperatures is None:
        chosen, columns = _fit(found, min_rounds, out, recording.source)
    else:
        chosen = Temperatures.load(temperatures)
        columns = measure_temperatures(found, chosen)
    if plot is not None:
        _plot(recording, found, chosen, plot)
    report = calibration_report(recording, columns)
    typer.echo(json.dumps(report) if as_json else format_report(report))
    for path in (record, out, plot):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def _recorded(path: Path, given: Mapping[str, object]) -> Recording:
    """Read rounds, with which nothing that records any may be given."""
    from extkv.bench.recording import Recording

    needless = [name for name, value in given.items() if value is not None]
    if needless:
        raise InvalidArgumentError(
            f"--rounds are recorded already, {', '.join(needless)} cannot be given too"
        )
    return Recording.load(path)


def _fit(
    rounds: Rounds, min_rounds: int, out: Path | None, source: dict[str, str]
) -> tuple[Temperatures, dict[str, list[Any]]]:
    """Fit temperatures, write their file, and return them with what they do."""
    from extkv.dspark.calibration import FitSettings, fit_temperatures

    fit = fit_temperatures(rounds, FitSettings(min_num_rounds=min_rounds))
    if out is not None:
        values = json.loads(fit.json) | {"source": source}
        out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return fit.temperatures, fit_columns(fit)


def _plot(recording: Recording, rounds: Rounds, temperatures: Temperatures, path: Path) -> None:
    """Draw reliability without temperatures and with them."""
    from extkv.bench.plots import plot_reliability
    from extkv.bench.reliability import reliability
    from extkv.dspark.calibration import Temperatures

    source = recording.source
    plot_reliability(
        reliability(rounds, Temperatures([1.0] * rounds.num_drafts)),
        reliability(rounds, temperatures),
        path,
        title=f"{source.get('draft', 'drafter')} for {source.get('model', 'target')}, "
        f"{len(recording.rounds):,} rounds",
    )


def fit_columns(fit: TemperatureFit) -> dict[str, list[Any]]:
    """Return what a fit did, one element per position."""
    return {
        "temperature": fit.temperatures.values.tolist(),
        "num_rounds": fit.num_rounds_by_position.tolist(),
        "accepted_ratio": fit.accepted_ratio.tolist(),
        "mean_before": fit.mean_before.tolist(),
        "mean_after": fit.mean_after.tolist(),
        "ece_before": fit.ece_before.tolist(),
        "ece_after": fit.ece_after.tolist(),
    }


def calibration_report(recording: Recording, columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Return what temperatures make of recorded rounds, position by position."""
    return {
        "num_rounds": len(recording.rounds),
        "num_left_out": recording.num_left_out,
        "source": recording.source,
        "positions": [
            {name: column[place] for name, column in columns.items()}
            for place in range(recording.num_drafts)
        ],
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the report for people: survival of the first drafts, promised and observed."""
    head = ("draft", "rounds", "accepted", "before", "after", "ECE before", "ECE after", "T")
    lines = [
        f"{report['num_rounds']:,} rounds, {report['num_left_out']:,} left out",
        "".join(f"{name:>12}" for name in head),
    ]
    for place, row in enumerate(report["positions"], start=1):
        cells = (
            str(place),
            f"{row['num_rounds']:,}",
            f"{row['accepted_ratio']:.3f}",
            f"{row['mean_before']:.3f}",
            f"{row['mean_after']:.3f}",
            f"{row['ece_before']:.4f}",
            f"{row['ece_after']:.4f}",
            f"{row['temperature']:.3f}",
        )
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _record(
    target: str,
    draft: Path,
    questions: list[Question],
    options: dict[str, Any],
    max_num_seqs: int | None,
) -> Recording:
    from extkv.bench.pairs import PairSettings
    from extkv.bench.provenance import provenance
    from extkv.bench.recording import record_rounds
    from extkv.dspark.cost import CostTable, StepCost

    settings = PairSettings(model=target, draft=draft, **options)
    # Every draft is verified, so no step's cost is looked up, and none need be measured.
    unused = StepCost(CostTable(token_us=((1, 1.0), (2, 2.0))))
    speculative = {
        "method": "dspark",
        "verification": "scheduled",
        "confidence": "head",
        "step_cost": unused,
    }
    with progress_bars() as on_progress:
        pair, pin = open_pinned(settings, speculative, on_progress, max_num_seqs=max_num_seqs)
        with closing(pin.llm):
            prompts = [tokens_of(pin.llm, question) for question in questions]
            params = [question.sampling for question in questions]
            source = provenance(pair, num_prompts=len(prompts))
            return record_rounds(pin.llm, prompts, params, source, on_progress)
