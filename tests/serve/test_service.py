"""A served engine as a front end sees it."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from extkv.engine.llm import LLM
from extkv.errors import NotConnectedError
from extkv.sampling_params import SamplingParams
from support.zmq_peers import ABORT, ABORTED, ERROR, LENGTH, STOP, request_fields

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def collect(front, num_requests: int, client: int = 0):
    """Receive outputs until this many requests have ended; return tokens and ends by request."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, list] = {}
    while len(ends) < num_requests:
        for output in front.outputs_of(client)[1]:
            tokens.setdefault(output[0], []).extend(output[1])
            if output[5] is not None:
                ends[output[0]] = output
    return tokens, ends


def greedy(llm, prompt, num_tokens):
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def test_tokens_are_those_of_the_engine_in_process(serve, tiny_llm):
    prompts = {str(number): [number + 1] * (number + 3) for number in range(12)}
    expected = {
        name: list(greedy(tiny_llm, prompt, 9).token_ids) for name, prompt in prompts.items()
    }
    with serve(tiny_llm) as (front, served):
        for name, prompt in prompts.items():
            front.add(request_fields(name, prompt, temperature=0.0, max_tokens=9))
        tokens, ends = collect(front, len(prompts))
        assert tokens == expected
        assert {output[5] for output in ends.values()} == {LENGTH}
        assert served.responses[0]["max_num_seqs"] == 8
        assert served.responses[0]["vllm_version"].startswith("0.32")


def test_stop_tokens_and_end_of_sequence_end_a_request(serve, tiny_llm):
    token_ids = list(greedy(tiny_llm, PROMPT, 9).token_ids)
    stop = token_ids[4]
    first = token_ids.index(stop)
    with serve(tiny_llm) as (front, _):
        front.add(
            request_fields("stop", PROMPT, temperature=0.0, max_tokens=9, stop_token_ids=[stop])
        )
        front.add(request_fields("eos", PROMPT, temperature=0.0, max_tokens=9, _eos_token_id=stop))
        tokens, ends = collect(front, 2)
        assert tokens["stop"] == tokens["eos"] == token_ids[: first + 1]
        assert (ends["stop"][5], ends["stop"][6]) == (STOP, stop)
        assert (ends["eos"][5], ends["eos"][6]) == (STOP, None)


def test_log_probabilities_of_prompt_and_output_are_arrays(serve, tiny_llm):
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1)
    expected = tiny_llm.generate([PROMPT], params, use_tqdm=False)[0]
    with serve(tiny_llm) as (front, _):
        fields = request_fields(
            "r", PROMPT, temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1
        )
        front.add(fields)
        outputs = [front.next_output() for _ in range(3)]
    ids, values, ranks = (
        np.concatenate([np.frombuffer(output[2][column][2], dtype) for output in outputs])
        for column, dtype in ((0, "<i4"), (1, "<f4"), (2, "<i4"))
    )
    sampled = list(expected.outputs[0].token_ids)
    assert ids.reshape(3, 3)[:, 0].tolist() == sampled
    assert ranks.tolist() == [1, 1, 1]
    entries = expected.outputs[0].logprobs
    for row, entry in zip(range(3), entries, strict=True):
        likeliest = sorted(entry.values(), key=lambda item: -item.logprob)[:2]
        found = values.reshape(3, 3)[row]
        assert found[0] == pytest.approx(entry[sampled[row]].logprob, abs=1e-5)
        assert found[1:].tolist() == pytest.approx([e.logprob for e in likeliest], abs=1e-5)
    name, shape, data = outputs[0][3][0]
    assert (name, shape) == ("int32", [len(PROMPT) - 1, 2])
    assert np.frombuffer(data, "<i4").reshape(shape)[:, 0].tolist() == PROMPT[1:]
    assert outputs[1][3] is None


