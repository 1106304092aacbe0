"""What `extkv generate` reads: arguments, standard input, and each thing wrong with a line."""

import io
import json
import sys
import types

import pytest
from extkv.cli.questions import Question, read_questions
from extkv.errors import InvalidArgumentError
from extkv.sampling_params import SamplingParams
from extkv.structured_outputs.params import StructuredOutputsParams

SAMPLING = {"max_tokens": 5, "temperature": 0.0}


@pytest.fixture
def read(tmp_path):
    """Reads questions from lines of a file."""

    def read_lines(*lines, chat=None):
        path = tmp_path / "p.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts))
        return read_questions([], path, SAMPLING, chat=chat)

    return read_lines


@pytest.fixture
def stdin(monkeypatch):
    def set_stdin(data):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))

    return set_stdin


def test_arguments_are_prompts_in_their_order():
    questions = read_questions(["a", "b\n"], None, SAMPLING, chat=None)
    assert [(q.question_id, q.prompt, q.messages) for q in questions] == [
        (0, "a", ()),
        (1, "b\n", ()),
    ]
    assert questions[0].sampling == SamplingParams(**SAMPLING)


def test_chat_makes_a_message_of_a_prompt():
    (question,) = read_questions(["a"], None, SAMPLING, chat=True)
    assert (question.prompt, question.messages) == (None, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize("prompts", [[], ["-"]], ids=["nothing", "dash"])
def test_standard_input_is_one_prompt_without_its_last_newline(stdin, prompts):
    stdin(b"two\nlines\n\n")
    (question,) = read_questions(prompts, None, SAMPLING, chat=None)
    assert question.prompt == "two\nlines\n"


def test_a_line_has_its_own_id_and_sampling(read):
    named, numbered = read({"prompt": "a", "id": "x", "top_k": 3, "max_tokens": 9}, {"prompt": "b"})
    assert named.question_id == "x"
    assert named.sampling == SamplingParams(temperature=0, top_k=3, max_tokens=9)
    (constrained,) = read({"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}})
    assert constrained.sampling.structured_outputs == StructuredOutputsParams(choice=["yes", "no"])
    assert (numbered.question_id, numbered.sampling) == (1, SamplingParams(**SAMPLING))


def test_lines_may_hold_token_ids_messages_or_turns(read):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    ids, talk, turns = read({"prompt": [1, 2]}, {"messages": messages}, "", {"turns": ["a", "b"]})
    assert ids.prompt == [1, 2]
    assert talk.messages == messages
    assert (turns.question_id, turns.later_turns) == (2, ("b",))


def test_a_line_may_hold_any_unicode_line_break(read):
    (question,) = read('{"prompt": "a\u2028b\u0085c"}')
    assert question.prompt == "a\u2028b\u0085c"


def test_turns_go_on_with_the_answer(read):
    (first,) = read({"turns": ["a", "b"], "id": 7})
    second = first.next_turn("answer")
    assert [message["content"] for message in second.messages] == ["a", "answer", "b"]
    assert (second.question_id, second.turn) == (7, 1)
    assert second.next_turn("end") is None


def test_a_file_can_be_standard_input(stdin):
    stdin(b'{"prompt": "a"}\n')
    (question,) = read_questions([], "-", SAMPLING, chat=None)
    assert question.prompt == "a"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: '[1]' is no JSON object"),
        ("[" * 100_000, "line 2: maximum recursion depth exceeded"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ('{"seed": ' + "9" * 5000 + "}", "line 2: Exceeds the limit"),
        ({"id": 1}, "expected one of prompt, messages, turns, found none of them"),
        ({"prompt": "a", "turns": ["b"]}, "found prompt and turns"),
        ({"prompt": "a", "id": []}, "id is [], expected a string or a number"),
        ({"prompt": 5}, "prompt is 5, expected a text or a list of token ids"),
        ({"prompt": [True]}, "prompt is [True], expected a text or a list of token ids"),
        ({"prompt": "a", "heat": 1}, "'heat' is no field, known: id, prompt"),
        ({"prompt": "a", "n": 2}, "'n' is no field"),
        ({"prompt": "a", "top_p": 0}, "line 2: top_p is 0, expected a finite number"),
        ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "'regexp' is no field of"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs has no constraint"),
        ({"prompt": "a", "structured_outputs": 1}, "structured_outputs is 1, expected"),
        ({"messages": []}, "messages is [], expected a list of objects"),
        ({"messages": ["a"]}, "messages holds 'a', expected a list of objects"),
        ({"messages": [{"role": "user"}]}, "expected a list of objects with a role and a content"),
        ({"turns": []}, "turns is [], expected a list of texts"),
        ({"turns": [1]}, "turns is [1], expected a list of texts"),
    ],
)
def test_rejects_a_line_and_names_it(read, line, words):
    with pytest.raises(InvalidArgumentError) as caught:
        read({"prompt": "a"}, line)
    assert words in str(caught.value)
    assert "p.jsonl, line 2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rejects_a_conversation_with_raw(read):
    with pytest.raises(InvalidArgumentError, match="turns is a conversation, which --raw does not"):
        read({"turns": ["a"]}, chat=False)


def test_rejects_token_ids_with_chat(read):
    with pytest.raises(InvalidArgumentError, match="token ids, which --chat does not send"):
        read({"prompt": [1]}, chat=True)


def test_rejects_a_file_without_a_prompt(read):
    with pytest.raises(InvalidArgumentError, match=r"p\.jsonl has no prompt"):
        read("", " ")


def test_rejects_a_file_that_is_not_utf_8(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(
        InvalidArgumentError, match=r"p\.jsonl is not UTF-8: byte 0xff at offset 12"
    ):
        read_questions([], path, SAMPLING, chat=None)


def test_rejects_an_argument_that_is_not_utf_8():
    with pytest.raises(
        InvalidArgumentError, match="the prompt is not UTF-8: byte 0xff at offset 1"
    ):
        read_questions(["a\udcff"], None, SAMPLING, chat=None)


def test_titles_are_one_short_line():
    question = Question("x", SamplingParams(), prompt="many\n words " * 30)
    assert question.title.startswith("[x] many words many")
    assert len(question.title) <= 74
    assert question.title.endswith("…")
