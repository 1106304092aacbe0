"""Start-up of a front end's end in every order, and engines that go and come back."""

from __future__ import annotations

import resource

import pytest
from extkv.errors import EngineDeadError, TransportError, TransportTimeoutError
from extkv.transport import EngineClient
from support.core_requests import core_request
from support.waiting import LONG_S, eventually
from support.zmq_peers import ABORT, ADD, LENGTH, EnginePeer, pack, unpack


def test_the_response_may_come_long_before_ready(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.hello()
        peer.take_init()
        assert client.statuses == ["starting"]
        peer.register()
        client.wait_ready(LONG_S)
        client.submit(core_request())
        assert peer.receive()[0] == ADD
        peer.ready()
        eventually(lambda: client.counts.num_rejected == 0)


def test_ready_may_come_before_the_response(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.hello()
        peer.take_init()
        peer.ready()
        with pytest.raises(TransportTimeoutError, match=r"engines \[0\]"):
            client.wait_ready(0.1)
        peer.register()
        client.wait_ready(LONG_S)


def test_an_old_engine_registers_with_an_empty_payload():
    with (
        EngineClient(default_profile="0.25") as client,
        EnginePeer(client.handshake_address) as peer,
    ):
        peer.hello()
        peer.take_init()
        peer.input.send(b"")
        client.wait_ready(LONG_S)
        assert client.ready_response() is None
        assert client.profile() == "0.25"


def test_a_second_hello_gets_init_again_until_the_engine_is_ready(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.hello()
        peer.hello()
        peer.take_init()
        assert unpack(peer.handshake.recv())["addresses"] == peer.addresses
        peer.register()
        client.wait_ready(LONG_S)
        peer.hello()
        eventually(lambda: client.counts.num_rejected == 1)
        assert "ready already" in client.take_notices()[0]
        assert client.statuses == ["ready"]


def test_a_wrong_identity_is_refused_and_the_right_one_still_comes(client):
    with (
        EnginePeer(client.handshake_address, identity=b"\x05\x00") as stranger,
        EnginePeer(client.handshake_address) as peer,
    ):
        stranger.hello()
        eventually(lambda: client.counts.num_rejected == 1)
        assert "is no engine" in client.take_notices()[0]
        peer.start()
        client.wait_ready(LONG_S)


def test_garbage_at_start_up_is_refused_with_the_field(client):
    with EnginePeer(client.handshake_address) as peer:
        for message in (b"", b"\xc1", pack([]), pack({"status": "BYE"}), pack({"status": "READY"})):
            peer.handshake.send(message)
        peer.ready()
        eventually(lambda: client.counts.num_rejected == 6)
        peer.hello()
        peer.take_init()
        peer.register(block_size="sixteen")
        eventually(lambda: client.counts.num_rejected == 7)
        notices = client.take_notices()
        assert "block_size" in notices[-1]
        assert "before its HELLO" in notices[-2]
        peer.register()
        client.wait_ready(LONG_S)


def test_a_missing_field_of_the_response_is_named_and_unknown_ones_are_ignored(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.hello()
        peer.take_init()
        peer.input.send(pack({"max_model_len": 1, "num_gpu_blocks": 1, "dp_stats_address": None}))
        eventually(lambda: client.counts.num_rejected == 1)
        assert "block_size" in client.take_notices()[0]
        peer.register(a_new_field={"a": 1})
        client.wait_ready(LONG_S)


def test_local_engines_can_be_asked_for():
    with (
        EngineClient(expects_local=True) as client,
        EnginePeer(client.handshake_address) as peer,
    ):
        peer.hello(local=False)
        eventually(lambda: client.counts.num_rejected == 1)
        peer.hello(local=True)
        peer.take_init()


def test_an_engine_that_is_only_interrupted_loses_its_streams_and_is_used_again(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.start()
        client.wait_ready(LONG_S)
        stream = client.submit(core_request())
        peer.receive()
        peer.interrupt()
        with pytest.raises(EngineDeadError):
            next(stream)
        peer.reconnect()
        eventually(lambda: client.statuses == ["ready"])
        assert peer.receive() == (ABORT, ["r1"])
        again = client.submit(core_request("r2"))
        assert peer.receive()[0] == ADD
        peer.send_tokens("r2", [1], LENGTH)
        assert len(list(again)) == 1


def test_a_dead_engine_may_start_anew(client):
    with EnginePeer(client.handshake_address) as peer:
        peer.start()
        client.wait_ready(LONG_S)
    eventually(lambda: client.statuses == ["dead"])
    with EnginePeer(client.handshake_address) as peer:
        peer.start()
        eventually(lambda: client.statuses == ["ready"])
        client.submit(core_request())
        assert peer.receive()[0] == ADD


def test_a_thread_that_cannot_start_is_a_transport_error():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(TransportError, match="cannot start the transport's thread"):
            EngineClient()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
