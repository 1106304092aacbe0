"""The front end's end for asyncio: streams are asynchronous iterators.

One file descriptor tells the event loop that something came, and a list of keys says for whom. A
consumer asks first and waits only if nothing is there, so no wake-up can be lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from extkv.errors import TransportTimeoutError
from extkv.transport.client import EngineClient, take_outcome
from extkv.transport.streams import StreamEnded, StreamState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import TracebackType

    from extkv import _extkv, protocol

    Item = tuple[str, Any]


class AsyncEngineClient:
    """Use an `EngineClient` from one event loop.

    Args:
        client: A client that nobody else waits on.

    Example:
        >>> async with AsyncEngineClient(EngineClient()) as client:  # doctest: +SKIP
        ...     await client.wait_ready(60)
        ...     async for output in client.submit(request):
        ...         print(output.new_token_ids)
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every engine takes requests; errors are those of `EngineClient.wait_ready`."""
        await asyncio.to_thread(self.client.wait_ready, timeout_s)

    def submit(
        self, request: protocol.EngineCoreRequest, *, engine: int | None = None
    ) -> AsyncRequestStream:
        """Send a request and return its stream; errors are those of `EngineClient.submit`."""
        return AsyncRequestStream(self, self.client.submit_native(request, engine=engine))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End streams and stop their requests. Unknown ids mean nothing."""
        self.client.abort(request_ids)

    async def call(
        self, method: str, *args: object, engine: int = 0, timeout_s: float | None = 60.0
    ) -> Any:  # noqa: ANN401, each method has a type of its own
        """Call a method of an engine; errors are those of `EngineClient.call`."""
        call = self.client.call_native(method, args, engine=engine)
        try:
            outcome = await asyncio.wait_for(
                self.next_item(call.key, call.take_or_await), timeout_s
            )
        except asyncio.TimeoutError:
            raise TransportTimeoutError(f"no answer to {method} within {timeout_s} s") from None
        return take_outcome(outcome)

    async def next_item(self, key: int, take_or_await: Callable[[], Item | None]) -> Item:
        """Return the next item of a stream or call."""
        loop = self._attach()
        while True:
            item = take_or_await()
            if item is not None:
                return item
            future = self._waiting[key] = loop.create_future()
            try:
                await future
            finally:
                self._waiting.pop(key, None)

    async def close(self, linger_s: float = 2.0) -> None:
        """End streams and calls, send what waits at most this long, and stop listening."""
        await asyncio.to_thread(self.client.close, linger_s)
        self._wake()
        if self._loop is not None:
            self._loop.remove_reader(self.client.descriptor)
            self._loop = None

    async def __aenter__(self) -> AsyncEngineClient:  # noqa: PYI034, Self is newer than 3.10
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            loop.add_reader(self.client.descriptor, self._wake)
            self._loop = loop
        elif self._loop is not loop:
            msg = "an AsyncEngineClient belongs to the event loop that first waited on it"
            raise RuntimeError(msg)
        return loop

    def _wake(self) -> None:
        for key in self.client.take_ready():
            future = self._waiting.pop(key, None)
            if future is not None and not future.done():
                future.set_result(None)


class AsyncRequestStream(StreamState):
    """Iterate over a request's outputs. Made by `AsyncEngineClient.submit`."""

    def __init__(self, client: AsyncEngineClient, native: _extkv.Stream) -> None:
        super().__init__(native)
        self._client = client

    def __aiter__(self) -> AsyncIterator[protocol.EngineCoreOutput]:
        return self

    async def __anext__(self) -> protocol.EngineCoreOutput:
        if self._has_ended:
            raise StopAsyncIteration
        item = await self._client.next_item(self._native.key, self._native.take_or_await)
        try:
            return self._end_with(item)
        except StreamEnded:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Do the same as `abort`."""
        self.abort()
