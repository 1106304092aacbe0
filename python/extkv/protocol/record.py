"""What all message classes share: frozen fields, text, and equality that knows arrays."""

from __future__ import annotations

import dataclasses

import numpy as np


class Message:
    """Base of the message classes: a frozen value with named fields.

    Two messages are equal if they have the same class and equal fields; arrays are equal if dtype,
    shape and values are, with NaN equal to NaN. Messages cannot be hashed.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _are_equal(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    return bool(left == right)
