"""Options of `extkv generate` that constrain answers, as one set of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extkv.cli.questions import decode_utf8

if TYPE_CHECKING:
    from extkv.structured_outputs.params import StructuredOutputsParams

_PANEL = "Structured outputs (one of them)"


def _file_option(name: str, help_text: str) -> Any:  # noqa: ANN401, typer's own type is private
    return typer.Option(
        name, metavar="FILE", exists=True, dir_okay=False, help=help_text, rich_help_panel=_PANEL
    )


SchemaOption = Annotated[
    Path | None, _file_option("--json-schema", "Answers are JSON that this schema describes.")
]
GrammarOption = Annotated[
    Path | None, _file_option("--grammar", "Answers are derived from this Lark or GBNF grammar.")
]
RegexOption = Annotated[
    str | None,
    typer.Option(help="Answers match this expression as a whole.", rich_help_panel=_PANEL),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(help="Answers are one of these; once for each.", rich_help_panel=_PANEL),
]
JsonObjectOption = Annotated[
    bool, typer.Option("--json-object", help="Answers are JSON objects.", rich_help_panel=_PANEL)
]


def structured_outputs(
    *,
    json_schema: Path | None,
    grammar: Path | None,
    regex: str | None,
    choice: list[str] | None,
    json_object: bool,
) -> StructuredOutputsParams | None:
    """Return what the options ask for; None if they ask for nothing.

    Raises:
        InvalidArgumentError: If they ask for more than one thing, or for what can never work.
    """
    from extkv.structured_outputs.params import StructuredOutputsParams

    fields = {
        "json": None if json_schema is None else _text_of(json_schema),
        "grammar": None if grammar is None else _text_of(grammar),
        "regex": regex,
        "choice": choice or None,
        "json_object": json_object or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return StructuredOutputsParams.from_fields(given) if given else None


def _text_of(path: Path) -> str:
    return decode_utf8(path.read_bytes(), str(path))
