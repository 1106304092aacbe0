"""Typed look-up in the key-value part of a GGUF file.

Every refusal names the file, the key, what was found and what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True)
class GGUFMetadata:
    """Hold the metadata of one GGUF file.

    Attributes:
        path: File the values came from, named in errors.
        values: Decoded values by key; arrays are lists.
    """

    path: Path
    values: Mapping[str, object]

    def require(self, key: str, kind: type[T]) -> T:
        """Return the value of `key`.

        Raises:
            ModelFileError: If the key is missing or its value is not a `kind`.
        """
        value = self.find(key, kind)
        if value is None:
            msg = f"model file {self.path}: metadata key {key} is missing, expected {kind.__name__}"
            raise ModelFileError(msg)
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the value of `key`, or None where the file does not have it.

        Raises:
            ModelFileError: If the value is not a `kind`.
        """
        value = self.values.get(key)
        return None if value is None else self._checked(key, value, kind)

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """Return the array stored under `key`.

        Raises:
            ModelFileError: If the key is missing, is no array, or an item is not a `kind`.
        """
        value = self.values.get(key)
        if not isinstance(value, list):
            found = "missing" if value is None else repr(value)
            msg = (
                f"model file {self.path}: metadata key {key} is {found}, "
                f"expected an array of {kind.__name__}"
            )
            raise ModelFileError(msg)
        return [self._checked(key, item, kind) for item in value]

    def _checked(self, key: str, value: object, kind: type[T]) -> T:
        # A bool is an int to Python and never one in a model file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            msg = (
                f"model file {self.path}: metadata key {key} is {value!r:.80}, "
                f"expected {kind.__name__}"
            )
            raise ModelFileError(msg)
        return value
