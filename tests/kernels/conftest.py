"""Where kernels run in these tests: on the GPU if there is one, else in Triton's interpreter.

The interpreter is chosen before anything imports Triton. Every `torch.empty` of a test is poisoned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
BUILDS: dict[str, subprocess.Popen[str]] = {}


def choose_interpreter() -> None:
    """Make Triton interpret kernels; modules of an earlier import would still compile them."""
    for name in list(sys.modules):
        is_stale = name.split(".")[0] == "triton" or name.startswith("extkv.kernels")
        # The native part of Triton cannot be loaded twice, and does not know about the choice.
        if is_stale and "libtriton" not in name:
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"


if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    choose_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none, and drop the warnings of the interpreter's arithmetic."""
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        for warning in (
            "ignore::RuntimeWarning",
            "ignore:Conversion of an array:DeprecationWarning",
        ):
            item.add_marker(pytest.mark.filterwarnings(warning))
        if not HAS_GPU and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, this machine has none"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds for sm_90 beside the other tests, if a selected test looks at them."""
    if any("sm90_builds" in getattr(item, "fixturenames", ()) for item in session.items):
        for part in ("attention", "drafts", "others"):
            BUILDS[part] = subprocess.Popen(
                [sys.executable, str(FOLDER / "compile_for_sm90.py"), part],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )


def pytest_sessionfinish() -> None:
    """End builds that nothing waited for."""
    for build in BUILDS.values():
        if build.poll() is None:
            build.kill()
            build.communicate()


@pytest.fixture(scope="session")
def sm90_builds() -> list[dict[str, Any]]:
    """Return what the builds report, once they are done."""
    lines = []
    for part, build in BUILDS.items():
        output, errors = build.communicate(timeout=280)
        assert build.returncode == 0, f"{part}: {errors}"
        lines += [json.loads(line) for line in output.splitlines()]
    return lines


@pytest.fixture
def device() -> torch.device:
    """Return the device that kernels run on."""
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with what no kernel should let through."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    if tensor.dtype in {torch.int32, torch.int64}:
        return tensor.fill_(torch.iinfo(tensor.dtype).min // 2)
    return tensor


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its like return, so that an unwritten element shows."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned
