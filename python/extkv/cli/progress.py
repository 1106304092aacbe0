"""Progress of what takes long, on a terminal's standard error and nowhere else."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a phase, what is done of it, and how much there is."""
    # Imported late: `extkv --help` must not pay for it.
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)

        yield show
