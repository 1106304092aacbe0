"""Processes that are killed or stopped in the middle of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from extkv.errors import EngineDeadError
from extkv.transport import ClientLost, EngineClient, EngineConnection
from support.core_requests import core_request
from support.waiting import LONG_S, eventually
from support.zmq_peers import READY_RESPONSE, EnginePeer

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]

ENGINE = """
import sys, time
from support.zmq_peers import ADD, EnginePeer
peer = EnginePeer(sys.argv[1], int(sys.argv[2]))
peer.start()
ids = []
while True:
    while peer.input.poll(5):
        kind, fields = peer.receive()
        if kind == ADD:
            ids.append(fields[0])
    for request_id in ids:
        peer.send_tokens(request_id, [1])
"""
FRONT_END = """
import sys, time
from support.zmq_peers import FrontPeer
front = FrontPeer()
print(front.address, flush=True)
front.greet()
front.take_ready()
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def process(program: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a peer that knows nothing of extkv."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", program, *args]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def test_an_engine_killed_in_mid_stream_ends_its_streams_and_no_others():
    with (
        EngineClient(num_engines=2) as client,
        process(ENGINE, client.handshake_address, "0") as doomed,
        EnginePeer(client.handshake_address, 1) as other,
    ):
        other.start()
        client.wait_ready(LONG_S)
        streams = [client.submit(core_request(f"a{n}"), engine=0) for n in range(20)]
        kept = client.submit(core_request("b"), engine=1)
        for stream in streams:
            assert next(stream).new_token_ids == [1]
        doomed.send_signal(signal.SIGKILL)
        start = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="engine 0 is dead"):
                for _ in stream:
                    pass
        assert time.monotonic() - start < 5
        # Of its two connections the other one may be the first to end.
        eventually(lambda: client.statuses == ["dead", "ready"])
        other.receive()
        other.send_tokens("b", [2], 0)
        assert [output.new_token_ids for output in kept] == [[2]]
        assert client.counts.num_streams == 0


def test_a_stopped_engine_is_noticed_by_its_silence_and_taken_back_when_it_goes_on():
    with (
        EngineClient(heartbeat_s=(0.1, 0.5)) as client,
        process(ENGINE, client.handshake_address, "0") as engine,
    ):
        client.wait_ready(LONG_S)
        stream = client.submit(core_request("a"))
        next(stream)
        engine.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="no sign of life"):
            for _ in stream:
                pass
        engine.send_signal(signal.SIGCONT)
        eventually(lambda: client.statuses == ["ready"])
        assert next(client.submit(core_request("b"))).new_token_ids == [1]


def test_a_killed_front_end_is_noticed_by_the_engine():
    with process(FRONT_END) as front:
        assert front.stdout is not None
        address = front.stdout.readline().strip()
        connection = EngineConnection(address, reconnect_for_s=0.1)
        connection.start(READY_RESPONSE)
        assert front.stdout.readline() == "ready\n"
        front.send_signal(signal.SIGKILL)
        lost = connection.receive(LONG_S)
        assert [type(item) for item in lost] == [ClientLost]
        connection.close(0.0)


def test_waiting_threads_are_told_of_a_death():
    with (
        EngineClient() as client,
        process(ENGINE, client.handshake_address, "0") as engine,
    ):
        client.wait_ready(LONG_S)
        ends: list[str] = []

        def read(number: int) -> None:
            try:
                for _ in client.submit(core_request(str(number))):
                    pass
            except EngineDeadError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=read, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        engine.kill()
        for thread in threads:
            thread.join(LONG_S)
        assert len(ends) == 16
