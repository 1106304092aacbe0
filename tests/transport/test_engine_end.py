"""An engine's end against a front end and a coordinator in pyzmq."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from extkv.errors import (
    InvalidArgumentError,
    MalformedMessageError,
    StalledPeerError,
    TransportClosedError,
    TransportTimeoutError,
)
from extkv.serve.outputs import LogprobArrays, PrefillCounts, RequestNews
from extkv.transport import (
    AbortArrived,
    CallArrived,
    ClientLost,
    CoordinatorLost,
    EngineConnection,
    FramesRejected,
    RequestArrived,
    WaveStarted,
)
from support.waiting import LONG_S
from support.zmq_peers import (
    ABORT,
    ADD,
    READY_RESPONSE,
    START_DP_WAVE,
    UTILITY,
    FrontPeer,
    identity_of,
    pack,
    request_fields,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def connected(front: FrontPeer, index: int = 0, **options: Any) -> Iterator[EngineConnection]:
    """Start an engine's end against a front end."""
    found: list[EngineConnection] = []

    def connect() -> None:
        found.append(EngineConnection(front.address, index, handshake_timeout_s=LONG_S, **options))
        found[0].start(READY_RESPONSE)

    thread = threading.Thread(target=connect)
    thread.start()
    front.greet(index)
    if front.addresses["coordinator_input"] is not None:
        assert front.publisher.recv() == b"\x01"
        front.publisher.send(b"READY")
    front.take_ready()
    thread.join()
    try:
        yield found[0]
    finally:
        found[0].close(0.0)


def one(connection: EngineConnection) -> Any:
    received = connection.receive(LONG_S)
    assert len(received) == 1, received
    return received[0]


def test_hello_says_what_was_asked_and_the_response_comes_before_ready():
    with FrontPeer(num_clients=2) as front:
        found = []

        def connect():
            connection = EngineConnection(front.address, 3, is_local=True, is_headless=False)
            found.append(connection)
            connection.start({**READY_RESPONSE, "num_gpu_blocks": 77})

        thread = threading.Thread(target=connect)
        thread.start()
        hello = front.greet(3)
        assert hello == {"status": "HELLO", "local": True, "headless": False}
        responses = front.take_ready()
        thread.join()
        assert [response["num_gpu_blocks"] for response in responses] == [77, 77]
        assert found[0].num_clients == 2
        assert found[0].metadata["addresses"]["inputs"] == front.addresses["inputs"]
        with pytest.raises(TransportClosedError):
            found[0].start(READY_RESPONSE)
        found[0].close(0.0)


def test_requests_aborts_and_calls_arrive_decoded():
    with FrontPeer() as front, connected(front) as connection:
        front.add(request_fields("r1", [1, 2, 3], temperature=0.5, max_tokens=7))
        arrived = one(connection)
        assert isinstance(arrived, RequestArrived)
        assert arrived.client == 0
        request = arrived.request
        assert (request.request_id, request.prompt_token_ids.tolist()) == ("r1", [1, 2, 3])
        assert request.sampling_params.temperature == 0.5
        changed = request.sampling_params.changed_fields()
        assert (changed["temperature"], changed["max_tokens"]) == (0.5, 7)
        assert "top_p" not in changed
        front.send(ABORT, ["r1", "r2"])
        assert one(connection) == AbortArrived(["r1", "r2"])
        front.send(UTILITY, [0, 2**64 - 1, "reset_prefix_cache", [True, "x", None]])
        call = one(connection)
        assert call == CallArrived(0, 2**64 - 1, "reset_prefix_cache", [True, "x", None])
        connection.answer(0, call.call_id, {"a": [1, 2.5, b"b"]})
        assert front.outputs_of()[4] == [2**64 - 1, None, [None, {"a": [1, 2.5, b"b"]}]]
        connection.answer(0, 5, failure="Call to x method failed: no")
        assert front.outputs_of()[4] == [5, "Call to x method failed: no", None]


def test_outputs_have_every_field_in_its_place():
    with FrontPeer() as front, connected(front) as connection:
        arrays = LogprobArrays(
            (1).to_bytes(4, "little") + (2).to_bytes(4, "little"), bytes(8), bytes(4), 2
        )
        news = RequestNews(
            "r1",
            [5, 6],
            finish_reason=0,
            stop_reason=6,
            logprobs=arrays,
            prompt_logprobs=arrays,
            events=[(1, 0.5), (2, 0.75)],
            prefill=PrefillCounts(10, 4, 2),
        )
        connection.send_outputs(
            0,
            [news],
            timestamp=1.5,
            scheduler_stats={"num_running_reqs": 3},
            finished_requests=["r1"],
        )
        batch = front.outputs_of()
        assert (batch[0], batch[3], batch[5], batch[8]) == (0, 1.5, ["r1"], "default")
        assert batch[2]["num_running_reqs"] == 3
        output = batch[1][0]
        assert len(output) == 18
        assert output[:2] == ["r1", [5, 6]]
        assert output[2][0] == ["<i4", [1, 2], bytes([1, 0, 0, 0, 2, 0, 0, 0])]
        assert output[3][1] == ["float32", [1, 2], bytes(8)]
        assert (output[5], output[6]) == (0, 6)
        assert output[7] == [{"type": 1, "timestamp": 0.5}, {"type": 2, "timestamp": 0.75}]
        assert output[11]["num_cached_tokens"] == 4
        assert output[11]["num_computed_tokens"] == 6
        assert output[11]["num_cache_creation_tokens"] == 2


