"""`extkv wire`: look at EngineCore messages that were kept in files."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import Annotated

import typer

from extkv.cli.serve import ProfileName

wire = typer.Typer(
    name="wire",
    help="Look at EngineCore messages.",
    no_args_is_help=True,
    add_completion=False,
)


class Kind(str, Enum):
    """Name the kinds of messages, as `extkv.protocol.reading.KINDS` does."""

    REQUEST = "request"
    ABORT = "abort"
    START_DP_WAVE = "start-dp-wave"
    UTILITY_CALL = "utility-call"
    OUTPUTS = "outputs"
    INIT = "init"
    HANDSHAKE = "handshake"
    READY_RESPONSE = "ready-response"
    COORDINATOR_NEWS = "coordinator-news"
    COORDINATOR_COMMAND = "coordinator-command"


@wire.callback()
def about() -> None:
    """Look at EngineCore messages."""


@wire.command()
def decode(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The frames of one message in order, a file each; identity and type frames may "
            "come first.",
        ),
    ],
    profile: Annotated[
        ProfileName, typer.Option(help="vLLM release whose wire the sender speaks.")
    ] = ProfileName.V0_32,
    kind: Annotated[
        Kind | None, typer.Option(help="What it is; found from its contents by default.")
    ] = None,
) -> None:
    """Print a message as JSON. What the profile does not know is counted on standard error."""
    from extkv.protocol.reading import plain_value, read_message

    frames = [path.read_bytes() for path in files]
    read = read_message(frames, profile.value, kind=None if kind is None else kind.value)
    found = {"kind": read.kind, "message": plain_value(read.message)}
    typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    if any(read.skipped):
        elements, keys = read.skipped
        typer.echo(f"passed over: {elements} elements of arrays, {keys} keys of maps", err=True)
