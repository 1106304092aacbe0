"""Outputs of one request, as an iterator.

A stream ends once: after its last output, by `abort` on this side, or with an exception that says
why nothing more can come. Dropping an unfinished stream aborts its request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from extkv.errors import (
    EngineDeadError,
    MalformedMessageError,
    SlowReaderError,
    TransportClosedError,
    TransportTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from extkv import _extkv, protocol

# Longest wait without a look at signals.
SLICE_S = 0.2


class StreamEnded(Exception):  # noqa: N818, an end is no error
    """A stream has ended in order; used between the streams of this package only."""


def take_output(item: tuple[str, Any]) -> protocol.EngineCoreOutput:
    """Return an item's output.

    Raises:
        StreamEnded: If the stream finished or was aborted.
        TransportError: If it cannot go on.
    """
    kind, contents = item
    if kind == "output":
        output: protocol.EngineCoreOutput = contents
        return output
    if kind in ("finished", "aborted"):
        raise StreamEnded(kind)
    if kind == "engine_dead":
        engine, reason = contents
        raise EngineDeadError(f"engine {engine} is dead: {reason}")
    if kind == "garbled":
        engine, reason = contents
        raise MalformedMessageError(f"engine {engine} sent outputs that cannot be read: {reason}")
    if kind == "slow_reader":
        waiting, limit = contents
        raise SlowReaderError(
            f"{waiting} bytes of outputs waited and were not taken, the limit is {limit}"
        )
    raise TransportClosedError("the client was closed")


class StreamState:
    """What both kinds of stream are: a request on its way, with an end.

    Made by the clients.
    """

    def __init__(self, native: _extkv.Stream) -> None:
        self._native = native
        self._has_ended = False
        self._was_aborted = False

    @property
    def request_id(self) -> str:
        """The request."""
        return self._native.request_id

    @property
    def engine(self) -> int:
        """Index of the engine that has the request."""
        return self._native.engine

    @property
    def was_aborted(self) -> bool:
        """Whether the stream was ended on this side; known at its end."""
        return self._was_aborted

    def abort(self) -> None:
        """End the stream and stop the request; nothing happens after the end."""
        self._native.abort()

    def _end_with(self, item: tuple[str, Any]) -> protocol.EngineCoreOutput:
        """Return an item's output, and note what it says about the end.

        Raises:
            StreamEnded: If the stream finished or was aborted.
            TransportError: If it cannot go on.
        """
        self._has_ended = item[0] != "output"
        self._was_aborted = item[0] == "aborted"
        return take_output(item)


class RequestStream(StreamState):
    """Iterate over a request's outputs.

    Made by `EngineClient.submit`. One thread at a time may iterate; any thread may abort.

    Example:
        >>> with client.submit(request) as stream:  # doctest: +SKIP
        ...     for output in stream:
        ...         print(output.new_token_ids)
    """

    def __iter__(self) -> Iterator[protocol.EngineCoreOutput]:
        return self

    def __next__(self) -> protocol.EngineCoreOutput:
        return self._next(None)

    def next_output(self, timeout_s: float) -> protocol.EngineCoreOutput:
        """Return the next output, waiting at most this long.

        Raises:
            TransportTimeoutError: If none comes in time; the stream goes on.
            StopIteration: At the end.
        """
        return self._next(timeout_s)

    def close(self) -> None:
        """Do the same as `abort`."""
        self.abort()

    def __enter__(self) -> RequestStream:  # noqa: PYI034, Self is newer than Python 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _next(self, timeout_s: float | None) -> protocol.EngineCoreOutput:
        if self._has_ended:
            raise StopIteration
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_S if until is None else max(0.0, min(SLICE_S, until - time.monotonic()))
            item = self._native.wait(left)
            if item is not None:
                return self._take(item)
            if until is not None and time.monotonic() >= until:
                raise TransportTimeoutError(
                    f"no output of request {self.request_id} within {timeout_s} s"
                )

    def _take(self, item: tuple[str, Any]) -> protocol.EngineCoreOutput:
        try:
            return self._end_with(item)
        except StreamEnded:
            raise StopIteration from None