def test_garbage_is_dropped_and_the_valid_request_completes():
    with FrontPeer() as front, connected(front) as connection:
        identity = identity_of(0)
        for frames in (
            [b"\x45"],
            [b""],
            [b"\xff", b"\x00"],
            [b"", b"", b""],
            [ADD],
            [ADD, b"\xc1"],
            [b"\x04", b"\x90"],
            [b"\x05", b"\x90"],
            [START_DP_WAVE, b"\x92\x00\xc0"],
            [ABORT, b"\x91\x01"],
            [UTILITY, b"\x90"],
            [ADD + ADD, b"\x90"],
        ):
            front.inputs[0].send_multipart([identity, *frames])
        front.add(request_fields("good", [1]))
        received = []
        while not any(isinstance(item, RequestArrived) for item in received):
            received += connection.receive(LONG_S)
        rejected = [item for item in received if isinstance(item, FramesRejected)]
        assert len(rejected) == 12
        assert all(item.source == "client 0" and item.reason for item in rejected)
        assert received[-1].request.request_id == "good"


def test_a_request_that_cannot_be_read_is_answered_with_an_error():
    with FrontPeer() as front, connected(front) as connection:
        fields = request_fields("bad", [1])
        fields[1] = ["no token"]
        front.add(fields)
        assert "prompt_token_ids" in one(connection).reason
        output = front.next_output()
        assert (output[0], output[1], output[5]) == ("bad", [], 3)
        front.send(UTILITY, [0, 9, 5, []])
        assert "method" in one(connection).reason
        assert front.outputs_of()[4][0] == 9


def test_newer_requests_are_read_and_what_is_new_is_counted():
    with FrontPeer() as front, connected(front) as connection:
        front.add([*request_fields("r1", [1], new_key=1), "new field", 5])
        assert one(connection).request.request_id == "r1"
        assert connection.num_skipped == 3


def test_several_clients_get_their_own_outputs():
    with FrontPeer(num_clients=3) as front, connected(front) as connection:
        for client in (2, 0, 1):
            front.add(request_fields(f"of-{client}", [1]), client=client)
            arrived = one(connection)
            assert arrived.client == client
            connection.send_outputs(
                client, [RequestNews(arrived.request.request_id, [client])], timestamp=0.0
            )
        for client in range(3):
            assert front.next_output(client)[:2] == [f"of-{client}", [client]]
        with pytest.raises(InvalidArgumentError, match="no client 3"):
            connection.send_outputs(3, [], timestamp=0.0)


def test_a_coordinator_is_subscribed_to_and_its_marker_may_come_again():
    with FrontPeer(coordinator=True) as front, connected(front) as connection:
        assert connection.has_coordinator
        front.publisher.send(b"READY")
        front.publisher.send_multipart([START_DP_WAVE, pack([3, None])])
        assert one(connection) == WaveStarted(3, is_excluded=False)
        for excluded, expected in ((0, True), (1, False), (b"\x00\x00", False)):
            front.publisher.send_multipart([START_DP_WAVE, pack([4, excluded])])
            assert one(connection) == WaveStarted(4, is_excluded=expected)
        front.publisher.send_multipart([b"\x09", b"\x90"])
        assert one(connection).source == "the coordinator"
        connection.send_to_coordinator(timestamp=1.0, start_wave=4)
        assert unpack(front.puller.recv()) == [0, [], None, 1.0, None, None, None, 4, None]
        connection.send_to_coordinator(timestamp=1.0, wave_complete=0)
        assert unpack(front.puller.recv())[6] == 0


def test_the_loss_of_a_coordinator_is_told_once():
    with (
        FrontPeer(coordinator=True) as front,
        connected(front, reconnect_for_s=0.05) as connection,
    ):
        front.publisher.close(linger=0)
        front.puller.close(linger=0)
        assert isinstance(one(connection), CoordinatorLost)
        assert connection.receive(0.3) == []


