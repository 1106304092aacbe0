"""OpenAI's HTTP interface of vLLM's Rust front end, answered by `extkv serve`."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.vllm_front_end import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.vllm_front_end import Serving

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def one_engine(model_directory, tmp_path_factory) -> Iterator[Serving]:
    yield from serving(model_directory, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture
def two_engines(model_directory, tmp_path_factory) -> Iterator[Serving]:
    yield from serving(model_directory, tmp_path_factory.mktemp("two"), 2)


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


def test_two_engines_share_the_work_and_one_survives_the_other(two_engines):
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
    two_engines.engines[0].send_signal(signal.SIGTERM)
    assert two_engines.engines[0].wait(60) == 0
    assert two_engines.engines[1].poll() is None
