"""What a request may ask of its text's structure, and what is refused, with the reason."""

from __future__ import annotations

import json
import threading

import llguidance
import pytest
from extkv.errors import GrammarError, InvalidArgumentError, UnsupportedRequestError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams
from extkv.structured_outputs import compiler as compiling
from extkv.structured_outputs.compiler import GrammarCompiler, guarded
from extkv.structured_outputs.params import MAX_CONSTRAINT_BYTES, StructuredOutputsParams
from support.grammars import COMPILER, EOS, VOCAB_SIZE, ids, masks_of, matcher_of
from support.letter_tokenizer import LetterTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
CLOSED = {"json": SCHEMA, "disable_additional_properties": True}


def takes(constraint: dict, text: str) -> bool:
    """Whether a text is complete under a constraint."""
    matcher = matcher_of(constraint)
    matcher.append([*ids(text), EOS])
    return matcher.failure is None


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": SCHEMA}, ['{"a": 3}', '{"a":-12,"b":"x","c":[]}'], ['{"b":"x"}', '{"a":"3"}']),
        ({"json": json.dumps(SCHEMA)}, ['{"a": 3}'], ['{"a": true}', "3"]),
        ({"json": "true"}, ['{"a": 3}', "[]", "-1.5", "null"], ["{]", "x"]),
        (CLOSED, ['{"a":3,"b":"y"}'], ['{"a":3,"c":1}']),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":3}'], ['{"a": 3}']),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]{0,1}"}, ['{"a": 3}'], ['{"a":  3}']),
        ({"json_object": True}, ["{}", '{"z":[1,{"y":null}]}'], ["[]", "1"]),
        ({"regex": "[0-9]{3}-[a-f]+"}, ["123-abc"], ["12-a", "123-", "123-g"]),
        ({"regex": "^ab$"}, ["ab"], ["aab", "a"]),
        ({"choice": ["yes", "no", "no more"]}, ["yes", "no", "no more"], ["n", "maybe", "nom"]),
        ({"choice": ['a"b\\c', "d|e/f"]}, ['a"b\\c', "d|e/f"], ["a", "d", "d|e"]),
        ({"choice": ["", "x"]}, ["", "x"], ["xx"]),
        ({"grammar": 'start: "<" W ">"\nW: /[a-z]{1,3}/'}, ["<abc>"], ["<>", "<abcd>"]),
        ({"grammar": 'root ::= "a" | "b" root'}, ["a", "bba"], ["ab", "b"]),
    ],
)
def test_each_kind_takes_its_texts_and_no_others(constraint, good, bad):
    assert all(takes(constraint, text) for text in good)
    assert not any(takes(constraint, text) for text in bad)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no constraint, expected exactly one of json, regex"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice, expected exactly one"),
        ({"json": 3}, "json is 3, expected a JSON schema"),
        ({"json": ""}, "json is '', expected a text that is not empty"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": 5}, "regex is 5"),
        ({"grammar": "\ud800"}, r"lone surrogate U\+D800 at 0"),
        ({"choice": []}, "choice is .*, expected a list of at least one text"),
        ({"choice": "ab"}, "choice is 'ab'"),
        ({"choice": [1]}, "choice is 1, expected texts"),
        ({"choice": ["\udfff"]}, "lone surrogate"),
        ({"json_object": False}, "json_object is False, expected True"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace is 1"),
        ({"json": "{}", "whitespace_pattern": 2}, "whitespace_pattern is 2"),
        ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "has 131073 bytes, expected at most 131072"),
    ],
)
def test_parameters_that_can_never_work_are_refused(fields, words):
    with pytest.raises(InvalidArgumentError, match=words):
        StructuredOutputsParams(**fields)


def test_fields_of_a_mapping_are_checked_and_a_front_end_s_own_passed_over():
    found = StructuredOutputsParams.from_fields({"regex": "a", "_backend": "xgrammar"})
    assert found == StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidArgumentError, match=r"'regexp' is no field .* known: json, regex"):
        StructuredOutputsParams.from_fields({"regexp": "a"})


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": "{"}, "json is no JSON: Expecting property name"),
        ({"json": "[1]"}, r"json is \[1\], expected an object or a boolean"),
        ({"json": "false"}, "json is false, which no text satisfies"),
        ({"json": '{"type": "blob"}'}, "Invalid type: blob"),
        ({"json": {"not": {"type": "string"}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"type": "string", "pattern": "[0-9"}}, "unclosed character class"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "http://a/b"}}, "does not fetch"),
        ({"json": {"const": object()}}, "json is no JSON schema: Object of type object"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema: Out of range float"),
        ({"json": nested(5000)}, "json is no JSON schema: maximum recursion depth"),
        ({"json": nested(500)}, "recursion limit exceeded"),
        ({"json": "[" * 50_000}, "json is no JSON: maximum recursion depth"),
        ({"json": {"enum": ["x" * 200_000]}}, "json has 200014 bytes, expected at most 131072"),
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around, .* is not supported"),
        ({"regex": "\u00e9"}, "no token of the vocabulary can follow"),
        ({"regex": r"[^\s\S]"}, "no token of the vocabulary can follow"),
        ({"regex": "(" * 50_000}, r"\(\(\( … .*"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": 'x: "a"'}, "grammar is neither Lark nor GBNF"),
        ({"grammar": "start: <|nope|>"}, "unknown special token"),
        ({"grammar": "start: " + "(" * 50_000}, "too deeply nested"),
        ({"grammar": "start: start"}, "no token of the vocabulary can follow"),
    ],
)
def test_constraints_that_cannot_be_used_are_refused_with_the_reason(fields, words):
    with pytest.raises(GrammarError, match=words) as raised:
        COMPILER.compile(StructuredOutputsParams(**fields))
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)