def test_the_first_output_says_what_happened_before_it(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        front.add(request_fields("r", [3] * 40, temperature=0.0, max_tokens=2))
        first, second = front.next_output(), front.next_output()
        assert [event["type"] for event in first[7]] == [1, 2]
        assert first[7][0]["timestamp"] <= first[7][1]["timestamp"]
        assert first[11] == {
            "num_prompt_tokens": 40,
            "num_computed_tokens": 40,
            "num_cached_tokens": 0,
            "num_local_cached_tokens": 0,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": 32,
        }
        assert (second[7], second[11]) == (None, None)
        front.add(request_fields("again", [3] * 50, temperature=0.0, max_tokens=1))
        assert front.next_output()[11] == {
            "num_prompt_tokens": 50,
            "num_computed_tokens": 18,
            "num_cached_tokens": 32,
            "num_local_cached_tokens": 32,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": 16,
        }


def test_preemptions_are_told_with_the_next_output(serve, tiny_model):
    llm = LLM(
        tiny_model,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=17,
        enable_prefix_caching=False,
    )
    with serve(llm) as (front, _):
        names = [str(number) for number in range(3)]
        for name in names:
            front.add(request_fields(name, [int(name) + 1] * 30, temperature=0.0, max_tokens=100))
        events: dict[str, list[dict]] = {name: [] for name in names}
        num_events_at: dict[str, list[int]] = {name: [] for name in names}
        num_ended = 0
        while num_ended < len(names):
            for output in front.outputs_of()[1]:
                events[output[0]] += output[7] or []
                num_events_at[output[0]].append(len(output[7] or []))
                num_ended += output[5] is not None
        kinds = {name: [event["type"] for event in found] for name, found in events.items()}
        assert kinds["0"] == [1, 2], "the first one is never preempted"
        assert sum(found.count(3) for found in kinds.values()) == (
            llm.engine.scheduler.stats().num_preemptions
        )
        assert kinds["2"][:4] == [1, 2, 3, 2], "preempted and scheduled again"
        for name, found in events.items():
            times = [event["timestamp"] for event in found]
            assert times == sorted(times)
            assert kinds[name].count(2) == kinds[name].count(3) + 1
            assert max(num_events_at[name][1:]) in (0, 2), "told with the output after them"
        stats = front.utility("is_sleeping")
        assert stats[1] is None
    llm.close()


def test_statistics_have_what_vllms_have_and_can_be_left_out(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        front.add(request_fields("r", [3] * 40, temperature=0.0, max_tokens=2))
        stats = front.outputs_of()[2]
        assert (stats["num_running_reqs"], stats["num_waiting_reqs"]) == (1, 0)
        assert stats["kv_cache_usage"] > 0
        assert stats["prefix_cache_stats"]["queries"] == 40
        assert stats["prefix_cache_stats"]["reset"] is False
        assert front.utility("reset_prefix_cache")[2] == [None, True]
        front.add(request_fields("again", [3] * 40, temperature=0.0, max_tokens=200))
        found = []
        while not found or found[-1]["queries"] == 0:
            stats = front.outputs_of()[2]
            found += [] if stats is None else [stats["prefix_cache_stats"]]
        assert any(stats["reset"] for stats in found)
        assert (found[-1]["queries"], found[-1]["hits"]) == (40, 0)
    with serve(tiny_llm, log_stats=False) as (front, _):
        front.add(request_fields("r", [3] * 40, temperature=0.0, max_tokens=9))
        batches = []
        while not batches or batches[-1][1][0][5] is None:
            batches.append(front.outputs_of())
        assert all(batch[2] is None for batch in batches)
        assert all(batch[1][0][7] is None for batch in batches)
        assert batches[0][1][0][11]["num_prompt_tokens"] == 40


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"structured_outputs": {"regex": "[0-9"}}, "unclosed character class"),
        ({"structured_outputs": {"json": "{"}}, "json is no JSON"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"json_object": False}}, "json_object is False"),
        ({"logprobs": -1}, "whole vocabulary"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"n": 2}, "n is 2"),
    ],
)
def test_what_cannot_work_ends_with_an_error_and_disturbs_nobody(
    serve, tiny_llm, caplog, sampling, text
):
    with serve(tiny_llm) as (front, _):
        front.add(request_fields("bad", PROMPT, **sampling))
        output = front.next_output()
        assert (output[0], output[1], output[5]) == ("bad", [], ERROR)
        front.add(request_fields("good", PROMPT, max_tokens=1))
        assert front.next_output()[5] == LENGTH
    assert text in caplog.text


STRUCTURED = {
    "regex": ({"regex": "[1-9]{3}"}, "[1-9]{3}"),
    "choice": ({"choice": ["red", "green"]}, "red|green"),
    "grammar": ({"grammar": 'root ::= "<" [a-z] ">"', "_backend": "xgrammar"}, "<[a-z]>"),
    "schema": ({"json": {"enum": ["x", "y"]}}, '"[xy]"'),
    "text": ({"json": '{"type": "boolean"}', "disable_any_whitespace": True}, "true|false"),
    "object": ({"json_object": True, "whitespace_pattern": "[ ]?"}, r"\{.*"),
}


