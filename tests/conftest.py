"""What all Python tests share."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import extkv
import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.load_profile("default")
torch.set_num_threads(2)


@pytest.fixture
def host_budget() -> Iterator[Callable[[int], None]]:
    """Set the host budget for one test."""
    gc.collect()
    yield extkv.set_host_memory_budget
    extkv.set_host_memory_budget(None)


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a program in a fresh interpreter."""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run
