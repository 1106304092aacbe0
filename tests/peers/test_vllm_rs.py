"""OpenAI's HTTP interface of vLLM's Rust front end, answered by `extkv serve`."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from support.vllm_front_end import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.vllm_front_end import Serving

# In order: the last test of each deployment kills it, since starting takes longest.
pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def one_engine(model_directory, tmp_path_factory) -> Iterator[Serving]:
    yield from serving(model_directory, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two_engines(model_directory, tmp_path_factory) -> Iterator[Serving]:
    yield from serving(model_directory, tmp_path_factory.mktemp("two"), 2)


class Reader:
    """A streamed completion that a thread reads."""

    def __init__(self, serving: Serving, num_tokens: int) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._stack = ExitStack()
        self._response = self._stack.enter_context(
            serving.open(
                "/v1/completions",
                prompt=PROMPT,
                max_tokens=num_tokens,
                temperature=0,
                stream=True,
                ignore_eos=True,
                return_token_ids=True,
            )
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with self._stack, suppress(http.client.HTTPException, OSError):
            for line in self._response:
                if line.startswith(b"data: {"):
                    self._count(json.loads(line.removeprefix(b"data: ")))

    def _count(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            self.num_tokens += len(choice.get("token_ids") or ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def chunks(response) -> list[dict]:
    lines = [line.strip() for line in response if line.strip()]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def test_a_completion(one_engine):
    status, answer = one_engine.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0)
    assert status == 200
    assert answer["choices"][0]["text"].startswith(" Paris")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


def test_a_chat_streamed_with_log_probabilities(one_engine):
    with one_engine.open(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is 2+2?"}],
        max_tokens=6,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
    ) as response:
        found = chunks(response)
    entries = [
        e for c in found for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert len(entries) == 6
    for entry in entries:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy"
    assert found[-1]["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_the_prompt(one_engine):
    _, answer = one_engine.post(
        "/v1/completions", prompt=PROMPT, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][:5] == ["The", " capital", " of", " France", " is"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])


def test_a_stop_string(one_engine):
    _, answer = one_engine.post(
        "/v1/completions", prompt="count: one, two,", max_tokens=40, temperature=0, stop=[" four"]
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == " four"
    assert "four" not in choice["text"]


def test_many_at_once(one_engine):
    counts = []

    def ask(number: int) -> None:
        _, answer = one_engine.post(
            "/v1/completions",
            prompt=f"Story {number}:",
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
        )
        counts.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [8] * 8


def test_closing_the_connection_aborts_the_request(one_engine):
    with one_engine.open(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=480,
        temperature=0,
        stream=True,
        ignore_eos=True,
    ) as response:
        response.readline()
    until = time.monotonic() + 60
    while "auto-aborting request" not in one_engine.log("front"):
        assert time.monotonic() < until
        time.sleep(0.1)
    status, _ = one_engine.post("/v1/completions", prompt=PROMPT, max_tokens=2, temperature=0)
    assert status == 200


def test_structured_outputs(one_engine):
    for constraint, pattern in (
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
    ):
        status, answer = one_engine.post(
            "/v1/completions",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            structured_outputs=constraint,
        )
        assert status == 200
        assert re.fullmatch(pattern, answer["choices"][0]["text"])


def test_what_the_engine_cannot_do_fails_alone(one_engine):
    status, _ = one_engine.post(
        "/v1/completions", prompt=PROMPT, max_tokens=2, structured_outputs={"regex": "[a-z"}
    )
    # The front end may judge it first.
    assert status in {400, 500}
    status, _ = one_engine.post("/v1/completions", prompt=PROMPT, max_tokens=2, temperature=0)
    assert status == 200


def test_a_killed_front_end_ends_its_engine(one_engine):
    reader = Reader(one_engine, 480)
    while reader.num_tokens < 2:
        time.sleep(0.01)
    one_engine.front_end.kill()
    assert one_engine.engines[0].wait(60) == 1
    reader.thread.join()
    assert "1 requests aborted" in one_engine.log("engine-0")


def test_two_engines_share_the_work(two_engines):
    answers = []

    def ask(number: int) -> None:
        status, _ = two_engines.post(
            "/v1/completions", prompt=f"Story {number}:", max_tokens=4, temperature=0
        )
        answers.append(status)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 4


def test_an_engine_killed_in_mid_stream_takes_no_stream_of_the_other_with_it(two_engines):
    num_tokens = 80
    readers = [Reader(two_engines, num_tokens) for _ in range(4)]
    until = time.monotonic() + 60
    while any(reader.num_tokens < 2 for reader in readers):
        assert time.monotonic() < until
        time.sleep(0.01)
    two_engines.engines[0].kill()
    told = [reader for reader in readers if reader.finish_reason is not None]
    assert told == [], "all of them were running"
    # The front end has no way to see the death: it waits for a marker that nobody sends.
    while sum(reader.finish_reason == "length" for reader in readers) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    ends = sorted((reader.finish_reason or "none", reader.num_tokens) for reader in readers)
    assert ends[:2] == [("length", num_tokens)] * 2
    assert all(count < num_tokens for _, count in ends[2:])
    two_engines.engines[1].send_signal(signal.SIGTERM)
    assert two_engines.engines[1].wait(60) == 0
    two_engines.front_end.kill()
    for reader in readers:
        reader.thread.join()