def test_structured_outputs_keep_their_structure(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        for name, (constraint, _) in STRUCTURED.items():
            front.add(
                request_fields(
                    name,
                    PROMPT,
                    temperature=1.0,
                    seed=3,
                    max_tokens=12,
                    structured_outputs=constraint,
                    _eos_token_id=0,
                    _all_stop_token_ids=[0],
                )
            )
        front.add(request_fields("free", PROMPT, temperature=0.0, max_tokens=5))
        tokens, ends = collect(front, len(STRUCTURED) + 1)
    for name, (_, pattern) in STRUCTURED.items():
        text = "".join(chr(32 + token % 94) for token in tokens[name] if token != 0)
        assert re.fullmatch(pattern, text), (name, text)
        assert name == "object" or (ends[name][5], tokens[name][-1]) == (STOP, 0)
    assert ends["free"][5] == LENGTH


def test_empty_long_and_repeated_requests_end_with_an_error(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        for name, prompt in (("empty", []), ("long", [1] * 300), ("vocabulary", [97])):
            front.add(request_fields(name, prompt, prompt_logprobs=1))
            output = front.next_output()
            assert (output[0], output[5]) == (name, ERROR)
        front.add(request_fields("twice", PROMPT, max_tokens=200, min_tokens=200))
        front.add(request_fields("twice", PROMPT, max_tokens=200))
        _, ends = collect(front, 1)
        assert ends["twice"][5] == ERROR


def test_an_abort_gets_no_answer_and_frees_the_request(serve, tiny_llm):
    with serve(tiny_llm) as (front, served):
        front.add(request_fields("long", PROMPT, max_tokens=240, temperature=0.0))
        front.next_output()
        front.send(ABORT, ["long", "unknown"])
        front.add(request_fields("next", PROMPT, max_tokens=2, temperature=0.0))
        _, ends = collect(front, 1)
        assert set(ends) == {"next"}
        assert served.service.num_requests == 0


def test_load_is_told_though_there_is_nothing_else_to_say(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        front.add(request_fields("long", PROMPT, max_tokens=240, temperature=0.0))
        front.next_output()
        front.send(ABORT, ["long"])
        until = time.monotonic() + 10
        while True:
            _, outputs, stats, *_ = front.outputs_of()
            if not outputs and stats["num_running_reqs"] == 0:
                break
            assert time.monotonic() < until


def test_requests_that_end_at_once_are_not_begun(serve, tiny_llm):
    with serve(tiny_llm) as (front, served):
        fields = request_fields("never", PROMPT)
        fields[19] = True
        front.add(fields)
        front.add(request_fields("next", PROMPT, max_tokens=1))
        assert front.next_output()[0] == "next"
        assert served.service.num_requests == 0


def test_methods_are_answered_or_refused(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        assert front.utility("get_supported_tasks")[1:] == [None, [None, ["generate"]]]
        assert front.utility("reset_mm_cache")[1:] == [None, [None, None]]
        assert front.utility("reset_prefix_cache")[2] == [None, True]
        assert front.utility("is_sleeping")[2] == [None, False]
        for method, args, text in (
            ("add_lora", [{}], "LoRA"),
            ("no_such_method", [], "no method"),
            ("is_sleeping", [1, 2], "2 arguments"),
            ("pause_scheduler", ["hop"], "'hop'"),
        ):
            _, failure, result = front.utility(method, *args)
            assert failure.startswith(f"Call to {method} method failed: ")
            assert text in failure
            assert result is None


def test_pausing_aborts_waits_or_keeps(serve, tiny_llm):
    with serve(tiny_llm) as (front, _):
        front.add(request_fields("aborted", PROMPT, max_tokens=240))
        front.next_output()
        front.send(b"\x03", [0, 1, "pause_scheduler", ["abort"]])
        _, ends = collect(front, 1)
        assert ends["aborted"][5] == ABORTED
        front.add(request_fields("held", PROMPT, max_tokens=2, temperature=0.0))
        assert front.utility("is_scheduler_paused")[2] == [None, True]
        front.send(b"\x03", [0, 2, "resume_scheduler", []])
        _, ends = collect(front, 1)
        assert ends["held"][5] == LENGTH
        front.add(request_fields("kept", PROMPT, max_tokens=100, temperature=0.0))
        front.next_output()
        front.utility("pause_scheduler", "keep")
        assert front.outputs[0].poll(100) == 0 or front.outputs_of()[1] == []
        front.send(b"\x03", [0, 3, "resume_scheduler", []])
        _, ends = collect(front, 1)
        assert ends["kept"][5] == LENGTH


def test_stopping_aborts_what_runs_and_tells_its_client(serve, tiny_llm):
    with serve(tiny_llm) as (front, served):
        front.add(request_fields("long", PROMPT, max_tokens=240))
        front.next_output()
        served.stop()
        _, ends = collect(front, 1)
        assert ends["long"][5] == ABORTED
        assert served.error is None


def test_a_failing_step_tells_every_client_that_the_engine_is_dead(serve, tiny_llm, monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError("the device is on fire")

    with serve(tiny_llm, num_clients=2) as (front, served):
        monkeypatch.setattr(tiny_llm.engine, "step", fail)
        front.add(request_fields("r", PROMPT))
        for client in range(2):
            assert front.outputs[client].recv_multipart() == [b"ENGINE_CORE_DEAD"]
        served.join()
        assert isinstance(served.error, ZeroDivisionError)


def test_the_service_ends_when_its_last_client_is_gone(serve, tiny_llm):
    with serve(tiny_llm, reconnect_for_s=0.05) as (front, served):
        front.add(request_fields("r", PROMPT, max_tokens=240))
        front.next_output()
        for socket in front.sockets:
            socket.close(linger=0)
        served.join()
        assert isinstance(served.error, NotConnectedError)
        assert served.service.num_requests == 0
