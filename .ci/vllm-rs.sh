#!/usr/bin/env bash
# Fills .peers/: vLLM's Rust front end, one program out of vLLM's wheel. Nothing of it is committed.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${VLLM_VERSION:-0.32.0}
program=.peers/vllm-rs-$version
if [ ! -x "$program" ]; then
    mkdir -p .peers
    .venv/bin/pip download --quiet --no-deps --only-binary=:all: -d .peers "vllm==$version"
    wheel=$(compgen -G ".peers/vllm-$version-*.whl")
    unzip -q -o -j "$wheel" vllm/vllm-rs -d .peers
    mv .peers/vllm-rs "$program"
    rm "$wheel"
fi
ln -sf "vllm-rs-$version" .peers/vllm-rs
"$program" --version
