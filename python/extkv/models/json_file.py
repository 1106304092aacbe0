"""Reading a JSON file of a model directory, with typed look-up.

Every refusal names the file, the key, what was found and what was expected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T", int, float, str, bool)

# Sizes and ids fit in a signed 64-bit integer; a longer number only breaks arithmetic later.
MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class JsonObject:
    """Hold one object of a JSON file.

    Attributes:
        path: File it came from, named in errors.
        values: Its members; a member that is null counts as missing.
        prefix: Keys that lead to the object, such as `rope_scaling.`.
    """

    path: Path
    values: Mapping[str, object]
    prefix: str = ""

    def require(self, key: str, kind: type[T]) -> T:
        """Return the value of `key`; an integer is taken for a float.

        Raises:
            ModelFileError: If the key is missing or its value is not a `kind`.
        """
        value = self.find(key, kind)
        if value is None:
            raise self.error(key, "is missing", kind.__name__)
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the value of `key`, or None where the object does not have it.

        Raises:
            ModelFileError: If the value is not a `kind`.
        """
        value = self.values.get(key)
        return None if value is None else self._checked(key, value, kind)

    def find_list(self, key: str, kind: type[T]) -> list[T] | None:
        """Return the array under `key`, or None where the object does not have it.

        Raises:
            ModelFileError: If the value is no array, or an item is not a `kind`.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(key, f"is {value!r:.80}", f"an array of {kind.__name__}")
        return [self._checked(key, item, kind) for item in value]

    def find_object(self, key: str) -> JsonObject | None:
        """Return the object under `key`, or None where there is none.

        Raises:
            ModelFileError: If the value is no object.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r:.80}", "an object")
        return JsonObject(self.path, value, f"{self.prefix}{key}.")

    def error(self, key: str, found: str, expected: str) -> ModelFileError:
        """Return an error about one key, to be raised."""
        return ModelFileError(
            f"model file {self.path}: key {self.prefix}{key} {found}, expected {expected}"
        )

    def _checked(self, key: str, value: object, kind: type[T]) -> T:
        # A bool is an int to Python and never one in a model file.
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > MAX_INTEGER:
                raise self.error(key, "is an integer of more than 64 bits", kind.__name__)
            if kind is float:
                return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is {value!r:.80}", kind.__name__)
        return value


def read_json(path: Path) -> JsonObject:
    """Read a file that holds one JSON object.

    Raises:
        ModelFileError: If the file cannot be opened, is not UTF-8, is not valid JSON, or holds
            something else than an object.
    """
    return parse_json(path, read_text(path))


def parse_json(path: Path, text: str) -> JsonObject:
    """Parse the text of a file that holds one JSON object.

    Raises:
        ModelFileError: If it is not valid JSON, or something else than an object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"model file {path}: not valid JSON: {error}"
        raise ModelFileError(msg) from error
    if not isinstance(values, dict):
        msg = f"model file {path}: holds {values!r:.80}, expected a JSON object"
        raise ModelFileError(msg)
    return JsonObject(path, values)


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        ModelFileError: If the file cannot be opened or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = (
            f"model file {path}: not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        )
        raise ModelFileError(msg) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        msg = f"model file {path}: cannot be opened: {reason}"
        raise ModelFileError(msg) from error
