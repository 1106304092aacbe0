"""Time from a request to its only token, through both ends, against pyzmq in the same run.

The engine is an echo in a thread of its own: it sends a token for each request. So the time is two
trips over loopback with coding, queues and two changes of threads, and no model. Both peers hand
over whole messages: extkv as objects of `extkv.protocol`, pyzmq as lists that msgspec makes.

Run from the repository root: `python -m bench.transport.bench_round_trip --out FILE`.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from extkv import protocol
from extkv.serve.outputs import RequestNews
from extkv.transport import EngineClient, EngineConnection, RequestArrived

from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_PROMPT_TOKENS = 512
EXTKV = "extkv, both ends"
PYZMQ = "pyzmq and msgspec, both ends"
READY = {
    "max_model_len": 1024, "num_gpu_blocks": 1, "block_size": 16, "dp_stats_address": None,
    "dtype": "float32", "vllm_version": "0.32.0", "world_size": 1, "data_parallel_size": 1,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
    "data_parallel_rank": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1, "instance_id": "echo",
    "supports_lora": False, "max_loras": 0,
}  # fmt: skip


class ExtkvEcho:
    """Both ends of extkv."""

    def __init__(self) -> None:
        self.client = EngineClient()
        self._ids = itertools.count()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.client.wait_ready(20)

    def _serve(self) -> None:
        connection = EngineConnection(self.client.handshake_address)
        connection.start(READY)
        while not self._is_stopped:
            for received in connection.receive(0.05):
                if isinstance(received, RequestArrived):
                    news = RequestNews(received.request.request_id, [1], finish_reason=1)
                    connection.send_outputs(0, [news], timestamp=1.0)
        connection.close(0.0)

    def round_trip(self) -> None:
        """Send a request and take its only output."""
        request = protocol.EngineCoreRequest(
            request_id=str(next(self._ids)),
            prompt_token_ids=list(range(NUM_PROMPT_TOKENS)),
            mm_features=None,
            sampling_params=protocol.SamplingParams(),
            pooling_params=None,
            arrival_time=1.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        assert [output.new_token_ids for output in self.client.submit(request)] == [[1]]

    def close(self) -> None:
        """End both ends."""
        self._is_stopped = True
        self._thread.join()
        self.client.close(0.0)


class PyzmqEcho:
    """Two sockets of libzmq, with the same messages."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._pull = self._context.socket(zmq.PULL)
        addresses = []
        for own in (self._router, self._pull):
            own.bind("tcp://127.0.0.1:*")
            addresses.append(own.getsockopt(zmq.LAST_ENDPOINT).decode())
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._serve, args=(addresses,))
        self._thread.start()
        self._router.recv_multipart()

    def _serve(self, addresses: list[str]) -> None:
        dealer, push = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        dealer.setsockopt(zmq.IDENTITY, b"\0\0")
        dealer.connect(addresses[0])
        push.connect(addresses[1])
        dealer.send(b"")
        while len(frames := dealer.recv_multipart()) > 1:
            request: list[Any] = msgspec.msgpack.decode(frames[1])
            output = [request[0], [1], None, None, None, 1, *[None] * 7, 0, *[None] * 4]
            batch = [0, [output], None, 1.0, None, None, None, None, "default"]
            push.send(msgspec.msgpack.encode(batch))
        dealer.close(linger=0)
        push.close(linger=0)

    def round_trip(self) -> None:
        """Send a request and take its only output."""
        head = [str(next(self._ids)), list(range(NUM_PROMPT_TOKENS)), None, {}, None, 1.0]
        request = [*head, *[None] * 5, 0, 0, 0, None, False, *[None] * 3, False, None, None]
        payload = msgspec.msgpack.encode(request)
        self._router.send_multipart([b"\0\0", b"\x00", payload])
        assert msgspec.msgpack.decode(self._pull.recv())[1][0][1] == [1]

    def close(self) -> None:
        """End all sockets."""
        self._router.send_multipart([b"\0\0", b""])
        self._thread.join()
        for own in (self._router, self._pull):
            own.close(linger=0)
        self._context.term()


def timed(operation: Callable[[], None]) -> float:
    """Return the time of one call in microseconds."""
    start = time.perf_counter()
    operation()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Run both, alternating."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_round_trip", arguments)
    ours, theirs = ExtkvEcho(), PyzmqEcho()
    samples = alternate(
        {EXTKV: lambda: timed(ours.round_trip), PYZMQ: lambda: timed(theirs.round_trip)},
        200 if arguments.quick else 2000,
        50,
    )
    shape = f"{NUM_PROMPT_TOKENS} prompt tokens, 1 token back"
    peer = report.add(shape, PYZMQ, samples[PYZMQ])
    report.add(shape, EXTKV, samples[EXTKV], peer=peer)
    report.finish()
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
