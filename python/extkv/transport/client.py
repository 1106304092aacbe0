"""A front end's end: engines connect to it, requests are plain iterators; `aio` has the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from extkv import _extkv, protocol
from extkv.errors import (
    EngineDeadError,
    TransportClosedError,
    TransportTimeoutError,
    UtilityCallError,
)
from extkv.transport.streams import SLICE_S, RequestStream

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

EngineStatus = Literal["awaited", "starting", "ready", "dead"]


class CoordinatorAddresses(NamedTuple):
    """Name the addresses of a data-parallel coordinator that somebody else runs.

    Attributes:
        to_engines: Where it publishes to engines.
        from_engines: Where engines push to it.
        to_front_ends: Where it publishes to front ends.
    """

    to_engines: str
    from_engines: str
    to_front_ends: str


class ClientCounts(NamedTuple):
    """Count what is open, and what was passed over.

    Attributes:
        num_streams: Streams that have not ended.
        num_calls: Calls without an outcome.
        num_late_outputs: Outputs of requests that had ended on this side.
        num_rejected: Messages that could not be read or did not fit.
        num_skipped: Elements and keys of outputs that the profile does not know.
    """

    num_streams: int
    num_calls: int
    num_late_outputs: int
    num_rejected: int
    num_skipped: int


class EngineClient:
    """Listen for engines and give them requests.

    Args:
        handshake_address: Where engines say HELLO; port 0 or ``*`` takes a free one.
        num_engines: How many engines there are.
        input_address: Where engines take requests.
        output_address: Where engines send outputs.
        expects_local: What engines must say of running on this node; None for either.
        default_profile: Wire profile of engines that do not say their version.
        coordinator: The coordinator's addresses, where there is one.
        max_stream_bytes: Bytes that may wait in one stream before it is given up; None for 64 MiB.
        max_message_bytes: Largest message that is read; None for 1 GiB.
        max_queued_bytes: What may wait for one engine; None for 256 MiB.
        heartbeat_s: Silence before an engine is asked for a sign of life, and before it is given
            up; None for 5 and 20 seconds.

    Raises:
        InvalidArgumentError: If an address is none.
        TransportError: If it cannot be listened on.

    Example:
        >>> client = EngineClient("tcp://127.0.0.1:29550")  # doctest: +SKIP
        >>> client.wait_ready(60)  # doctest: +SKIP
        >>> for output in client.submit(request):  # doctest: +SKIP
        ...     print(output.new_token_ids)
    """

    def __init__(
        self,
        handshake_address: str = "tcp://127.0.0.1:0",
        *,
        num_engines: int = 1,
        input_address: str = "tcp://127.0.0.1:0",
        output_address: str = "tcp://127.0.0.1:0",
        expects_local: bool | None = None,
        default_profile: protocol.Profile = "0.32",
        coordinator: CoordinatorAddresses | None = None,
        max_stream_bytes: int | None = None,
        max_message_bytes: int | None = None,
        max_queued_bytes: int | None = None,
        heartbeat_s: tuple[float, float] | None = None,
    ) -> None:
        self._native = _extkv.FrontEnd.bind(
            handshake_address,
            input_address=input_address,
            output_address=output_address,
            num_engines=num_engines,
            expects_local=expects_local,
            profile=default_profile,
            coordinator=coordinator,
            max_stream_bytes=max_stream_bytes,
            max_message_bytes=max_message_bytes,
            max_queued_bytes=max_queued_bytes,
            heartbeat_s=heartbeat_s,
        )

    @property
    def handshake_address(self) -> str:
        """Where engines say HELLO, with the port that was chosen."""
        return self._native.handshake_address

    @property
    def statuses(self) -> list[EngineStatus]:
        """How far each engine is."""
        return cast("list[EngineStatus]", self._native.statuses())

    @property
    def counts(self) -> ClientCounts:
        """What is open, and what was passed over."""
        return ClientCounts(**self._native.counts())

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every engine takes requests.

        Raises:
            TransportTimeoutError: With the engines that are missing and what was refused last.
            EngineDeadError: If an engine dies meanwhile.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_S if until is None else max(0.0, min(SLICE_S, until - time.monotonic()))
            try:
                return self._native.wait_ready(left)
            except TransportTimeoutError as error:
                if until is not None and time.monotonic() >= until:
                    missing = str(error).rsplit(" within ", 1)[0]
                    raise TransportTimeoutError(f"{missing} within {timeout_s} s") from None

    def ready_response(self, engine: int = 0) -> protocol.EngineCoreReadyResponse | None:
        """Return what an engine said of itself; None before that, and of old engines.

        Raises:
            InvalidArgumentError: If there is no such engine.
        """
        frames = self._native.response(engine)
        return protocol.decode_ready_response(frames) if any(frames) else None

    def profile(self, engine: int = 0) -> protocol.Profile:
        """Return the wire profile that an engine speaks."""
        return cast("protocol.Profile", self._native.profile(engine))

    def submit(
        self, request: protocol.EngineCoreRequest, *, engine: int | None = None
    ) -> RequestStream:
        """Send a request and return its stream.

        Args:
            request: The request; its client index and wave are filled in.
            engine: Index of an engine; None for the one of `data_parallel_rank`, or the one with
                least to do.

        Raises:
            InvalidArgumentError: If the id is in use or there is no such engine.
            EngineDeadError: If that engine is dead, or all are.
            NotConnectedError: If that engine has not come yet.
            StalledPeerError: If it does not read.
        """
        return RequestStream(self.submit_native(request, engine=engine))

    def submit_native(
        self, request: protocol.EngineCoreRequest, *, engine: int | None
    ) -> _extkv.Stream:
        """Do the same as `submit`, for streams of another kind."""
        frames = protocol.encode_request(request, "0.33")
        return self._native.add(frames, profile="0.33", engine=engine)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End streams and stop their requests. Unknown ids mean nothing."""
        self._native.abort(list(request_ids))

    def call(
        self, method: str, *args: object, engine: int = 0, timeout_s: float | None = 60.0
    ) -> Any:  # noqa: ANN401, each method has a type of its own
        """Call a method of an engine and return its value.

        Raises:
            UtilityCallError: If the engine says that it failed.
            TransportTimeoutError: If no answer comes in time; the engine may still do it.
            EngineDeadError: If the engine dies.
        """
        call = self.call_native(method, args, engine=engine)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_S if until is None else max(0.0, min(SLICE_S, until - time.monotonic()))
            try:
                return take_outcome(call.wait(left))
            except TransportTimeoutError:
                if until is not None and time.monotonic() >= until:
                    raise TransportTimeoutError(
                        f"no answer to {method} within {timeout_s} s"
                    ) from None

    def call_native(self, method: str, args: tuple[object, ...], *, engine: int) -> _extkv.Call:
        """Begin a call, for waiters of another kind."""
        return self._native.call(engine, method, args)

    def declare_dead(self, engine: int, reason: str) -> None:
        """Mark an engine as dead, for those who watch its process."""
        self._native.declare_dead(engine, reason)

    def take_notices(self) -> list[str]:
        """Return what was refused or lost since the last call, in words."""
        return self._native.take_notices()

    @property
    def descriptor(self) -> int:
        """Readable while streams or calls that were asked for have something."""
        return self._native.descriptor

    def take_ready(self) -> list[int]:
        """Return keys of streams and calls that have something since they were asked."""
        return self._native.take_ready()

    def close(self, linger_s: float = 2.0) -> None:
        """End streams and calls, send what waits at most this long, and stop listening."""
        self._native.close(linger_s)

    def __enter__(self) -> EngineClient:  # noqa: PYI034, Self is newer than Python 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def take_outcome(outcome: tuple[str, Any]) -> Any:  # noqa: ANN401, each method has its own type
    """Return the value of a call.

    Raises:
        UtilityCallError: If it failed.
        EngineDeadError: If the engine died.
        TransportClosedError: If the client was closed.
    """
    kind, contents = outcome
    if kind == "returned":
        return contents
    if kind == "failed":
        raise UtilityCallError(contents)
    if kind == "engine_dead":
        engine, reason = contents
        raise EngineDeadError(f"engine {engine} is dead: {reason}")
    raise TransportClosedError("the client was closed")
