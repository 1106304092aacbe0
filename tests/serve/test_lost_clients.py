"""What a service does when a client cannot be sent anything. The connection is a stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from extkv.errors import NotConnectedError, StalledPeerError
from extkv.protocol import decode_request
from extkv.serve import EngineService
from extkv.serve.outputs import ABORTED
from extkv.transport import EngineInput, RequestArrived
from support.zmq_peers import pack, request_fields

if TYPE_CHECKING:
    from extkv.engine.llm import LLM


def request_of(request_id: str, client: int, max_tokens: int) -> RequestArrived:
    """A request as the connection gives it."""
    frames = [pack(request_fields(request_id, [1, 2, 3], max_tokens=max_tokens, temperature=0.0))]
    return RequestArrived(client, decode_request(frames))


class Connection:
    """Gives requests at once, records what is sent, and fails for client 0 as it is told."""

    num_clients = 2
    has_coordinator = False

    def __init__(self, requests: list[EngineInput], failure: Exception) -> None:
        self._inputs = requests
        self._failure = failure
        self.service: EngineService | None = None
        self.sent: list[tuple[int, str, int | None, bool]] = []

    def receive(self, timeout_s: float) -> list[EngineInput]:
        del timeout_s
        inputs, self._inputs = self._inputs, []
        if not inputs and self.service is not None and self.service.num_requests == 0:
            self.service.stop()
        return inputs

    def send_outputs(self, client: int, news: Any, *, is_over_limit: bool, **_: Any) -> None:
        if client == 0 and not is_over_limit and news:
            raise self._failure
        self.sent += [(client, new.request_id, new.finish_reason, is_over_limit) for new in news]

    def refuse_work(self) -> None:
        """Nothing comes any more."""

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


def run(llm: LLM, failure: Exception) -> Connection:
    requests = [request_of("slow-1", 0, 1), request_of("slow-2", 0, 50), request_of("quick", 1, 4)]
    connection = Connection(requests, failure)
    connection.service = EngineService(llm, connection)
    connection.service.run()
    assert not llm.engine.has_unfinished
    return connection


def test_a_client_that_does_not_read_gets_the_ends_of_its_requests_and_no_other_is_disturbed(
    tiny_llm, caplog
):
    sent = run(tiny_llm, StalledPeerError("client 0 does not read")).sent
    # One request had ended in the step whose outputs could not be sent.
    assert {entry for entry in sent if entry[0] == 0} == {
        (0, "slow-1", ABORTED, True),
        (0, "slow-2", ABORTED, True),
    }
    ends = [reason for client, _, reason, _ in sent if client == 1]
    assert ends == [None, None, None, 1]
    assert "does not read; its requests are aborted" in caplog.text


def test_a_client_that_is_gone_gets_nothing_and_no_other_is_disturbed(tiny_llm, caplog):
    sent = run(tiny_llm, NotConnectedError("no connection to client 0")).sent
    assert {client for client, *_ in sent} == {1}
    assert len(sent) == 4
    assert "client 0 is gone" in caplog.text


def test_other_failures_of_sending_end_the_service(tiny_llm):
    with pytest.raises(AttributeError, match="send_dead"):
        run(tiny_llm, ZeroDivisionError())
