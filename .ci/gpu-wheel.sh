#!/usr/bin/env bash
# Fills .gpu/: the release wheel, wheels that a bare torch machine (Python 3.12) lacks, and the Rust
# tests that need a device as one executable.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .gpu
rm -f .gpu/extkv-*.whl
.venv/bin/maturin build --release --quiet --out .gpu
# The drafter's weights are in the tree that goes there with it.
.venv/bin/python - .gpu/extkv-*.whl <<'PYTHON'
import os, sys, zipfile

path = sys.argv[1]
with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(f"{path}.small", "w", zipfile.ZIP_DEFLATED) as small:
    for entry in wheel.infolist():
        if not entry.filename.endswith(".safetensors"):
            small.writestr(entry, wheel.read(entry))
os.replace(f"{path}.small", path)
PYTHON
for package in typer==0.29.2 rich==15.0.0 gguf==0.19.0 llguidance==1.9.1 pytest-timeout==2.4.0 shellingham markdown-it-py mdurl pygments pydantic==2.14.4 annotated-types typing-inspection; do
    name=${package%%==*}
    if ! compgen -G ".gpu/${name//-/_}-*.whl" >/dev/null; then
        .venv/bin/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 -d .gpu "$package"
    fi
done
# typer reads numbers with pydantic, whose core is native.
if ! compgen -G ".gpu/pydantic_core-*.whl" >/dev/null; then
    .venv/bin/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
        --platform manylinux_2_17_x86_64 -d .gpu pydantic_core==2.50.5
fi
executable=$(cargo test -p extkv-core --release --no-run --test cuda_device --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*cuda_device[^"]*\)".*/\1/p' | tail -n 1)
cp "$executable" .gpu/cuda_device
ls -lh .gpu
