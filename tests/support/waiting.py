"""Waiting in tests: long enough for a busy machine, and no longer than needed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 20.0


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)
