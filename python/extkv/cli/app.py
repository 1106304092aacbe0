"""The `extkv` command: global options, the list of commands, and how errors end."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from extkv.cli.bench import bench
from extkv.cli.calibrate import calibrate
from extkv.cli.check_draft import check_draft
from extkv.cli.client import client
from extkv.cli.doctor import doctor
from extkv.cli.generate import generate
from extkv.cli.plan import plan
from extkv.cli.profile import profile
from extkv.cli.serve import serve
from extkv.cli.train_drafter import train_drafter
from extkv.cli.wire import wire
from extkv.errors import ExtkvError

INTERRUPTED_EXIT_CODE = 130


class ExtkvGroup(TyperGroup):
    """Turn errors of the ExtkvError family into one line on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401, as in typer
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ExtkvError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from error


app = typer.Typer(
    name="extkv",
    cls=ExtkvGroup,
    help="Growable KV cache memory for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    # An error outside the ExtkvError family is a bug: show the plain traceback.
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(plan)
app.command()(serve)
app.command()(client)
app.command()(doctor)
app.command()(train_drafter)
app.command()(profile)
app.command()(calibrate)
app.command()(check_draft)
app.add_typer(bench)
app.add_typer(wire)


def _print_version(*, value: bool) -> None:
    if value:
        typer.echo(f"extkv {importlib.metadata.version('extkv')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Growable KV cache memory for LLM inference."""


def main() -> None:
    """Run the command line and exit."""
    # Read when PyTorch is loaded, by its OpenMP. Threads that spin while they wait for each other
    # take the cores that the others need, as soon as another program is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
