"""Where figures come from: device, driver, versions, commit and command line."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import extkv

if TYPE_CHECKING:
    from extkv.bench.pairs import Pair

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def provenance(pair: Pair, **facts: object) -> dict[str, str]:
    """Describe a run on a pair.

    Args:
        pair: What runs; its target says on which device.
        **facts: What else to note.
    """
    model = pair.target.model
    is_cuda = model.device.type == "cuda"
    values: dict[str, object] = {
        "device": torch.cuda.get_device_name(model.device) if is_cuda else _cpu_name(),
        "driver": _driver() if is_cuda else "none",
        "model": pair.model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft": pair.draft_name,
        "num_drafts": 0 if pair.draft is None else pair.draft.config.num_drafts,
        "extkv": extkv.__version__,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        **run_facts(),
    }
    return {name: str(value) for name, value in (values | facts).items()}


def run_facts() -> dict[str, str]:
    """Say which commit ran, by which command, and when."""
    return {
        "commit": commit(),
        "command": _command(),
        "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"),
    }


def fit_facts() -> dict[str, str]:
    """Describe a fit of what was measured elsewhere, beside where that was."""
    return {f"fit_{name}": value for name, value in run_facts().items()}


def _command() -> str:
    """Return the command line without the folders of this machine's programs."""
    name = Path(sys.argv[0]).name
    return shlex.join(["extkv" if name == "__main__.py" else name, *sys.argv[1:]])


def commit() -> str:
    """Return the commit in `EXTKV_COMMIT`, else that of the checkout, else "unknown"."""
    named = os.environ.get("EXTKV_COMMIT")
    if named:
        return named
    for folder in Path(__file__).resolve().parents:
        if (folder / ".git").exists():
            try:
                return _head(folder / ".git")[:12]
            except OSError:
                break
    return "unknown"


def _head(git: Path) -> str:
    """Return the hash that HEAD of a repository or a worktree stands for."""
    if git.is_file():
        git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
    text = (git / "HEAD").read_text("utf-8").strip()
    if not text.startswith("ref: "):
        return text
    name = text.removeprefix("ref: ")
    shared = git / "commondir"
    root = git / shared.read_text("utf-8").strip() if shared.is_file() else git
    if (root / name).is_file():
        return (root / name).read_text("utf-8").strip()
    packed = (root / "packed-refs").read_text("utf-8").splitlines()
    found = [line.split()[0] for line in packed if line.endswith(" " + name)]
    return found[0] if found else "unknown"


def _driver() -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER_FILE.read_text("utf-8"))
    except OSError:
        return "unknown"
    return "unknown" if found is None else found[0]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
