"""A front end's end against engines in pyzmq: streams, calls, garbage, several engines."""

from __future__ import annotations

import socket
import struct

import pytest
import zmq
from extkv import protocol
from extkv.errors import (
    EngineDeadError,
    InvalidArgumentError,
    MalformedMessageError,
    NotConnectedError,
    SlowReaderError,
    StalledPeerError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UtilityCallError,
)
from extkv.transport import CoordinatorAddresses, EngineClient
from support.core_requests import core_request
from support.waiting import LONG_S, eventually
from support.zmq_peers import (
    ABORT,
    ADD,
    LENGTH,
    UTILITY,
    EnginePeer,
    Peer,
    batch_fields,
    output_fields,
    pack,
    unpack,
)


def test_a_request_is_sent_as_vllm_does_and_its_outputs_come_back(client, engine):
    stream = client.submit(core_request(priority=-3, cache_salt="s"))
    kind, fields = engine.receive()
    assert kind == ADD
    assert len(fields) == 22
    assert fields[:2] == ["r1", [1, 2, 3]]
    assert (fields[7], fields[11], fields[13]) == ("s", 0, -3)
    engine.send_tokens("r1", [7, 8])
    engine.send_tokens("r1", [9], LENGTH)
    outputs = list(stream)
    assert [output.new_token_ids for output in outputs] == [[7, 8], [9]]
    assert outputs[-1].finish_reason is protocol.FinishReason.LENGTH
    assert not stream.was_aborted
    assert list(stream) == []
    assert client.counts.num_streams == 0


def test_an_abort_ends_the_stream_though_the_engine_says_nothing(client, engine):
    stream = client.submit(core_request())
    engine.receive()
    engine.send_tokens("r1", [7])
    assert next(stream).new_token_ids == [7]
    stream.abort()
    assert list(stream) == []
    assert stream.was_aborted
    assert engine.receive() == (ABORT, ["r1"])
    stream.abort()
    again = client.submit(core_request())
    assert engine.receive()[0] == ADD
    client.abort(["r1", "unknown"])
    assert list(again) == []
    assert engine.receive() == (ABORT, ["r1"])


def test_a_forgotten_stream_is_aborted(client, engine):
    stream = client.submit(core_request())
    engine.receive()
    del stream
    assert engine.receive() == (ABORT, ["r1"])
    with client.submit(core_request("r2")):
        engine.receive()
    assert engine.receive() == (ABORT, ["r2"])
    assert client.counts.num_streams == 0


@pytest.mark.usefixtures("engine")
def test_what_an_engine_says_of_itself_is_kept(client):
    response = client.ready_response()
    assert (response.max_model_len, response.block_size) == (128, 16)
    assert client.profile() == "0.32"
    assert client.statuses == ["ready"]


@pytest.mark.parametrize(
    ("version", "num_fields"), [("0.25.1", 20), ("0.26.0", 20), ("0.32.0", 22), ("0.33.0", 22)]
)
def test_requests_are_written_for_the_engines_version(client, version, num_fields):
    with EnginePeer(client.handshake_address) as peer:
        peer.start(vllm_version=version)
        client.wait_ready(LONG_S)
        client.submit(core_request())
        assert len(peer.receive()[1]) == num_fields


def test_bytes_that_are_not_zmq_disturb_nobody(client, engine):
    port = int(client.handshake_address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64)
        eventually(lambda: client.counts.num_rejected == 1)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        ready = b"\x05READY" + kind
        # A frame that says it has 2**46 bytes.
        stranger.sendall(greeting + bytes([4, len(ready)]) + ready + b"\x02\x00\x00\x40" + bytes(6))
        stranger.settimeout(LONG_S)
        while stranger.recv(4096):
            pass
    stream = client.submit(core_request())
    engine.receive()
    engine.send_tokens("r1", [1], LENGTH)
    assert len(list(stream)) == 1


def test_batches_with_more_elements_are_read_and_counted(client, engine):
    stream = client.submit(core_request())
    engine.receive()
    output = [*output_fields("r1", [5], LENGTH), "new", "newer"]
    engine.output.send(pack([*batch_fields([output]), {"notifications": 1}]))
    assert [output.new_token_ids for output in stream] == [[5]]
    assert client.counts.num_skipped == 3


