"""Many requests with random aborts through the real service: nothing is left in the engine."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING

from extkv import protocol
from extkv.errors import TransportTimeoutError
from extkv.serve import EngineService
from extkv.serve.ready import ready_response
from extkv.transport import EngineClient, EngineConnection
from support.core_requests import core_request
from support.waiting import LONG_S, eventually

if TYPE_CHECKING:
    from extkv.engine.llm import LLM
    from extkv.transport import RequestStream

NUM_REQUESTS = 300
NUM_AT_ONCE = 24


class Running:
    """A service in a thread."""

    def __init__(self, llm: LLM, address: str) -> None:
        self._llm = llm
        self._address = address
        self.service: EngineService | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection = EngineConnection(self._address)
        self.service = EngineService(self._llm, connection)
        connection.start(ready_response(self._llm, profile="0.32", rank=0, num_engines=1))
        self.service.run()

    def stop(self) -> None:
        """End it."""
        if self.service is not None:
            self.service.stop()
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()


def submit(client: EngineClient, number: int, num_tokens: int, *, session: int) -> RequestStream:
    """Send a request whose prompt shares its beginning with others of its session."""
    params = protocol.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompt = [session + 1] * (20 + number % 30)
    return client.submit(core_request(str(number), prompt_token_ids=prompt, sampling_params=params))


def end(client: EngineClient, stream: RequestStream, way: str, num_tokens: int) -> None:
    """End a stream in one of several ways, and check what it gave."""
    found: list[int] = []
    if way == "read":
        for output in stream:
            found += output.new_token_ids
        assert len(found) == num_tokens
    elif way == "look":
        with contextlib.suppress(TransportTimeoutError, StopIteration):
            found += stream.next_output(0.001).new_token_ids
        client.abort([stream.request_id])
    else:
        stream.abort()
        assert len(list(stream)) <= num_tokens
    assert len(found) <= num_tokens


def test_random_aborts_leave_no_stream_no_request_and_no_block_behind(tiny_llm):
    scheduler = tiny_llm.engine.scheduler
    with EngineClient() as client:
        running = Running(tiny_llm, client.handshake_address)
        try:
            client.wait_ready(LONG_S)
            rng = random.Random(11)
            streams: list[tuple[RequestStream, int]] = []
            for number in range(NUM_REQUESTS):
                num_tokens = rng.randint(1, 40)
                stream = submit(client, number, num_tokens, session=rng.randrange(4))
                streams.append((stream, num_tokens))
                while len(streams) > NUM_AT_ONCE:
                    taken, limit = streams.pop(rng.randrange(len(streams)))
                    end(client, taken, rng.choice(["read", "look", "abort", "abort"]), limit)
            for stream, num_tokens in streams:
                end(client, stream, "read", num_tokens)
            assert client.counts.num_streams == 0
            assert client.counts.num_rejected == 0
            assert running.service is not None
            eventually(lambda: running.service.num_requests == 0)
        finally:
            running.stop()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    scheduler.check_integrity()
