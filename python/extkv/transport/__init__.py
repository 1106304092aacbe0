"""EngineCore's transport: drive any EngineCore, or be one.

`EngineConnection` is an engine's end; `EngineClient` and `AsyncEngineClient` are a front end's.
"""

from extkv.transport.aio import AsyncEngineClient, AsyncRequestStream
from extkv.transport.client import (
    ClientCounts,
    CoordinatorAddresses,
    EngineClient,
    EngineStatus,
)
from extkv.transport.engine import (
    AbortArrived,
    CallArrived,
    ClientLost,
    CoordinatorLost,
    EngineConnection,
    EngineInput,
    FramesRejected,
    RequestArrived,
    WaveStarted,
)
from extkv.transport.streams import RequestStream

__all__ = [
    "AbortArrived",
    "AsyncEngineClient",
    "AsyncRequestStream",
    "CallArrived",
    "ClientCounts",
    "ClientLost",
    "CoordinatorAddresses",
    "CoordinatorLost",
    "EngineClient",
    "EngineConnection",
    "EngineInput",
    "EngineStatus",
    "FramesRejected",
    "RequestArrived",
    "RequestStream",
    "WaveStarted",
]
