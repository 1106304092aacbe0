"""Every example that people read runs: README, docs, docstrings, examples/."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import extkv
import extkv.tensor
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_readme_examples_run(run_python):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    memory, engine = (run_python(block) for block in blocks)
    for result in (memory, engine):
        assert (result.returncode, result.stderr) == (0, "")
    assert memory.stdout.strip().isdecimal()
    assert len(engine.stdout.split()) > 3


def test_the_example_of_structured_outputs_runs(run_python):
    text = (ROOT / "docs/structured-outputs.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    result = run_python(block)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() in {"yes", "no"}


@pytest.mark.parametrize("module", [extkv.tensor], ids=lambda module: module.__name__)
def test_docstring_examples_run(module):
    names = {"ExtensibleTensor": extkv.ExtensibleTensor}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path):
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "holds 1" in result.stdout


def test_links_in_documents_lead_somewhere():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
