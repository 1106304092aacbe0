"""Fixtures of the CUDA tests, and the skips of those that this machine cannot run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        if num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, this machine has none"))
        elif num_gpus < 2 and item.get_closest_marker("multi_gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs, this machine has one"))


@pytest.fixture
def free_bytes() -> Callable[[], int]:
    """Return a function that gives the driver's free memory on device 0 once all work is done."""

    def read() -> int:
        gc.collect()
        torch.cuda.synchronize(0)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(0)[0]

    return read


@pytest.fixture
def assert_returns_memory(free_bytes: Callable[[], int]) -> Callable[[Callable[[], object]], None]:
    """Return a function that fails when an operation keeps more than 2 MiB of device memory.

    The operation runs once before, so that kernels it loads and lasting driver allocations do not
    count.
    """

    def check(operation: Callable[[], object]) -> None:
        operation()
        before = free_bytes()
        operation()
        assert abs(before - free_bytes()) <= 2 * MIB

    return check


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs code, or a script, in a fresh interpreter.

    The interpreter can import what this one can, and is ended after `timeout_s` seconds.
    """

    def run(code: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        paths = [path for path in sys.path if path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        arguments = ["-c", code] if isinstance(code, str) else [str(code)]
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            check=False,
        )

    return run
