"""`extkv train-drafter`: train a DSpark drafter on its target's own answers within a budget."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.generate import DeviceOption, ModelOption  # noqa: TC001, typer reads them
from extkv.cli.progress import progress_bars

if TYPE_CHECKING:
    from extkv.dspark.train import StudentSettings
    from extkv.models import LoadedModel


class HeadName(str, Enum):
    """Name the heads that can be trained."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class LayoutName(str, Enum):
    """Name the layouts of a draft block."""

    ANCHOR = "anchor"
    FILL_IN = "fill-in"


class OptimizerChoice(str, Enum):
    """Name the optimizers."""

    ADAMW = "adamw"
    MUON = "muon"


def train_drafter(
    *,
    model: ModelOption = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Directory for drafters, log and checkpoint.")
    ] = Path("drafter"),
    budget_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds for generating, training and evaluating.")
    ] = 300.0,
    generation_ratio: Annotated[
        float, typer.Option(min=0, max=0.95, help="Share of the budget to generate texts in.")
    ] = 0.3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that generating and training take turns.")
    ] = 3,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 3,
    num_drafts: Annotated[int, typer.Option(min=1, help="Tokens that a block drafts.")] = 7,
    num_taps: Annotated[int, typer.Option(min=1, help="Layers of the target that it reads.")] = 5,
    head: Annotated[HeadName, typer.Option(help="Markov head.")] = HeadName.VANILLA,
    markov_rank: Annotated[int, typer.Option(min=1, help="Width of the Markov head.")] = 64,
    layout: Annotated[
        LayoutName,
        typer.Option(help="Slots that draft: the anchor's too, or masks alone (fill-in)."),
    ] = LayoutName.ANCHOR,
    confidence: Annotated[bool, typer.Option(help="Train a confidence head too.")] = True,
    mask_token_id: Annotated[
        int | None, typer.Option(min=0, help="Token of empty slots; the last of the vocabulary.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="Another drafter to train beside it, with num_layers, num_drafts, num_taps, head, "
            "markov_rank, layout (anchor, fill-in), lr, optimizer, initial, draft_vocab_size, "
            "bigram_steps, ce_weight, tv_weight or confidence changed.",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int,
        typer.Option(min=0, help="Tokens that can be drafted, the most frequent ones; 0 for all."),
    ] = 0,
    bigram_steps: Annotated[
        int,
        typer.Option(
            min=0, help="Steps on pairs of tokens that a vanilla Markov head begins with."
        ),
    ] = 0,
    ce_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the cross-entropy with the token that came.")
    ] = 0.1,
    tv_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the distance from the target's law.")
    ] = 0.9,
    optimizer: Annotated[OptimizerChoice, typer.Option(help="Optimizer.")] = OptimizerChoice.ADAMW,
    lr: Annotated[float, typer.Option(help="Largest learning rate.")] = 1e-3,
    initial: Annotated[
        str,
        typer.Option(help="Where it begins: target, random, or the directory of a drafter."),
    ] = "target",
    batch_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a batch.")] = 32_768,
    batch_blocks: Annotated[int, typer.Option(min=8, help="Draft blocks of a batch.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 448,
    max_text_len: Annotated[int, typer.Option(min=32, help="Most tokens of a text.")] = 1024,
    texts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Texts of an earlier run to train on."),
    ] = None,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="JSON lines of prompts to measure on."),
    ] = None,
    num_held_out: Annotated[int, typer.Option(min=1, help="Prompts per measured set.")] = 32,
    evaluate_every: Annotated[float, typer.Option(help="Seconds between evaluations.")] = 60.0,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps instead of seconds, for repeatable runs.")
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that generate, 0 for this one; 3 on CUDA, else 0."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Texts that each generates at once.")
    ] = None,
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and anchors.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from --out.")] = False,
    verifier: Annotated[
        str | None, typer.Option(help="Name of the target in the drafter's files.")
    ] = None,
) -> None:
    """Train a DSpark drafter for a model, on answers that the model gives itself.

    Nothing but token ids is stored. Prints one JSON object with the accepted lengths.
    """
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.dspark.train import session
    from extkv.dspark.train.generation import GenerationSettings
    from extkv.dspark.train.settings import BatchSettings, RunSettings

    base: dict[str, Any] = {
        "num_layers": num_layers,
        "num_drafts": num_drafts,
        "num_taps": num_taps,
        "head": head.value,
        "markov_rank": markov_rank,
        "confidence": confidence,
        "mask_token_id": mask_token_id,
        "layout": layout.value,
        "optimizer": optimizer.value,
        "lr": lr,
        "initial": initial,
        "draft_vocab_size": draft_vocab_size,
        "bigram_steps": bigram_steps,
        "ce_weight": ce_weight,
        "tv_weight": tv_weight,
        "seed": seed,
    }
    variants = {"drafter": base}
    variants |= dict(read_variant(text, base) for text in variant or [])
    settings = session.SessionSettings(
        model=model,
        directory=out,
        device=device,
        run=RunSettings(
            budget_s=budget_seconds,
            generation_ratio=generation_ratio,
            num_rounds=rounds,
            max_steps=max_steps,
            evaluate_every_s=evaluate_every,
        ),
        batches=BatchSettings(batch_tokens=batch_tokens, batch_blocks=batch_blocks, seed=seed),
        generation=GenerationSettings(max_tokens=max_tokens, max_text_len=max_text_len, seed=seed),
        texts=texts,
        evaluate=tuple(evaluate or ()),
        num_held_out=num_held_out,
        num_workers=num_workers,
        max_num_seqs=max_num_seqs,
        is_resumed=resume,
        verifier=verifier,
    )

    def make_students(loaded: LoadedModel) -> list[StudentSettings]:
        from extkv.dspark.train.shapes import student_of

        return [student_of(name, loaded.config, **values) for name, values in variants.items()]

    with progress_bars() as on_progress:
        results = session.train_drafters(settings, make_students, on_progress)
    typer.echo(json.dumps(results))


def read_variant(text: str, base: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read `NAME:KEY=VALUE,...`: a drafter that differs from another.

    Raises:
        typer.BadParameter: If it is none, or has an unknown key or a value of another type.
    """
    name, _, rest = text.partition(":")
    values = dict(base)
    if not re.fullmatch(r"[\w.-]+", name):
        raise typer.BadParameter(f"{name!r} is no name", param_hint="--variant")
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in base:
            msg = f"{key!r} is no field, known: {', '.join(base)}"
            raise typer.BadParameter(msg, param_hint="--variant")
        try:
            values[key] = _like(base[key], value)
        except ValueError as error:
            raise typer.BadParameter(f"{part!r}: {error}", param_hint="--variant") from error
    return name, values


def _like(known: object, value: str) -> object:
    if isinstance(known, bool):
        if value not in {"true", "false"}:
            raise ValueError("expected true or false")
        return value == "true"
    if isinstance(known, float):
        return float(value)
    if isinstance(known, str):
        return value
    return int(value)
