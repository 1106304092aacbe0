"""An engine's connections: to its front ends, and to a data-parallel coordinator.

Start-up is `EngineConnection(...)` (HELLO and INIT), then the model is loaded, then `start`. After
that `receive` gives what clients want, decoded without the interpreter's lock, and the `send`
methods take what the engine's loop has made. Nothing here knows an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from extkv import _extkv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from extkv import protocol

    class OutputNews(Protocol):
        """What is new about one request; `extkv.serve.outputs.RequestNews` has the fields."""

        @property
        def request_id(self) -> str:
            """The request."""
            ...


@dataclass(frozen=True)
class RequestArrived:
    """A client sent a request.

    Attributes:
        client: Which client.
        request: The request, with vLLM's field names.
    """

    client: int
    request: protocol.EngineCoreRequest


@dataclass(frozen=True)
class AbortArrived:
    """A client wants requests stopped; nothing is answered.

    Attributes:
        request_ids: Their ids; unknown ones mean nothing.
    """

    request_ids: list[str]


@dataclass(frozen=True)
class CallArrived:
    """A client calls a method; answer with `EngineConnection.answer`.

    Attributes:
        client: Which client.
        call_id: The call's identity.
        method: Name of the method.
        args: Positional arguments.
    """

    client: int
    call_id: int
    method: str
    args: list[Any]


@dataclass(frozen=True)
class WaveStarted:
    """The coordinator starts a wave.

    Attributes:
        wave: Its number.
        is_excluded: Whether this engine asked for it and runs already.
    """

    wave: int
    is_excluded: bool


@dataclass(frozen=True)
class ClientLost:
    """A client is gone for good.

    Attributes:
        client: Which client.
        reason: How that was found.
    """

    client: int
    reason: str


@dataclass(frozen=True)
class CoordinatorLost:
    """The coordinator is gone for good.

    Attributes:
        reason: How that was found.
    """

    reason: str


@dataclass(frozen=True)
class FramesRejected:
    """Frames could not be read. Their sender was answered where that is possible.

    Attributes:
        source: Who sent them.
        reason: What is wrong, with the path to the field.
    """

    source: str
    reason: str


EngineInput = (
    RequestArrived
    | AbortArrived
    | CallArrived
    | WaveStarted
    | ClientLost
    | CoordinatorLost
    | FramesRejected
)


class EngineConnection:
    """Say HELLO to a front end and wait for its INIT.

    Args:
        handshake_address: Where the front end listens: ``tcp://host:port`` or ``ipc://path``.
        engine_index: The engine's index among all engines, which is its identity.
        is_local: Whether the engine runs on the front end's node.
        is_headless: Whether it was started without a front end of its own.
        profile: Wire profile, such as ``"0.32"``; it must fit the version in the ready response.
        handshake_timeout_s: How long to wait for INIT and for the coordinator.
        parallel_config_hash: Sent with READY by engines of mixture-of-experts models.
        max_waiting_bytes: Input that may wait before reading stops; None for 64 MiB.
        max_message_bytes: Largest message that is read; None for 1 GiB.
        max_queued_bytes: Output that may wait for one client; None for 256 MiB.
        heartbeat_s: Silence before a peer is asked for a sign of life, and before it is given up;
            None for 5 and 20 seconds.
        reconnect_for_s: How long to try to come back after an interruption; None for 5 seconds.

    Raises:
        InvalidArgumentError: If the address is none.
        TransportTimeoutError: If the front end does not answer.
        MalformedMessageError: If its answer cannot be read, or it goes away.
    """

    def __init__(
        self,
        handshake_address: str,
        engine_index: int = 0,
        *,
        is_local: bool = False,
        is_headless: bool = True,
        profile: str = "0.32",
        handshake_timeout_s: float | None = 300.0,
        parallel_config_hash: str | None = None,
        max_waiting_bytes: int | None = None,
        max_message_bytes: int | None = None,
        max_queued_bytes: int | None = None,
        heartbeat_s: tuple[float, float] | None = None,
        reconnect_for_s: float | None = None,
    ) -> None:
        self._native = _extkv.EngineEnd.connect(
            handshake_address,
            engine_index,
            is_local=is_local,
            is_headless=is_headless,
            profile=profile,
            handshake_timeout_s=handshake_timeout_s,
            parallel_config_hash=parallel_config_hash,
            max_waiting_bytes=max_waiting_bytes,
            max_message_bytes=max_message_bytes,
            max_queued_bytes=max_queued_bytes,
            heartbeat_s=heartbeat_s,
            reconnect_for_s=5.0 if reconnect_for_s is None else reconnect_for_s,
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """What the front end said: ``addresses`` and ``parallel_config``."""
        metadata: dict[str, Any] = self._native.metadata
        return metadata

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self._native.num_clients

    @property
    def has_coordinator(self) -> bool:
        """Whether there is a coordinator that takes statistics."""
        return self._native.has_coordinator

    @property
    def num_skipped(self) -> int:
        """Elements and keys of requests that the profile does not know."""
        return self._native.num_skipped

    def start(self, ready_response: Mapping[str, Any]) -> None:
        """Connect to clients and coordinator and tell them that the engine is ready.

        Args:
            ready_response: Fields of vLLM's `EngineCoreReadyResponse`.

        Raises:
            MalformedMessageError: If a field is missing or of the wrong type, or the coordinator
                goes away.
            TransportTimeoutError: If the coordinator does not answer.
            TransportClosedError: If it was called before.
        """
        self._native.start(dict(ready_response))

    def receive(self, timeout_s: float | None = None) -> list[EngineInput]:
        """Take everything that is there, and wait for something at most this long.

        Also returns, perhaps with nothing, after `wake`.
        """
        return [_KINDS[kind](contents) for kind, contents in self._native.receive(timeout_s)]

    def wake(self) -> None:
        """Make a waiting `receive` return. May be called from any thread and signal handler."""
        self._native.wake()

    def send_outputs(
        self,
        client: int,
        news: Sequence[OutputNews],
        *,
        timestamp: float,
        scheduler_stats: Mapping[str, Any] | None = None,
        finished_requests: Sequence[str] | None = None,
        is_over_limit: bool = False,
    ) -> None:
        """Queue outputs and statistics for a client.

        Args:
            client: Which client.
            news: One `extkv.serve.outputs.RequestNews` per request.
            timestamp: The engine's monotonic clock.
            scheduler_stats: Fields of vLLM's `SchedulerStats`.
            finished_requests: Ids of requests that have ended.
            is_over_limit: Queue whatever waits: for what ends requests, which must not be lost.

        Raises:
            StalledPeerError: If the client does not read; nothing was queued.
            NotConnectedError: If the client is gone.
            InvalidArgumentError: If there is no such client.
        """
        self._native.send_outputs(
            client,
            list(news),
            timestamp=timestamp,
            scheduler_stats=None if scheduler_stats is None else dict(scheduler_stats),
            finished_requests=None if finished_requests is None else list(finished_requests),
            over_limit=is_over_limit,
        )

    def answer(
        self, client: int, call_id: int, value: object = None, *, failure: str | None = None
    ) -> None:
        """Answer a call with a value, or with the text of a failure.

        Raises:
            NotConnectedError: If the client is gone.
            TypeError: If the value has no form on the wire.
        """
        self._native.answer(client, call_id, value=value, failure=failure)

    def send_to_coordinator(
        self,
        *,
        timestamp: float,
        scheduler_stats: Mapping[str, Any] | None = None,
        wave_complete: int | None = None,
        start_wave: int | None = None,
    ) -> None:
        """Tell the coordinator of load or of a change of the wave; nothing where there is none."""
        self._native.send_to_coordinator(
            timestamp=timestamp,
            scheduler_stats=None if scheduler_stats is None else dict(scheduler_stats),
            wave_complete=wave_complete,
            start_wave=start_wave,
        )

    def num_queued_bytes(self, client: int) -> int:
        """Bytes that wait for a client."""
        return self._native.num_queued_bytes(client)

    def refuse_work(self) -> None:
        """From now on answer new requests with an abort and calls with a failure."""
        self._native.refuse_work()

    def send_dead(self) -> None:
        """Tell every client that the engine's loop has failed."""
        self._native.send_dead()

    def close(self, linger_s: float = 4.0) -> None:
        """Send what waits, at most this long, and end the connections."""
        self._native.close(linger_s)


_KINDS: dict[str, Any] = {
    "request": lambda contents: RequestArrived(*contents),
    "abort": AbortArrived,
    "utility": lambda contents: CallArrived(*contents),
    "start_wave": lambda contents: WaveStarted(*contents),
    "client_lost": lambda contents: ClientLost(*contents),
    "coordinator_lost": CoordinatorLost,
    "rejected": lambda contents: FramesRejected(*contents),
}
