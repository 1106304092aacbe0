"""Fork and spawn: a forked child gets an error and does no harm, a spawned one works (B118)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.gpu

FORK = """
import gc, os, sys, warnings
warnings.simplefilter("ignore")
import extkv, torch
from extkv import errors
MIB = 2**20
tensor = extkv.ExtensibleTensor(64 * MIB, "cuda:0", 2)
tensor.resize_per_segment_(4 * MIB)
view = tensor.segment(1)
view.fill_(5)
torch.cuda.synchronize()

def refusals():
    uses = (
        lambda: tensor.resize_per_segment_(8 * MIB),
        lambda: tensor.shrink_per_segment_(0),
        lambda: extkv.ExtensibleTensor(8 * MIB, "cuda:0"),
    )
    for use in uses:
        try:
            use()
        except errors.ForkedProcessError as error:
            yield "fork" in str(error) and "spawn" in str(error)
        else:
            yield False

pid = os.fork()
if pid == 0:
    code = 1
    try:
        results = list(refusals())
        print(results, file=sys.stderr, flush=True)
        del tensor, view
        gc.collect()
        code = 0 if all(results) else 2
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(code)
_, status = os.waitpid(pid, 0)
tensor.resize_per_segment_(16 * MIB, zero_new=True)
kept = bool((tensor.segment(1)[:4 * MIB] == 5).all())
zero = not bool(tensor.segment(1)[4 * MIB:].any())
print(os.waitstatus_to_exitcode(status), kept, zero, bool((view == 5).all()))
"""

SPAWN = """
import multiprocessing
import extkv, torch

def work(value):
    with extkv.ExtensibleTensor(8 << 20, "cuda:0") as tensor:
        tensor.resize_(4 << 20).fill_(value)
        return int(tensor.tensor.sum())

if __name__ == "__main__":
    tensor = extkv.ExtensibleTensor(8 << 20, "cuda:0")
    tensor.resize_(4 << 20).fill_(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (3,)) == 3 * (4 << 20))
    print(int(tensor.tensor.sum()) == 4 << 20)
"""


def test_forked_child_gets_an_error_and_does_no_harm(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """In the child each use names fork and spawn; the parent's memory stays."""
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True", "True", "True"], done.stderr


def test_spawned_child_works(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A spawned child makes and uses its own tensor beside the parent's."""
    script = tmp_path / "spawn_child.py"
    script.write_text(SPAWN, encoding="utf-8")
    done = run_python(script)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr
