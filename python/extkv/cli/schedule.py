"""What `extkv bench schedule` does once its options are read."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from extkv.cli.pairs import open_pinned, tokens_of
from extkv.cli.progress import progress_bars
from extkv.cli.questions import read_questions
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    from extkv.bench.schedule import ScheduleResult, ScheduleSettings

DEFAULT_LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CPU_LOADS = (1, 2, 4)
QUICK_LOADS = (1, 16, 256)
DEFAULT_FIXED = (1, 3, 5, 7)
# More than any drafter drafts.
MAX_NUM_RATES = 64


@dataclass(frozen=True)
class ScheduleRequest:
    """Options of the command; those of the same name in `PairSettings` mean the same."""

    model: str | None
    draft: Path | None
    has_random_drafter: bool
    has_random_weights: bool
    acceptance: str | None
    prompts: Path | None
    step_cost: Path | None
    temperatures: Path | None
    device: str | None
    dtype: str
    max_model_len: int | None
    num_requests: tuple[int, ...]
    fixed_lens: tuple[int, ...]
    input_len: int
    num_steps: int
    num_rounds: int
    is_quick: bool


def run_schedule(
    request: ScheduleRequest, *, plot: Path | None, out: Path | None, as_json: bool
) -> None:
    """Measure, print, and write what was asked for.

    Raises:
        ExtkvError: If something cannot be read or cannot work.
    """
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.bench.pairs import PairSettings
    from extkv.bench.plots import require_matplotlib
    from extkv.bench.provenance import provenance
    from extkv.bench.schedule import bench_schedule

    if plot is not None:
        require_matplotlib()
    if request.draft is None and not request.has_random_drafter:
        raise InvalidArgumentError("schedules need a drafter: give --draft or --random-drafter")
    rates = parse_rates(request.acceptance)
    pair_settings = PairSettings(
        model=request.model,
        draft=request.draft,
        has_random_drafter=request.has_random_drafter,
        has_random_weights=request.has_random_weights,
        device=request.device,
        dtype=request.dtype,
        max_model_len=request.max_model_len,
    )
    with progress_bars() as on_progress:
        is_cuda = _is_cuda(request.device)
        loads = request.num_requests or (DEFAULT_LOADS if is_cuda else CPU_LOADS)
        if request.is_quick and not request.num_requests:
            loads = QUICK_LOADS if is_cuda else CPU_LOADS[:2]
        pair, pin = open_pinned(
            pair_settings,
            speculative_config(request, rates),
            on_progress,
            max_num_seqs=max(loads),
        )
        with closing(pin.llm):
            fixed = request.fixed_lens or tuple(n for n in DEFAULT_FIXED if n <= pin.num_drafts)
            settings = _settings(request, loads, fixed, rates)
            prompts = None
            if request.prompts is not None:
                questions = read_questions([], request.prompts, {}, chat=None)
                prompts = [tokens_of(pin.llm, question) for question in questions]
                longest = max(map(len, prompts))
                settings = replace(settings, context_len=longest)
            source = provenance(pair)
            result = bench_schedule(pin, settings, source, prompts=prompts, on_progress=on_progress)
    _show(result, plot=plot, out=out, as_json=as_json)


def show_schedule(path: Path, *, plot: Path | None, out: Path | None, as_json: bool) -> None:
    """Print and draw what was measured before.

    Raises:
        ExtkvError: If the file holds no such result, or figures cannot be drawn.
    """
    from extkv.bench.schedule import ScheduleResult

    _show(ScheduleResult.load(path), plot=plot, out=out, as_json=as_json)


def _show(result: ScheduleResult, *, plot: Path | None, out: Path | None, as_json: bool) -> None:
    from extkv.bench.plots import plot_schedule

    if out is not None:
        out.write_text(result.to_json() + "\n", encoding="utf-8")
    if plot is not None:
        plot_schedule(result, plot)
    typer.echo(result.to_json() if as_json else result.table())
    for path in (out, plot):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def parse_rates(text: str | None) -> tuple[float, ...] | None:
    """Read chances of acceptance such as ``0.7,0.5,0.3``.

    Raises:
        InvalidArgumentError: If one is no number in [0, 1].
    """
    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(f"acceptance is {text!r}, expected 0.7,0.5,…") from error
    if not all(0 <= rate <= 1 for rate in rates):
        raise InvalidArgumentError(f"acceptance is {text!r}, expected numbers in [0, 1]")
    return rates


def speculative_config(request: ScheduleRequest, rates: tuple[float, ...] | None) -> dict[str, Any]:
    """Return how the engine drafts: by a schedule, which the bench takes out of its hand."""
    config: dict[str, Any] = {"method": "dspark", "verification": "scheduled"}
    if request.step_cost is not None:
        config["step_cost"] = request.step_cost
    if request.temperatures is not None:
        config["confidence_temperatures"] = request.temperatures
    if rates is not None:
        padded = rates + rates[-1:] * (MAX_NUM_RATES - len(rates))
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(padded),
        }
        if request.temperatures is None:
            # The head knows nothing of drawn acceptance.
            config["confidence"] = "acceptance"
    return config


def _settings(
    request: ScheduleRequest,
    loads: tuple[int, ...],
    fixed: tuple[int, ...],
    rates: tuple[float, ...] | None,
) -> ScheduleSettings:
    from extkv.bench.schedule import ScheduleSettings

    num_steps = min(request.num_steps, 20) if request.is_quick else request.num_steps
    return ScheduleSettings(
        num_requests=loads,
        fixed_lens=fixed,
        context_len=request.input_len,
        num_warmup_steps=num_steps,
        num_steps=num_steps,
        num_rounds=1 if request.is_quick else request.num_rounds,
        acceptance_rates=rates,
    )


def _is_cuda(device: str | None) -> bool:
    from extkv.device import resolve_device

    return resolve_device(device)[0] == "cuda"