def test_a_coordinator_without_its_marker_is_given_up():
    with FrontPeer(coordinator=True) as front:
        failures = []

        def connect():
            connection = EngineConnection(front.address, handshake_timeout_s=1.0)
            with pytest.raises(TransportTimeoutError, match="READY from the coordinator"):
                connection.start(READY_RESPONSE)
            failures.append("timed out")

        thread = threading.Thread(target=connect)
        thread.start()
        front.greet()
        thread.join()
        assert failures == ["timed out"]


def test_a_coordinator_that_goes_before_its_marker_is_not_waited_for():
    with FrontPeer(coordinator=True) as front:
        failures = []

        def connect():
            connection = EngineConnection(front.address, reconnect_for_s=0.05)
            with pytest.raises(MalformedMessageError, match=r"coordinator.*it is gone"):
                connection.start(READY_RESPONSE)
            failures.append("gone")

        thread = threading.Thread(target=connect)
        thread.start()
        front.greet()
        assert front.publisher.recv() == b"\x01"
        front.publisher.close(linger=0)
        thread.join(LONG_S)
        assert failures == ["gone"]


def test_a_closing_engine_refuses_work_by_itself():
    with FrontPeer() as front, connected(front) as connection:
        connection.refuse_work()
        front.add(request_fields("late", [1]))
        assert front.next_output()[5] == 2
        assert front.utility("get_supported_tasks") == [7, "Server shutting down", None]
        front.send(ABORT, ["late"])
        assert one(connection) == AbortArrived(["late"])


def test_the_dead_marker_goes_to_every_client():
    with FrontPeer(num_clients=2) as front, connected(front) as connection:
        connection.send_dead()
        for socket in front.outputs:
            assert socket.recv_multipart() == [b"ENGINE_CORE_DEAD"]


def test_large_outputs_arrive_whole_and_closing_waits_for_them():
    with FrontPeer() as front, connected(front) as connection:
        tokens = list(range(300_000))
        for number in range(5):
            connection.send_outputs(0, [RequestNews(str(number), tokens)], timestamp=0.0)
        connection.close(LONG_S)
        for number in range(5):
            assert front.next_output()[:2] == [str(number), tokens]


def test_a_client_that_does_not_read_is_a_typed_error_and_memory_stays_bounded():
    # Small buffers on the other side, so that it and the network do not take it all.
    with (
        FrontPeer(RCVHWM=1, RCVBUF=1 << 16) as front,
        connected(front, max_queued_bytes=1 << 20) as connection,
    ):
        news = [RequestNews("r", list(range(20_000)))]

        def send_many() -> None:
            for _ in range(100_000):
                connection.send_outputs(0, news, timestamp=0.0)

        with pytest.raises(StalledPeerError, match="client 0 does not read"):
            send_many()
        assert connection.num_queued_bytes(0) <= 1 << 20
        end = [RequestNews("r", finish_reason=2)]
        connection.send_outputs(0, end, timestamp=0.0, is_over_limit=True)
        while front.next_output()[5] != 2:
            pass


def test_a_front_end_that_goes_is_noticed():
    front = FrontPeer()
    with connected(front, reconnect_for_s=0.05) as connection:
        front.close()
        assert isinstance(one(connection), ClientLost)


def test_wake_ends_a_wait():
    with FrontPeer() as front, connected(front) as connection:
        timer = threading.Timer(0.05, connection.wake)
        timer.start()
        start = time.monotonic()
        assert connection.receive(LONG_S) == []
        assert time.monotonic() - start < LONG_S / 2


def test_bad_addresses_answers_and_responses_are_typed_errors():
    with pytest.raises(InvalidArgumentError, match="tcp://host:port"):
        EngineConnection("http://localhost")
    with pytest.raises(TransportTimeoutError, match="INIT"):
        EngineConnection("tcp://127.0.0.1:1", handshake_timeout_s=0.05)
    for answer in (b"\xc1", pack({}), pack({"addresses": {"inputs": [], "outputs": []}})):
        with FrontPeer() as front:
            failures = []

            def connect(front=front, failures=failures):
                with pytest.raises(MalformedMessageError, match="INIT"):
                    EngineConnection(front.address)
                failures.append(1)

            thread = threading.Thread(target=connect)
            thread.start()
            identity, _ = front.handshake.recv_multipart()
            front.handshake.send_multipart([identity, answer])
            thread.join()
            assert failures == [1]


def test_a_response_with_a_wrong_field_names_it():
    with FrontPeer() as front:
        failures = []

        def connect():
            connection = EngineConnection(front.address)
            wrong = {**READY_RESPONSE, "block_size": "sixteen"}
            with pytest.raises(MalformedMessageError, match="block_size"):
                connection.start(wrong)
            failures.append(1)

        thread = threading.Thread(target=connect)
        thread.start()
        front.greet()
        thread.join()
        assert failures == [1]
