"""The wheel: tags, contents, and that it imports where there is nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    maturin = Path(sys.executable).parent / "maturin"
    command = [str(maturin), "build", "--release", "--quiet", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    (path,) = out.glob("*.whl")
    return path


def test_b125_wheel_is_abi3_and_does_not_link_libpython(wheel: Path):
    assert "-cp310-abi3-manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (native,) = [name for name in names if name.endswith("_extkv.abi3.so")]
        binary = archive.read(native)
    assert b"libpython" not in binary
    assert b"libcuda.so.1\x00" not in binary.split(b"\x00.text")[0][:4096]
    for expected in (
        "extkv/py.typed",
        "extkv/_extkv.pyi",
        "extkv/tensor.py",
        "extkv/cli/__init__.py",
    ):
        assert expected in names


def test_the_wheel_has_every_file_of_the_shipped_drafter(wheel: Path):
    folder = "extkv/drafters/smollm2-135m-instruct"
    paths = sorted((ROOT / "python" / folder).iterdir())
    assert paths
    with zipfile.ZipFile(wheel) as archive:
        found = {
            entry.filename: entry.CRC
            for entry in archive.infolist()
            if entry.filename.startswith(folder)
        }
    assert found == {f"{folder}/{path.name}": zlib.crc32(path.read_bytes()) for path in paths}


def test_wheel_installs_into_a_clean_venv_and_imports_without_libcuda(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=300)
    program = (
        "import extkv, sys; assert 'torch' not in sys.modules; "
        "assert extkv.probe('cpu').is_available; extkv.probe('cuda'); "
        "t = extkv.ExtensibleTensor(1 << 20, 'cpu'); t.resize_per_segment_(10); "
        "print(t.num_bytes)"
    )
    result = subprocess.run(
        [str(python), "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("10\n", "")