@pytest.mark.parametrize("length", [12, 13, 14, 18])
def test_short_outputs_get_defaults(client, engine, length):
    stream = client.submit(core_request())
    engine.receive()
    engine.output.send(pack(batch_fields([output_fields("r1", [5], LENGTH)[:length]])))
    assert [output.new_token_ids for output in stream] == [[5]]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b""],
        [pack(batch_fields([output_fields("r1", [5], 9)]))],
        [pack(batch_fields([output_fields("r1", None)]))],
        [pack(batch_fields([], engine=4))],
        [b"ENGINE_CORE_DEAD", b""],
    ],
    ids=["byte", "empty", "finish-reason", "no-tokens", "engine", "two-frames"],
)
def test_outputs_that_cannot_be_read_end_streams_and_not_the_client(client, engine, frames):
    stream = client.submit(core_request())
    engine.receive()
    engine.output.send_multipart(frames)
    with pytest.raises(MalformedMessageError, match="cannot be read"):
        next(stream)
    assert engine.receive() == (ABORT, ["r1"])
    again = client.submit(core_request("r2"))
    engine.receive()
    engine.send_tokens("r2", [1], LENGTH)
    assert len(list(again)) == 1


def test_calls_return_values_fail_and_time_out(client, engine):
    import threading

    def answer():
        for result in ([None, [None, ["generate"]]], ["Call to x method failed: no", None]):
            kind, (_, call_id, _, _) = engine.receive()
            assert kind == UTILITY
            engine.send([], [call_id, *result])

    thread = threading.Thread(target=answer)
    thread.start()
    assert client.call("get_supported_tasks", timeout_s=LONG_S) == ["generate"]
    with pytest.raises(UtilityCallError, match="Call to x method failed: no"):
        client.call("x", 1, "a", timeout_s=LONG_S)
    thread.join()
    with pytest.raises(TransportTimeoutError, match="no answer to slow"):
        client.call("slow", timeout_s=0.05)
    _, (_, call_id, method, args) = engine.receive()
    assert (method, args) == ("slow", [])
    assert client.counts.num_calls == 0
    # An answer that comes too late, one that nobody asked for, and a notice.
    for number in (call_id, 2**64 - 1, -1):
        engine.send([], [number, None, [None, ["x", 1]]])
    eventually(lambda: client.counts.num_late_outputs == 2)
    eventually(lambda: any("notice -1" in text for text in client.take_notices()))


def test_the_dead_marker_ends_everything(client, engine):
    stream = client.submit(core_request())
    engine.receive()
    engine.output.send(b"ENGINE_CORE_DEAD")
    with pytest.raises(EngineDeadError, match="it said so"):
        next(stream)
    with pytest.raises(EngineDeadError):
        client.submit(core_request("r2"))
    with pytest.raises(EngineDeadError):
        client.call("x")
    assert client.statuses == ["dead"]


@pytest.mark.usefixtures("engine")
def test_a_watched_process_can_be_declared_dead(client):
    stream = client.submit(core_request())
    client.declare_dead(0, "exit code 9")
    with pytest.raises(EngineDeadError, match="exit code 9"):
        next(stream)
    with pytest.raises(InvalidArgumentError, match="no engine 5"):
        client.declare_dead(5, "")


def test_requests_before_any_engine_and_bad_arguments_are_typed_errors(client):
    with pytest.raises(NotConnectedError):
        client.submit(core_request())
    with pytest.raises(InvalidArgumentError, match="no engine 3"):
        client.submit(core_request(), engine=3)
    with pytest.raises(InvalidArgumentError, match="tcp://host:port"):
        EngineClient("127.0.0.1:5")
    with pytest.raises(TransportError, match="cannot listen"):
        EngineClient(client.handshake_address)
    client.close()
    with pytest.raises(TransportClosedError):
        client.submit(core_request())
    with pytest.raises(TransportClosedError):
        client.wait_ready(1)


def test_ids_in_use_are_refused_and_outputs_can_be_waited_for(client, engine):
    stream = client.submit(core_request())
    with pytest.raises(InvalidArgumentError, match="in use"):
        client.submit(core_request())
    with pytest.raises(TransportTimeoutError, match="r1"):
        stream.next_output(0.01)
    engine.receive()
    engine.send_tokens("r1", [4])
    assert stream.next_output(LONG_S).new_token_ids == [4]


