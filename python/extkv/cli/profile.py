"""`extkv profile`: what a step costs on this device, as the table of scheduled verification."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from extkv.cli.generate import DeviceOption, DtypeName, DtypeOption
from extkv.cli.pairs import (
    DraftOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelArgument,
    QuickOption,
    RandomDrafterOption,
    RandomWeightsOption,
    open_pinned,
)
from extkv.cli.progress import progress_bars

if TYPE_CHECKING:
    from extkv.bench.step_table import StepProfile
    from extkv.dspark.cost import QualityLimits


def profile(
    *,
    model: ModelArgument = None,
    draft: DraftOption = None,
    random_drafter: RandomDrafterOption = False,
    random_weights: RandomWeightsOption = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the cost table to this file.")
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Write the measured steps to this file, also of a refused table."
        ),
    ] = None,
    from_steps: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            exists=True,
            help="Measure nothing: make the table of the steps in this file, which --steps wrote.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeName.AUTO,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    num_requests: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeat for several. Powers of two by default."),
    ] = None,
    verify_len: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Drafts verified of each request; repeat for several."),
    ] = None,
    context_len: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of each prompt; repeat for several."),
    ] = None,
    max_spread: Annotated[
        float,
        typer.Option(min=0.0, help="Refuse steps whose repeats spread by more of their median."),
    ] = 0.20,
    max_residual: Annotated[
        float, typer.Option(min=0.0, help="Refuse a table that is off by more of a step's time.")
    ] = 0.15,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table and the steps as one JSON object.")
    ] = False,
    quick: QuickOption = False,
) -> None:
    """Measure what steps of MODEL cost: by requests, drafts and context, warm, medians.

    No draft is ever accepted, so that every load stays what it is. A table that is flat, noisy or
    does not add up is refused. The file goes into `speculative_config` as `step_cost`. With
    --from-steps nothing runs and no MODEL is needed.
    """
    # Imported late: `extkv --help` must not pay for PyTorch.
    from dataclasses import replace

    from extkv.bench.pairs import PairSettings
    from extkv.bench.provenance import provenance
    from extkv.bench.step_profile import ProfileSettings, profile_steps
    from extkv.dspark.cost import QualityLimits

    limits = QualityLimits(max_spread_ratio=max_spread, max_residual_ratio=max_residual)
    if from_steps is not None:
        given = {"MODEL": model, "--draft": draft, "--steps": steps}
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"nothing is measured, but {name} is given")
        _report(_of_file(from_steps, limits), out, as_json=as_json)
        return
    settings = PairSettings(
        model=model,
        draft=draft,
        has_random_drafter=random_drafter,
        has_random_weights=random_weights,
        device=device,
        dtype=dtype.value,
        max_model_len=max_model_len,
    )
    speculative = {
        "method": "dspark",
        # Acceptance pinned: a shape of step stays what it is.
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.0] * 64,
    }
    with progress_bars() as on_progress:
        pair, pin = open_pinned(settings, speculative, on_progress, max_num_seqs=max_num_seqs)
        with closing(pin.llm):
            shapes = ProfileSettings.default(
                max_num_seqs=pin.llm.config.max_num_seqs,
                num_drafts=pin.num_drafts,
                max_model_len=pin.llm.config.max_model_len,
                is_cuda=pair.target.model.device.type == "cuda",
                is_quick=quick,
            )
            shapes = replace(
                shapes,
                num_requests=tuple(num_requests or shapes.num_requests),
                verify_lens=tuple(shapes.verify_lens if verify_len is None else verify_len),
                context_lens=tuple(context_len or shapes.context_lens),
                limits=limits,
            )
            source = provenance(pair, context_lens=list(shapes.context_lens))
            found = profile_steps(
                pin,
                shapes,
                source,
                on_progress,
                lambda measured: None if steps is None else measured.save(steps),
            )
    _report(found, out, as_json=as_json)


def _of_file(path: Path, limits: QualityLimits) -> StepProfile:
    """Make the table of measured steps; its source also says by what and when."""
    from extkv.bench.provenance import fit_facts
    from extkv.bench.step_table import MeasuredSteps

    return MeasuredSteps.load(path).profile(limits, **fit_facts())


def _report(found: StepProfile, out: Path | None, *, as_json: bool) -> None:
    if out is not None:
        found.save(out)
    typer.echo(json.dumps(found.as_dict()) if as_json else found.describe())
    if out is not None:
        typer.echo(f"wrote {out}", err=True)
