"""The asyncio front end against engines in pyzmq."""

from __future__ import annotations

import asyncio
import threading

import pytest
from extkv.errors import EngineDeadError, TransportTimeoutError, UtilityCallError
from extkv.transport import AsyncEngineClient, EngineClient
from support.core_requests import core_request
from support.waiting import LONG_S
from support.zmq_peers import ABORT, ADD, LENGTH, EnginePeer


def run(scenario) -> None:
    """Run a scenario with a client and an engine that has started."""

    async def main():
        async with AsyncEngineClient(EngineClient()) as client:
            with EnginePeer(client.client.handshake_address) as peer:
                thread = threading.Thread(target=peer.start)
                thread.start()
                await client.wait_ready(LONG_S)
                thread.join()
                await asyncio.wait_for(scenario(client, peer), LONG_S)

    asyncio.run(main())


def test_many_streams_at_once_get_their_own_outputs():
    async def scenario(client, peer):
        async def collect(number):
            tokens = []
            async for output in client.submit(core_request(str(number))):
                tokens += output.new_token_ids
            return tokens

        def serve():
            for _ in range(200):
                kind, fields = peer.receive()
                assert kind == ADD
                peer.send_tokens(fields[0], [int(fields[0])])
                peer.send_tokens(fields[0], [7], LENGTH)

        thread = threading.Thread(target=serve)
        thread.start()
        found = await asyncio.gather(*(collect(number) for number in range(200)))
        thread.join()
        assert found == [[number, 7] for number in range(200)]
        assert client.client.counts.num_streams == 0

    run(scenario)


def test_an_abort_wakes_the_waiter_and_ends_the_stream():
    async def scenario(client, peer):
        stream = client.submit(core_request("r1"))
        waiter = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        assert not waiter.done()
        stream.abort()
        with pytest.raises(StopAsyncIteration):
            await waiter
        assert stream.was_aborted
        assert peer.receive()[0] == ADD
        assert peer.receive() == (ABORT, ["r1"])
        await stream.aclose()
        client.abort(["r1"])

    run(scenario)


def test_a_cancelled_waiter_loses_nothing():
    async def scenario(client, peer):
        stream = client.submit(core_request("r1"))
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
        peer.send_tokens("r1", [1])
        peer.send_tokens("r1", [2], LENGTH)
        assert [output.new_token_ids async for output in stream] == [[1], [2]]

    run(scenario)


def test_a_death_reaches_every_waiter():
    async def scenario(client, peer):
        streams = [client.submit(core_request(str(number))) for number in range(5)]
        waiters = [asyncio.ensure_future(anext(stream)) for stream in streams]
        call = asyncio.ensure_future(client.call("x"))
        await asyncio.sleep(0.02)
        peer.output.send(b"ENGINE_CORE_DEAD")
        for waiter in (*waiters, call):
            with pytest.raises(EngineDeadError):
                await waiter

    run(scenario)


def test_calls_return_fail_and_time_out():
    async def scenario(client, peer):
        def answer():
            for result in ([None, [None, 5]], ["no", None]):
                _, fields = peer.receive()
                peer.send([], [fields[1], *result])

        thread = threading.Thread(target=answer)
        thread.start()
        assert await client.call("five") == 5
        with pytest.raises(UtilityCallError, match="no"):
            await client.call("fails")
        thread.join()
        with pytest.raises(TransportTimeoutError, match="no answer to slow"):
            await client.call("slow", timeout_s=0.02)
        assert client.client.counts.num_calls == 0

    run(scenario)


def test_a_client_belongs_to_one_event_loop():
    async def scenario(client, peer):
        stream = client.submit(core_request("r1"))
        peer.send_tokens("r1", [1])
        await anext(stream)

        async def elsewhere():
            with pytest.raises(RuntimeError, match="event loop"):
                await anext(stream)

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))

    run(scenario)