def test_structural_tags_are_refused_by_name():
    with pytest.raises(UnsupportedRequestError, match="structural_tag is not supported"):
        COMPILER.compile(StructuredOutputsParams(structural_tag="{}"))


@pytest.mark.parametrize("kind", ["rules", "references"])
def test_chains_that_overflow_a_usual_stack_compile(kind):
    if kind == "rules":
        rules = [f"r{n:x}: r{n + 1:x}" for n in range(8000)]
        fields = {"grammar": "\n".join(["start: r0", *rules, 'r1f40: "!"'])}
    else:
        defs = {f"d{n:x}": {"items": {"$ref": f"#/$defs/d{n + 1:x}"}} for n in range(2500)}
        fields = {"json": {"$defs": defs | {"d9c4": {}}, "$ref": "#/$defs/d0"}}
    assert COMPILER.compile(StructuredOutputsParams(**fields))


def test_a_constraint_that_takes_too_long_is_refused(monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(compiling, "_TIME_LIMIT_S", 0.05)
    monkeypatch.setattr(compiling, "reason_of", lambda _matcher: is_over.wait(20) and None)
    try:
        with pytest.raises(GrammarError, match=r"takes more than 0\.05 s to compile"):
            COMPILER.compile(StructuredOutputsParams(regex="slow"))
    finally:
        is_over.set()


def test_a_failure_inside_the_library_is_one_of_the_request(monkeypatch):
    class Panic(BaseException):
        pass

    def panicking(*_args, **_options):
        raise Panic("index out of range")

    monkeypatch.setattr(llguidance, "LLMatcher", panicking)
    monkeypatch.setattr(compiling, "to_grammar", lambda _params: "anything")
    with pytest.raises(GrammarError, match="Panic: index out of range"):
        COMPILER.compile(StructuredOutputsParams(regex="a"))


def test_without_memory_for_a_thread_the_request_is_refused(monkeypatch):
    def failing(_thread):
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(GrammarError, match="no thread with a stack of 536870912 bytes"):
        COMPILER.compile(StructuredOutputsParams(regex="unseen"))
    assert threading.stack_size() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_failure_of_a_grammar(error):
    def interrupted():
        raise error

    with pytest.raises(error):
        guarded(interrupted)


def test_equal_constraints_are_compiled_once_and_the_oldest_forgotten(monkeypatch):
    compiler = GrammarCompiler(
        LetterTokenizer(VOCAB_SIZE), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)
    )
    monkeypatch.setattr(compiling, "_MOST_KEPT", 2)
    first = compiler.compile(StructuredOutputsParams(regex="a"))
    second = compiler.compile(StructuredOutputsParams(regex="b"))
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first
    compiler.compile(StructuredOutputsParams(regex="c"))
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first
    assert compiler.compile(StructuredOutputsParams(regex="b")) is not second


def test_without_a_tokenizer_or_an_end_there_are_no_structured_outputs():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidArgumentError, match="none without a tokenizer"):
        resolve_sampling_params(params, ModelLimits(13, 10), num_prompt_tokens=1)
    endless = GrammarCompiler(LetterTokenizer(13), vocab_size=13, eos_token_ids=())
    with pytest.raises(GrammarError, match="end-of-sequence token"):
        endless.compile(StructuredOutputsParams(regex="a"))


def test_a_vocabulary_smaller_than_the_model_leaves_the_rest_out():
    compiler = GrammarCompiler(LetterTokenizer(13), vocab_size=70, eos_token_ids=(0,))
    grammar = compiler.compile(StructuredOutputsParams(regex="[ -~]+"))
    mask = int.from_bytes(grammar.matcher.deep_copy().compute_bitmask(), "little")
    assert [token for token in range(96) if mask >> token & 1] == list(range(1, 13))


def test_masks_do_not_depend_on_how_the_tokenizer_writes_a_text():
    # LetterTokenizer's `encode` gives other tokens than those with the text's bytes.
    masks = masks_of(matcher_of({"regex": "Hello"}), ids("Hello"))
    assert [masks.words[place].tolist() for place in range(5)] == [
        [1 << token - word * 32 if word * 32 <= token < word * 32 + 32 else 0 for word in range(3)]
        for token in ids("Hello")
    ]
