"""vLLM's Rust front end before `extkv serve`, as processes on loopback."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from extkv.models import find_default_model, load_model
from extkv.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".peers" / "vllm-rs"
START_S = 180


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_model_directory(directory: Path) -> None:
    """Write what a front end reads of the packaged SmolLM2: configuration and tokenizer."""
    path = find_default_model()
    loaded = load_model(path, dtype=torch.float32)
    config = loaded.config
    encoder = loaded.tokenizer._encoder
    eos = sorted(loaded.tokenizer.stop_token_ids)
    metadata = GGUFFile(path).metadata
    encoder.save(str(directory / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "max_position_embeddings": config.context_length,
            "eos_token_id": eos[0],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": encoder.id_to_token(eos[0]),
            "chat_template": metadata.require("tokenizer.chat_template", str),
        },
        "generation_config.json": {"eos_token_id": eos},
    }
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents))


class Serving:
    """A front end and its engines."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        logs: Path,
        num_engines: int,
        *,
        max_num_seqs: int = 4,
        num_threads: int = 1,
    ) -> None:
        self._num_threads = num_threads
        self.port, rpc_port = free_port(), free_port()
        self._stack = stack
        self.logs = logs
        self.model = str(directory)
        self.front_end = self._start(
            "front",
            [
                *(PROGRAM, "serve", directory, "--port", self.port),
                *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc_port),
                *("--data-parallel-size", num_engines, "--data-parallel-size-local", 0),
            ],
        )
        self.engines = [
            self._start(
                f"engine-{rank}",
                [
                    *(sys.executable, "-m", "extkv", "serve", "--data-parallel-rpc-port", rpc_port),
                    *("--data-parallel-rank", rank, "--data-parallel-size", num_engines),
                    *("--device", "cpu", "--max-model-len", 512, "--max-num-seqs", max_num_seqs),
                ],
            )
            for rank in range(num_engines)
        ]
        self._wait_ready()

    def _start(self, name: str, command: list[Any]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.logs / f"{name}.log").open("wb"))
        threads = str(self._num_threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, env=environment
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if any(process.poll() is not None for process in (self.front_end, *self.engines)):
                break
            try:
                if self.get("/health") == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        texts = [path.read_text(errors="replace")[-2000:] for path in self.logs.glob("*.log")]
        pytest.fail("\n".join(["the front end is not ready", *texts]))

    def get(self, path: str) -> int:
        """Ask for a page and return its status."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            connection.request("GET", path)
            with connection.getresponse() as response:
                return response.status

    @contextmanager
    def open(self, path: str, **body: Any) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give the answer's beginning; the connection is closed at the end."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            text = json.dumps({"model": self.model, **body})
            connection.request("POST", path, text, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Send a request and return status and answer."""
        with self.open(path, **body) as response:
            return response.status, json.loads(response.read())

    def log(self, name: str) -> str:
        """Return what a process wrote."""
        return (self.logs / f"{name}.log").read_text(errors="replace")


def serving(directory: Path, logs: Path, num_engines: int, **options: int) -> Iterator[Serving]:
    """Start a front end and engines, and stop them by signals as an operator does."""
    if not PROGRAM.exists():
        pytest.fail(f"{PROGRAM} is missing: run make test-peers")
    with ExitStack() as stack:
        running = Serving(stack, directory, logs, num_engines, **options)
        yield running
        for process in (*running.engines, running.front_end):
            process.send_signal(signal.SIGTERM)
