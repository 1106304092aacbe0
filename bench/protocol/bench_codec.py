"""Encode and decode EngineCore messages against msgspec with vLLM's hooks, in one process.

The peer decodes into structs and encodes from structs, as vLLM does; extkv decodes into arrays, or
into an object per request, and encodes from decoded messages, or from arrays. Both read and write
the same bytes, which is checked first. Times are CPU time of the thread, so that other load counts
little; collection of garbage is off while a sample is taken.

Run from the repository root: `python -m bench.protocol.bench_codec --out FILE`.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from extkv import protocol

from bench.protocol import msgspec_peer
from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOP_K = 20
VOCABULARY = 151_936
# A sample is the mean over so many calls that it takes about this long.
SAMPLE_US = 3_000
PEER_DECODE = "msgspec into structs"
PEER_ENCODE = "msgspec from structs"


class Case(NamedTuple):
    """A message in the forms that the two sides start from."""

    shape: str
    structs: object
    frames: list[bytes]


def batch(num_outputs: int, top_k: int, rng: np.random.Generator) -> Case:
    """Return a batch of one token per request, with log-probabilities if `top_k` is not 0."""
    outputs = []
    for index in range(num_outputs):
        lists = None
        if top_k:
            lists = msgspec_peer.LogprobsLists(
                rng.integers(0, VOCABULARY, (1, top_k + 1)).astype(np.int32),
                -rng.random((1, top_k + 1), dtype=np.float32),
                np.ones(1, dtype=np.int32),
            )
        token = int(rng.integers(0, VOCABULARY))
        request_id = f"cmpl-{index:016x}-0"
        outputs.append(msgspec_peer.EngineCoreOutput(request_id, [token], lists))
    structs = msgspec_peer.EngineCoreOutputs(outputs=outputs, timestamp=1.5)
    noun = f"{num_outputs} outputs" + (f", top-{top_k} logprobs" if top_k else "")
    return Case(noun, structs, frames_of(structs))


def request(num_tokens: int, rng: np.random.Generator) -> Case:
    """Return a request with a prompt of so many tokens."""
    params = msgspec_peer.SamplingParams(
        temperature=0.7,
        top_p=0.9,
        max_tokens=256,
        stop=[],
        stop_token_ids=[],
        bad_words=[],
        skip_reading_prefix_cache=False,
        _eos_token_id=2,
        _all_stop_token_ids={2},
    )
    structs = msgspec_peer.EngineCoreRequest(
        request_id="cmpl-0123456789abcdef-0",
        prompt_token_ids=rng.integers(0, VOCABULARY, num_tokens).tolist(),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=1.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return Case(f"request of {num_tokens} tokens", structs, frames_of(structs))


def frames_of(structs: object) -> list[bytes]:
    """Encode with the peer."""
    return [bytes(frame) for frame in msgspec_peer.Encoder().encode(structs)]


def cpu_us(operation: Callable[[], object]) -> float:
    """Return the CPU time that this thread spends in one call, in microseconds."""
    start = time.thread_time_ns()
    operation()
    return (time.thread_time_ns() - start) / 1e3


def mean_us(operation: Callable[[], object], num_calls: int) -> float:
    """Return the time of one call, averaged over several."""

    def repeat() -> None:
        for _ in range(num_calls):
            operation()

    gc.disable()
    try:
        return cpu_us(repeat) / num_calls
    finally:
        gc.enable()


def compare(
    report: Report, case: Case, operations: dict[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """Time operations in turns; return how many times faster than the first each is."""
    (peer_name, peer), *_ = operations.items()
    num_calls = max(int(SAMPLE_US / min(cpu_us(peer) for _ in range(5))), 1)
    timed = {name: partial(mean_us, call, num_calls) for name, call in operations.items()}
    gc.collect()
    samples = alternate(timed, rounds, warmup_rounds=1)
    num_bytes = sum(map(len, case.frames))
    peer_row = report.add(case.shape, peer_name, samples[peer_name], num_bytes=num_bytes)
    speedups = {}
    for name in list(operations)[1:]:
        row = report.add(case.shape, name, samples[name], num_bytes=num_bytes, peer=peer_row)
        speedups[name] = 1 / (row.time_ratio or 1.0)
    return speedups


def read_columns(frames: Sequence[bytes], *, with_logprobs: bool) -> object:
    """Decode a batch into arrays: tokens, offsets, finish reasons, stacked log-probabilities."""
    outputs = protocol.decode_outputs(frames)
    stacked = outputs.stacked_logprobs() if with_logprobs else None
    return outputs.token_ids, outputs.token_offsets, outputs.finish_reasons, stacked


def read_columns_and_ids(frames: Sequence[bytes], *, with_logprobs: bool) -> object:
    """Decode a batch into arrays and a list of request ids."""
    outputs = protocol.decode_outputs(frames)
    stacked = outputs.stacked_logprobs() if with_logprobs else None
    arrays = (outputs.token_ids, outputs.token_offsets, outputs.finish_reasons)
    return arrays, outputs.request_ids, stacked


def use(outputs: Sequence[protocol.EngineCoreOutput]) -> None:
    """Read what a front end reads of every output."""
    for output in outputs:
        _ = (output.request_id, output.new_token_ids, output.finish_reason)


def bench_batch(report: Report, case: Case, rounds: int, *, with_logprobs: bool) -> None:
    """Decode and encode one batch in every way."""
    peer = msgspec_peer.Decoder(msgspec_peer.EngineCoreOutputs)
    frames = case.frames
    message = protocol.decode_outputs(frames)
    assert protocol.encode_outputs(message) == frames
    speedups = compare(
        report,
        case,
        {
            PEER_DECODE: lambda: peer.decode(frames),
            "extkv into arrays": lambda: read_columns(frames, with_logprobs=with_logprobs),
            "extkv into arrays, ids": lambda: read_columns_and_ids(
                frames, with_logprobs=with_logprobs
            ),
            "extkv into objects": lambda: protocol.decode_outputs(frames).outputs,
        },
        rounds,
    )
    least = 10.0 if with_logprobs else 2.0
    is_target = not case.shape.startswith("1 ")
    if is_target:
        report.at_least(f"{case.shape}: decode into arrays", speedups["extkv into arrays"], least)
        report.at_least(f"{case.shape}: decode to objects", speedups["extkv into objects"], 1)
    used = compare(
        report,
        case,
        {
            f"{PEER_DECODE}, 3 fields read": lambda: use(peer.decode(frames).outputs),
            "extkv into objects, 3 fields read": lambda: use(
                protocol.decode_outputs(frames).outputs
            ),
        },
        rounds,
    )
    if is_target:
        value = used["extkv into objects, 3 fields read"]
        report.at_least(f"{case.shape}: decode to objects, 3 fields read", value, 1)
    bench_batch_encoding(report, case, rounds, with_logprobs=with_logprobs)


def bench_batch_encoding(report: Report, case: Case, rounds: int, *, with_logprobs: bool) -> None:
    """Encode one batch from a message and from arrays."""
    encoder = msgspec_peer.Encoder()
    buffer = bytearray()
    message = protocol.decode_outputs(case.frames)
    request_ids, token_ids = message.request_ids, message.token_ids
    logprobs = None
    if with_logprobs:
        ids, values, ranks = message.stacked_logprobs()
        logprobs = protocol.LogprobsLists(
            logprob_token_ids=ids, logprobs=values, sampled_token_ranks=ranks
        )
    from_arrays = partial(
        protocol.encode_output_columns, request_ids, token_ids, logprobs=logprobs, timestamp=1.5
    )
    assert from_arrays() == case.frames
    speedups = compare(
        report,
        case,
        {
            PEER_ENCODE: lambda: encoder.encode_into(case.structs, buffer),
            "extkv from a message": lambda: protocol.encode_outputs(message),
            "extkv from arrays": from_arrays,
        },
        rounds,
    )
    least = 5 if with_logprobs else 1
    report.at_least(f"{case.shape}: encode", speedups["extkv from a message"], least)


def bench_request(report: Report, case: Case, rounds: int, least: float | None) -> None:
    """Decode and encode one request."""
    peer = msgspec_peer.Decoder(msgspec_peer.EngineCoreRequest)
    encoder = msgspec_peer.Encoder()
    frames = case.frames
    message = protocol.decode_request(frames)
    assert protocol.encode_request(message) == frames

    def read() -> object:
        found = protocol.decode_request(frames)
        return found.request_id, found.prompt_token_ids, found.sampling_params

    name = "extkv, prompt as an array"
    speedups = compare(report, case, {PEER_DECODE: lambda: peer.decode(frames), name: read}, rounds)
    if least is not None:
        report.at_least(f"{case.shape}: decode", speedups[name], least)
    operations: dict[str, Callable[[], object]] = {
        PEER_ENCODE: lambda: encoder.encode(case.structs),
        "extkv from a message": lambda: protocol.encode_request(message),
    }
    speedups = compare(report, case, operations, rounds)
    report.at_least(f"{case.shape}: encode", speedups["extkv from a message"], 1)


def main() -> None:
    """Run all cases."""
    arguments = argument_parser(__doc__).parse_args()
    rounds = 7 if arguments.quick else 31
    rng = np.random.default_rng(7)
    report = Report("bench_codec", arguments)
    for top_k in (0, TOP_K):
        for num_outputs in (1, 64, 256, 1024):
            case = batch(num_outputs, top_k, rng)
            bench_batch(report, case, rounds, with_logprobs=bool(top_k))
    bench_request(report, request(512, rng), rounds, None)
    bench_request(report, request(8192, rng), rounds, 3)
    report.finish()


if __name__ == "__main__":
    main()
