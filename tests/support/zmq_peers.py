"""Peers of EngineCore in pyzmq and msgspec, written from the protocol and not from our code.

They speak vLLM 0.32's wire: requests of 22 fields, outputs of 18 in batches of 9.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
STOP, LENGTH, ABORTED, ERROR = 0, 1, 2, 3
TIMEOUT_MS = 20_000

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode

READY_RESPONSE = {
    "max_model_len": 128,
    "num_gpu_blocks": 10,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "vllm_version": "0.32.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "instance_id": "peer",
    "supports_lora": False,
    "max_loras": 0,
}


def identity_of(index: int) -> bytes:
    """Return an engine's socket identity."""
    return index.to_bytes(2, "little")


def request_fields(request_id: str, prompt: list[int], **sampling: Any) -> list[Any]:
    """Return the 22 fields of a request."""
    params = {"stop": [], "stop_token_ids": [], "bad_words": [], **sampling}
    head = [request_id, prompt, None, params, None, time.time(), None, None, None]
    tail = [None, None, 0, 0, 0, None, False, None, None, None, False, None, None]
    return head + tail


def output_fields(
    request_id: str, token_ids: list[int], finish_reason: int | None = None
) -> list[Any]:
    """Return the 18 fields of an output."""
    fields: list[Any] = [request_id, token_ids, *[None] * 16]
    fields[5] = finish_reason
    fields[13] = 0
    return fields


def batch_fields(outputs: list[list[Any]], *, engine: int = 0, utility: Any = None) -> list[Any]:
    """Return the 9 fields of a batch of outputs."""
    return [engine, outputs, None, time.monotonic(), utility, None, None, None, "default"]


class Peer:
    """Own sockets and close them at the end."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int, **options: Any) -> zmq.Socket[bytes]:
        """Open a socket that gives up after a while."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        for name in ("SNDHWM", "RCVHWM"):
            socket.setsockopt(getattr(zmq, name), 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        self.sockets.append(socket)
        return socket

    def bound(self, kind: int, address: str = "tcp://127.0.0.1:*", **options: Any) -> Any:
        """Open a socket that listens; return it and its address."""
        socket = self.socket(kind, **options)
        socket.bind(address)
        return socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def close(self) -> None:
        """Close everything."""
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FrontPeer(Peer):
    """A front end with any number of clients, and a coordinator if asked for."""

    def __init__(
        self, *, num_clients: int = 1, coordinator: bool = False, **outputs_options: int
    ) -> None:
        super().__init__()
        self.handshake, self.address = self.bound(zmq.ROUTER)
        inputs = [self.bound(zmq.ROUTER) for _ in range(num_clients)]
        outputs = [self.bound(zmq.PULL, **outputs_options) for _ in range(num_clients)]
        self.inputs = [socket for socket, _ in inputs]
        self.outputs = [socket for socket, _ in outputs]
        self.addresses: dict[str, Any] = {
            "inputs": [address for _, address in inputs],
            "outputs": [address for _, address in outputs],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        }
        if coordinator:
            self.publisher, to_engines = self.bound(zmq.XPUB, XPUB_VERBOSE=1)
            self.puller, from_engines = self.bound(zmq.PULL)
            self.addresses["coordinator_input"] = to_engines
            self.addresses["coordinator_output"] = from_engines

    def greet(self, index: int = 0) -> dict[str, Any]:
        """Take an engine's HELLO, send INIT, return the HELLO."""
        identity, hello = self.handshake.recv_multipart()
        assert identity == identity_of(index)
        self.send_init(identity)
        return unpack(hello)

    def send_init(self, identity: bytes) -> None:
        """Send INIT."""
        message = {"addresses": self.addresses, "parallel_config": {}}
        self.handshake.send_multipart([identity, pack(message)])

    def take_ready(self) -> list[dict[str, Any]]:
        """Take the ready responses of one engine, then its READY."""
        responses = []
        for socket in self.inputs:
            _, payload = socket.recv_multipart()
            responses.append(unpack(payload))
        _, ready = self.handshake.recv_multipart()
        assert unpack(ready)["status"] == "READY"
        return responses

    def add(self, fields: list[Any], *, client: int = 0, engine: int = 0) -> None:
        """Send a request."""
        fields[11] = client
        self.send(ADD, fields, client=client, engine=engine)

    def send(self, kind: bytes, payload: Any, *, client: int = 0, engine: int = 0) -> None:
        """Send anything."""
        self.inputs[client].send_multipart([identity_of(engine), kind, pack(payload)])

    def outputs_of(self, client: int = 0) -> list[Any]:
        """Receive the next batch of a client."""
        frames = self.outputs[client].recv_multipart()
        assert len(frames) >= 1
        return unpack(frames[0], ext_hook=lambda _, data: bytes(data))

    def next_output(self, client: int = 0) -> list[Any]:
        """Receive the next batch with outputs and return its first one."""
        while True:
            batch = self.outputs_of(client)
            if batch[1]:
                return batch[1][0]

    def utility(self, method: str, *args: Any, call_id: int = 7) -> list[Any]:
        """Call a method and return `[call_id, failure, result]`."""
        self.send(UTILITY, [0, call_id, method, list(args)])
        while True:
            batch = self.outputs_of()
            if batch[4] is not None:
                return batch[4]


class EnginePeer(Peer):
    """An engine."""

    def __init__(self, handshake_address: str, index: int = 0, *, identity: bytes | None = None):
        super().__init__()
        self.index = index
        self.identity = identity_of(index) if identity is None else identity
        self.handshake = self.socket(zmq.DEALER, IDENTITY=self.identity)
        self.handshake.connect(handshake_address)
        self.addresses: dict[str, Any] = {}

    def hello(self, *, local: bool = False) -> None:
        """Say HELLO."""
        self.handshake.send(pack({"status": "HELLO", "local": local, "headless": not local}))

    def take_init(self) -> None:
        """Take INIT and connect to the addresses in it."""
        self.addresses = unpack(self.handshake.recv())["addresses"]
        self.input = self.socket(zmq.DEALER, IDENTITY=self.identity)
        self.input.connect(self.addresses["inputs"][0])
        self.output = self.socket(zmq.PUSH)
        self.output.connect(self.addresses["outputs"][0])

    def register(self, **changes: Any) -> None:
        """Send the ready response."""
        self.input.send(pack({**READY_RESPONSE, **changes}))

    def ready(self) -> None:
        """Say READY."""
        self.handshake.send(pack({"status": "READY", "local": False, "headless": True}))

    def start(self, **changes: Any) -> EnginePeer:
        """Do all of the start-up."""
        self.hello()
        self.take_init()
        self.register(**changes)
        self.ready()
        return self

    def interrupt(self) -> None:
        """Break the input connection."""
        self.input.close(linger=0)

    def reconnect(self, **options: Any) -> None:
        """Come back, without another start."""
        self.input = self.socket(zmq.DEALER, IDENTITY=self.identity, **options)
        self.input.connect(self.addresses["inputs"][0])

    def receive(self) -> tuple[bytes, Any]:
        """Receive the next input: its type and its contents."""
        kind, payload, *_ = self.input.recv_multipart()
        return kind, unpack(payload)

    def send_tokens(
        self, request_id: str, token_ids: list[int], finish_reason: int | None = None
    ) -> None:
        """Send one output."""
        self.send([output_fields(request_id, token_ids, finish_reason)])

    def send(self, outputs: list[list[Any]], utility: Any = None) -> None:
        """Send a batch."""
        self.output.send(pack(batch_fields(outputs, engine=self.index, utility=utility)))