def test_a_stream_that_nobody_reads_is_given_up_and_its_memory_freed():
    with (
        EngineClient(max_stream_bytes=100_000) as client,
        EnginePeer(client.handshake_address) as peer,
    ):
        peer.start()
        client.wait_ready(LONG_S)
        slow, quick = client.submit(core_request("slow")), client.submit(core_request("quick"))
        peer.receive()
        peer.receive()
        for _ in range(50):
            peer.send([output_fields("slow", [1] * 5000), output_fields("quick", [1])])
        peer.send_tokens("quick", [2], LENGTH)
        assert len(list(quick)) == 51
        with pytest.raises(SlowReaderError, match="limit is 100000"):
            list(slow)
        assert peer.receive() == (ABORT, ["slow"])


def test_an_engine_that_does_not_read_is_a_typed_error():
    with (
        EngineClient(max_queued_bytes=1 << 20) as client,
        EnginePeer(client.handshake_address) as peer,
    ):
        peer.start()
        client.wait_ready(LONG_S)
        peer.interrupt()
        eventually(lambda: client.statuses == ["dead"])
        peer.reconnect(RCVHWM=1)
        eventually(lambda: client.statuses == ["ready"])
        streams = []

        def submit_many() -> None:
            for number in range(20_000):
                big = core_request(str(number), prompt_token_ids=[70_000] * 20_000)
                streams.append(client.submit(big))

        with pytest.raises(StalledPeerError, match="engine 0 does not read"):
            submit_many()
        assert client.counts.num_streams == len(streams)
        client.abort([stream.request_id for stream in streams])
        assert client.counts.num_streams == 0


def test_requests_go_to_the_engine_with_least_to_do():
    with (
        EngineClient(num_engines=2) as client,
        EnginePeer(client.handshake_address, 0) as first,
        EnginePeer(client.handshake_address, 1) as second,
    ):
        first.start()
        second.start()
        client.wait_ready(LONG_S)
        streams = [client.submit(core_request(str(number))) for number in range(6)]
        assert sorted(stream.engine for stream in streams) == [0, 0, 0, 1, 1, 1]
        stats = {"num_running_reqs": 50, "num_waiting_reqs": 9, "kv_cache_usage": 0.9}
        first.output.send(pack([0, [], stats, 0.0, None, None, None, None, None]))
        marker = client.submit(core_request("marker"), engine=0)
        first.send_tokens("marker", [1], LENGTH)
        list(marker)
        assert {client.submit(core_request(f"more-{n}")).engine for n in range(4)} == {1}
        assert client.submit(core_request("ranked", data_parallel_rank=0)).engine == 0


def test_paused_engines_are_woken_through_the_coordinator():
    with Peer() as coordinator:
        publisher, to_front_ends = coordinator.bound(zmq.XPUB, XPUB_VERBOSE=1)
        addresses = CoordinatorAddresses("tcp://h:1", "tcp://h:2", to_front_ends)
        with (
            EngineClient(coordinator=addresses) as client,
            EnginePeer(client.handshake_address) as peer,
        ):
            assert publisher.recv() == b"\x01"
            peer.start()
            assert peer.addresses["coordinator_input"] == "tcp://h:1"
            assert peer.addresses["frontend_stats_publish_address"] == to_front_ends
            client.wait_ready(LONG_S)
            client.submit(core_request("paused"))
            assert unpack(publisher.recv()) == [0, 0]
            assert peer.receive()[1][12] == 0
            publisher.send(b"READY")
            publisher.send(b"\xc1")
            publisher.send(pack([[[0, 1, 0.5]], 4, True]))
            eventually(lambda: client.counts.num_rejected == 1)
            eventually(lambda: _wave_of(client, peer) == 4)
            publisher.send(pack([None, 5, False]))
            eventually(lambda: _wave_of(client, peer) == 5)


def _wave_of(client: EngineClient, peer: EnginePeer) -> int:
    """Send a request that lives for a moment and return the wave that it was sent with."""
    with client.submit(core_request("probe")):
        while True:
            kind, fields = peer.receive()
            if kind == ADD and fields[0] == "probe":
                return fields[12]
