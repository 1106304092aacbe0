"""Answers appear in the order of the questions, as they come, whatever ends first."""

import json

import pytest
from extkv import CompletionOutput, RequestOutput, SamplingParams
from extkv.cli.answers import JsonAnswers, TextAnswers, format_speedup
from extkv.cli.questions import Question
from extkv.outputs import RequestMetrics

QUESTIONS = [Question(name, SamplingParams(), prompt=f"ask {name}") for name in "abc"]


def output(text, reason=None):
    completion = CompletionOutput(
        0, text, token_ids=list(text.encode()), finish_reason=reason, stop_reason=None
    )
    metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0)
    return RequestOutput("0", None, [1, 2], None, [completion], reason is not None, 1, metrics)


@pytest.fixture
def shown(capsys):
    return lambda: capsys.readouterr().out


def test_one_answer_is_its_text_and_a_line_end(shown):
    answers = TextAnswers(QUESTIONS[:1], has_titles=False)
    answers.show(0, output("on"))
    assert shown() == "on"
    answers.show(0, output("one", "length"))
    answers.finish()
    assert shown() == "e\n"


def test_an_answer_that_is_early_waits_for_its_turn(shown):
    answers = TextAnswers(QUESTIONS, has_titles=True)
    answers.show(1, output("two", "stop"))
    assert shown() == ""
    answers.show(0, output("o"))
    assert shown() == "[a] ask a\no"
    answers.show(2, output("la"))
    answers.show(0, output("one", "length"))
    assert shown() == "ne\n\n[b] ask b\ntwo\n\n[c] ask c\nla"
    answers.show(2, output("last", "length"))
    answers.finish()
    assert shown() == "st\n\n"


def test_what_is_there_is_printed_when_a_run_is_cut_off(shown):
    answers = TextAnswers(QUESTIONS, has_titles=True)
    answers.show(0, output("on"))
    answers.show(2, output("t"))
    answers.finish()
    assert shown() == "[a] ask a\non\n\n[c] ask c\nt\n\n"


def test_json_is_one_object_per_answer_in_order(shown):
    answers = JsonAnswers(QUESTIONS)
    answers.show(1, output("two", "stop"))
    answers.show(0, output("o"))
    assert shown() == ""
    answers.show(0, output("one", "length"))
    answers.show(2, output("t", "abort"))
    answers.finish()
    lines = [json.loads(line) for line in shown().splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "c"]
    assert lines[0] == {
        "id": "a",
        "turn": 0,
        "text": "one",
        "token_ids": [111, 110, 101],
        "finish_reason": "length",
        "stop_reason": None,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 1,
        "queue_s": 0.5,
        "prefill_s": 0.5,
        "decode_s": 2.0,
    }


def test_json_of_what_is_there_when_a_run_is_cut_off(shown):
    answers = JsonAnswers(QUESTIONS)
    answers.show(1, output("tw"))
    answers.finish()
    assert json.loads(shown())["text"] == "tw"


def timed(token_ids, seconds):
    metrics = RequestMetrics(0.0)
    metrics.add_token(1.0)
    metrics.add_token(1.0 + seconds)
    completion = CompletionOutput(0, token_ids=token_ids)
    return RequestOutput("0", None, [1], None, [completion], finished=True, metrics=metrics)


def test_speed_with_drafts_stands_beside_that_without():
    drafted = [timed([1, 2, 3, 4, 5], 2.0), timed([1, 2, 3], 1.0)]
    plain = [timed([1, 2, 3, 4, 5], 3.0), timed([1, 9, 3], 1.0)]
    assert format_speedup(drafted, plain) == (
        "speed: 3.0 tokens/s with drafts, 2.0 without: 1.50 x; 1 of 2 answers are the same"
    )
    assert "too short" in format_speedup([timed([1], 0.0)], [timed([1], 0.0)])
