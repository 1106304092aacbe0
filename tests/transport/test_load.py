"""Many requests with random aborts: no stream stays open, no request is left in the engine."""

from __future__ import annotations

import asyncio
import random
import threading

from extkv import protocol
from extkv.serve.outputs import RequestNews
from extkv.transport import (
    AbortArrived,
    AsyncEngineClient,
    EngineClient,
    EngineConnection,
    RequestArrived,
)
from support.core_requests import core_request
from support.zmq_peers import READY_RESPONSE

NUM_REQUESTS = 10_000
NUM_AT_ONCE = 400


class ToyEngine:
    """Sends each of its requests a token per turn, up to the request's priority."""

    def __init__(self, address: str) -> None:
        self.connection = EngineConnection(address)
        self.connection.start(READY_RESPONSE)
        self.left: dict[str, int] = {}
        self.num_seen = 0
        self.stop = False

    def run(self) -> None:
        while not self.stop:
            for received in self.connection.receive(0.0 if self.left else 0.05):
                if isinstance(received, RequestArrived):
                    self.num_seen += 1
                    self.left[received.request.request_id] = received.request.priority
                elif isinstance(received, AbortArrived):
                    for request_id in received.request_ids:
                        self.left.pop(request_id, None)
            news = []
            for request_id in list(self.left):
                self.left[request_id] -= 1
                is_last = self.left[request_id] == 0
                news.append(RequestNews(request_id, [1], finish_reason=1 if is_last else None))
                if is_last:
                    del self.left[request_id]
            if news:
                self.connection.send_outputs(0, news, timestamp=0.0)
        self.connection.close(0.0)


async def _one(client: AsyncEngineClient, number: int, rng: random.Random) -> str:
    num_tokens = rng.randint(1, 6)
    stream = client.submit(core_request(str(number), priority=num_tokens))
    end = rng.choice(["read", "read", "abort", "abort at once", "abort by id", "drop", "cancel"])
    if end == "abort at once":
        stream.abort()
    num_read = 0
    limit = rng.randint(0, num_tokens) if end not in ("read", "abort at once") else num_tokens
    async for output in stream:
        num_read += len(output.new_token_ids)
        if output.finish_reason is not None:
            assert output.finish_reason is protocol.FinishReason.LENGTH
            assert num_read == num_tokens
        if num_read >= limit and end != "read":
            break
    if end == "abort":
        stream.abort()
        num_read += len([output async for output in stream])
        assert num_read <= num_tokens
    elif end == "abort by id":
        client.abort([stream.request_id])
    elif end == "cancel":
        waiter = asyncio.ensure_future(anext(stream, None))
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        stream.abort()
    del stream
    return end


def test_ten_thousand_requests_with_random_aborts_leave_nothing_behind():
    async def main(client: AsyncEngineClient) -> None:
        await client.wait_ready(20)
        gate = asyncio.Semaphore(NUM_AT_ONCE)
        rng = random.Random(7)

        async def limited(number: int) -> str:
            async with gate:
                return await asyncio.wait_for(_one(client, number, rng), 30)

        ends = await asyncio.gather(*(limited(number) for number in range(NUM_REQUESTS)))
        assert len(ends) == NUM_REQUESTS
        assert len(set(ends)) == 6
        counts = client.client.counts
        assert (counts.num_streams, counts.num_calls, counts.num_rejected) == (0, 0, 0)
        # Everything that was sent before this has been seen when it comes back.
        async for _ in client.submit(core_request("last", priority=1)):
            pass

    with EngineClient() as client:
        engines: list[ToyEngine] = []

        def serve() -> None:
            engines.append(ToyEngine(client.handshake_address))
            engines[0].run()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            asyncio.run(main(AsyncEngineClient(client)))
            assert engines[0].num_seen == NUM_REQUESTS + 1
            assert engines[0].left == {}
        finally:
            engines[0].stop = True
            engines[0].connection.wake()
            thread.join()
