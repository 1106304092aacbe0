"""Files of prompts to measure on: JSON lines of objects with `turns`, what a user says in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os


def read_turns(path: str | os.PathLike[str]) -> list[list[str]]:
    """Return the user turns of each line of a file of prompts.

    Raises:
        InvalidArgumentError: If a line has no turns, or the file no line.
    """
    conversations = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, KeyError, TypeError) as error:
            msg = f"{path}, line {number}: expected an object with turns"
            raise InvalidArgumentError(msg) from error
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise InvalidArgumentError(f"{path}, line {number}: turns are {turns!r:.60}")
        conversations.append(turns)
    if not conversations:
        raise InvalidArgumentError(f"{path} has no prompt")
    return conversations
