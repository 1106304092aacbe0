"""A front end's end of ours and an engine in pyzmq."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from extkv.transport import EngineClient
from support.waiting import LONG_S
from support.zmq_peers import EnginePeer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def client() -> Iterator[EngineClient]:
    with EngineClient() as client:
        yield client


@pytest.fixture
def engine(client: EngineClient) -> Iterator[EnginePeer]:
    with EnginePeer(client.handshake_address) as peer:
        peer.start()
        client.wait_ready(LONG_S)
        yield peer
