"""A tiny engine served to a front end in pyzmq."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.serve import EngineService
from extkv.serve.ready import ready_response
from extkv.transport import EngineConnection
from support.zmq_peers import FrontPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=256,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)


class LetterTokenizer:
    """One printable character per token."""

    vocab_size = 97
    stop_token_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [ord(character) % 97 for character in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(self.token_bytes(token_id).decode() for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([32 + token_id % 94])

    def token_name(self, token_id: int) -> str:
        return f"<{token_id}>"


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    model = random_model(CONFIG, seed=3)
    return LoadedModel(Path("tiny"), model, LetterTokenizer(), None, GenerationDefaults())


@pytest.fixture(params=[False, True], ids=["in-step", "async"])
def tiny_llm(request: pytest.FixtureRequest, tiny_model: LoadedModel) -> Iterator[LLM]:
    llm = LLM(
        tiny_model,
        device="cpu",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        async_scheduling=request.param,
    )
    yield llm
    llm.close()


class Served:
    """A service in a thread, and how it ended."""

    def __init__(
        self, front: FrontPeer, llm: LLM, *, log_stats: bool = True, **options: Any
    ) -> None:
        self.error: BaseException | None = None
        self.service: EngineService | None = None
        self._log_stats = log_stats
        self._thread = threading.Thread(target=self._run, args=(front, llm, options))
        self._thread.start()
        front.greet()
        self.responses = front.take_ready()

    def _run(self, front: FrontPeer, llm: LLM, options: dict[str, Any]) -> None:
        try:
            connection = EngineConnection(front.address, **options)
            self.service = EngineService(llm, connection, log_stats=self._log_stats)
            connection.start(ready_response(llm, profile="0.32", rank=0, num_engines=1))
            self.service.run()
        except BaseException as error:  # noqa: BLE001, the test looks at it
            self.error = error

    def stop(self) -> None:
        """End the service."""
        if self.service is not None:
            self.service.stop()
        self.join()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Serve an engine to a front end while a test runs."""

    @contextmanager
    def start(llm: LLM, *, num_clients: int = 1, coordinator: bool = False, **options: Any):
        with FrontPeer(num_clients=num_clients, coordinator=coordinator) as front:
            if coordinator:
                threading.Thread(target=_mark_ready, args=(front,)).start()
            served = Served(front, llm, **options)
            try:
                yield front, served
            finally:
                served.stop()

    return start


def _mark_ready(front: FrontPeer) -> None:
    assert front.publisher.recv() == b"\x01"
    front.publisher.send(b"READY")
