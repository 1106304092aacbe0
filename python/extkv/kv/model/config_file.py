"""Reading a model's `config.json`, with typed look-up.

Every refusal names the file, the key, what was found and what was expected. A key that is null
counts as missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

# Larger sizes exist in no model; products of a few of them stay far below what Python prints fast.
MAX_SIZE = 2**40


@dataclass(frozen=True)
class ConfigFile:
    """Hold the members of one configuration.

    Attributes:
        path: File it came from, named in errors.
        values: Its members.
    """

    path: Path
    values: Mapping[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, or `default` where the key is missing.

        Raises:
            ModelFileError: If the key is missing and has no default, or is no such number.
        """
        found = self.optional_size(key)
        if found is not None:
            return found
        if default is None:
            raise self.error(key, "is missing", "a positive whole number")
        return default

    def optional_size(self, key: str) -> int | None:
        """Return a whole number of at least 1, or None where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        return None if value is None else self._checked_size(key, value, least=1)

    def count(self, key: str, default: int) -> int:
        """Return a whole number of at least 0, or `default` where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        return default if value is None else self._checked_size(key, value, least=0)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a truth value, or `default` where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"is {value!r:.80}", "true or false")
        return default if value is None else value

    def text(self, key: str) -> str | None:
        """Return a string, or None where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"is {value!r:.80}", "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings, or None where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"is {value!r:.80}", "a list of strings")
        return value

    def counts(self, key: str) -> list[int]:
        """Return a list of whole numbers of at least 0; it is empty where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, f"is {value!r:.80}", "a list of whole numbers")
        return [self._checked_size(key, item, least=0) for item in value]

    def section(self, key: str) -> ConfigFile | None:
        """Return an object inside this one, or None where the key is missing.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r:.80}", "an object")
        return ConfigFile(self.path, value)

    def error(self, key: str, found: str, expected: str) -> ModelFileError:
        """Return an error about one key, to be raised."""
        return ModelFileError(f"model file {self.path}: {key} {found}, expected {expected}")

    def _checked_size(self, key: str, value: object, *, least: int) -> int:
        # A bool is an int to Python and never one in a configuration.
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= MAX_SIZE:  # type: ignore[operator]
            raise self.error(key, f"is {value!r:.80}", f"a whole number in [{least}, 2**40]")
        return value  # type: ignore[return-value]


def read_config_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Read the `config.json` of a model directory; weights need not be there.

    Raises:
        ModelFileError: If there is none, or it is no JSON object.
    """
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(
            f"model file {file}: cannot be opened: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"model file {file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"model file {file}: holds {values!r:.80}, expected a JSON object")
    return ConfigFile(file, values)
