#!/usr/bin/env bash
# Fills .peers/: vLLM's Rust front end, one program out of vLLM's wheel. Nothing of it is committed.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${VLLM_VERSION:-0.32.0}
program=.peers/vllm-rs-$version
if [ ! -x "$program" ]; then
    .venv/bin/python .ci/fetch_wheel_member.py "vllm==$version" vllm/vllm-rs "$program" || {
        echo "vllm-rs $version cannot be had from the package index, which make test-peers needs" >&2
        exit 1
    }
fi
ln -sf "vllm-rs-$version" .peers/vllm-rs
"$program" --version
