"""Files that appear under their name only when they are whole."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file to write; it replaces that of its name at the end, or never.

    Until then it lies beside it under a name of its own, so that several processes may write
    the same file: one of them is last. An exception leaves what was there before.

    Args:
        path: The file.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
