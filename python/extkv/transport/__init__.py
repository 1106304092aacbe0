"""EngineCore's transport: drive any EngineCore, or be one.

`EngineConnection` is an engine's end; `EngineClient` and `AsyncEngineClient` are a front end's.
"""

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

__all__ = [
    "AbortArrived",
    "CallArrived",
    "ClientLost",
    "CoordinatorLost",
    "EngineConnection",
    "EngineInput",
    "FramesRejected",
    "RequestArrived",
    "WaveStarted",
]
