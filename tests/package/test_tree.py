"""Rules of the tree: who may import whom, where unsafe code lives, how files are called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "extkv"
MODULES = sorted(PACKAGE.rglob("*.py"))
UNSAFE_PLACES = ("rust/extkv-core/src/driver/", "rust/extkv-py/src/dlpack.rs")


def imports_of(path: Path, *, at_load_only: bool) -> set[str]:
    """Names of the modules that a file imports; at load only: outside functions and type checks."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        is_lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_load_only and (is_lazy or is_typing):
            skipped.update(id(child) for child in ast.walk(node))
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def folder(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: Path):
    names = imports_of(path, at_load_only=False)
    uses = lambda package: any(n == package or n.startswith(package + ".") for n in names)  # noqa: E731
    if folder(path) != "kernels":
        assert not uses("triton"), "only kernels may import triton"
    else:
        assert not uses("extkv.reference")
        assert not uses("extkv.models")
    if folder(path) == "reference":
        assert not uses("extkv.kernels")
    if folder(path) == "models":
        assert not uses("extkv.engine")
    if folder(path) in {"models", "engine", "kernels", "reference"}:
        assert not uses("extkv.cli")
    if folder(path) in {"protocol", "sched", "transport"}:
        assert not uses("torch")
        assert not uses("extkv.engine")
        assert not uses("extkv.serve")
    if folder(path) == "structured_outputs":
        assert not uses("torch")
        assert not uses("extkv.engine")
    if folder(path) == "engine":
        assert not uses("extkv.bench")


@pytest.mark.parametrize(
    "name",
    [
        "__init__.py",
        "tensor.py",
        "device.py",
        "errors.py",
        "outputs.py",
        "sampling_params.py",
        "__main__.py",
    ],
)
def test_importing_extkv_imports_no_torch(name: str):
    assert not any(n.startswith("torch") for n in imports_of(PACKAGE / name, at_load_only=True))


def test_unsafe_code_lives_in_two_places():
    for path in sorted((ROOT / "rust").rglob("*.rs")):
        relative = path.relative_to(ROOT).as_posix()
        lines = [line.split("//")[0] for line in path.read_text().splitlines()]
        is_unsafe = any(
            "unsafe {" in line or "unsafe fn" in line or "unsafe impl" in line for line in lines
        )
        assert not is_unsafe or relative.startswith(UNSAFE_PLACES), relative


def test_every_unsafe_block_names_its_guarantor():
    for place in UNSAFE_PLACES:
        paths = [ROOT / place] if place.endswith(".rs") else sorted((ROOT / place).glob("*.rs"))
        for path in paths:
            lines = path.read_text().splitlines()
            for number, line in enumerate(lines):
                if "unsafe {" in line and not line.strip().startswith("//"):
                    above = "\n".join(lines[max(0, number - 5) : number])
                    assert "SAFETY:" in above, f"{path}:{number + 1}"


def test_libraries_do_not_know_python_or_each_other():
    core = (ROOT / "rust/extkv-core/Cargo.toml").read_text()
    sched = (ROOT / "rust/dspark-sched/Cargo.toml").read_text()
    assert "pyo3" not in core
    assert "dspark" not in core
    assert "pyo3" not in sched
    assert "extkv-core" not in sched
    assert "forbid(unsafe_code)" in (ROOT / "rust/dspark-sched/src/lib.rs").read_text()


def test_core_layers_do_not_look_up():
    source = ROOT / "rust/extkv-core/src"
    for name in ("kv", "protocol", "transport"):
        for path in sorted((source / name).rglob("*.rs")):
            text = path.read_text()
            assert "crate::driver" not in text, path
            assert "crate::memory" not in text, path
            assert name == "transport" or "crate::transport" not in text, path
    for path in sorted((source / "memory").rglob("*.rs")):
        text = path.read_text()
        assert "CudaDriver" not in text, path
        assert "HostDriver" not in text, path


def test_no_file_is_a_drawer():
    shipped = [*MODULES, *(ROOT / "rust").rglob("src/**/*.rs")]
    drawers = {"utils", "helpers", "common", "misc", "manager"}
    assert not [path for path in shipped if path.stem in drawers]


def test_kernels_rhyme_with_reference_tests_and_benches():
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        if path.name == "__init__.py":
            continue
        assert (PACKAGE / "reference" / path.name).exists(), path.name
        assert (ROOT / "tests/kernels" / f"test_{path.name}").exists(), path.name
        assert (ROOT / "bench/kernels" / f"bench_{path.name}").exists(), path.name


def test_modules_begin_with_their_subject():
    for path in [*MODULES, *sorted((ROOT / "rust").rglob("src/**/*.rs"))]:
        first = path.read_text().split("\n", 1)[0]
        assert first.startswith(('"""', "//!")), path


def test_the_engine_is_small():
    files = (PACKAGE / "engine").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2500
