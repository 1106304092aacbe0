"""What a kernel may touch: committed bytes; anything past them is an illegal access.

An illegal access ruins the process's context, so each runs in its own interpreter.
compute-sanitizer would report it as an error of the suite: set EXTKV_SANITIZER=1 there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("EXTKV_SANITIZER") == "1",
        reason="makes illegal accesses on purpose, which compute-sanitizer would count",
    ),
]

SETUP = """
import os, sys
import extkv, torch
MIB = 2**20
tensor = extkv.ExtensibleTensor(64 * MIB, "cuda:0")
full = tensor.full_view()

def is_illegal(view):
    try:
        view.fill_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return "illegal" in str(error).lower()
    return False

def finish(illegal):
    print("illegal" if illegal else "allowed", flush=True)
    os._exit(0)
"""

CASES = {
    "committed": ("tensor.resize_(4 * MIB)", "full[:4 * MIB]", "allowed"),
    "nothing-committed": ("pass", "full[:1]", "illegal"),
    "past-the-granules": ("tensor.resize_(4 * MIB)", "full[4 * MIB:4 * MIB + 1]", "illegal"),
    "after-shrink": (
        "tensor.resize_(32 * MIB); tensor.shrink_per_segment_(0)",
        "full[16 * MIB:]",
        "illegal",
    ),
    "grown-again": (
        "tensor.resize_(32 * MIB); tensor.shrink_per_segment_(0); tensor.resize_(32 * MIB)",
        "full[:32 * MIB]",
        "allowed",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_kernel_access(
    case: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A kernel's write is allowed on committed bytes and illegal elsewhere."""
    prepare, view, expected = CASES[case]
    done = run_python(f"{SETUP}\n{prepare}\nfinish(is_illegal({view}))")
    assert (done.returncode, done.stdout.split()) == (0, [expected]), done.stderr
