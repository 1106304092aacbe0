"""Structured outputs in the engine: texts keep their structure, whatever else happens."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.errors import GrammarError, UnsupportedRequestError
from extkv.structured_outputs.matcher import TokenMatcher
from extkv.structured_outputs.params import StructuredOutputsParams
from support.constrained import constrained, knowing_drafter, tiny_loaded
from support.engines import assert_idle, tokens_of
from support.plain_cache import PlainCache
from support.schedules import RandomSchedule
from support.tiny_bigrams import NUM_DRAFTS, engine

if TYPE_CHECKING:
    from extkv.sampling_params import SamplingParams

VOCAB_SIZE = 95
EOS = 94
SCHEMA = {
    "type": "object",
    "properties": {
        "k": {"type": "integer", "minimum": 0, "maximum": 99},
        "v": {"enum": ["x", "y"]},
    },
    "required": ["k", "v"],
    "additionalProperties": False,
}
# Loose ones, of whose drafts many stand, and tight ones, of which few do.
REGEXES = ["[!-}]*", "[^a-m]+", "([a-z]|[0-9] ){3,9}", "[0-9]{4}-[0-9]{2}", "(ab|cd)+", "[!-Z]{5}"]
CONSTRAINTS = [
    *({"regex": regex} for regex in REGEXES),
    {"choice": ["alpha", "alphabet", "beta"]},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"grammar": 'start: "<" A* ">"\nA: /[a-z]{2}/'},
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [33, 30, 17, 16, 15, 7, 2, 1, 5]
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def requests(**fields) -> list[SamplingParams]:
    return [constrained(constraint, **fields) for constraint in CONSTRAINTS]


def generate(llm: LLM, params=None, asked=None):
    params = requests() if params is None else params
    return llm.generate(asked or prompts()[: len(params)], params, use_tqdm=False)


def assert_structured(output, constraint) -> None:
    """Check one output; one that a length limit cut is the beginning of a right one."""
    one = output.outputs[0]
    assert one.finish_reason in {"stop", "length"}
    if "regex" in constraint and one.finish_reason == "stop":
        assert re.fullmatch(constraint["regex"], one.text), one.text
    if "choice" in constraint:
        assert one.text in constraint["choice"]
    if "json" in constraint:
        value = json.loads(one.text)
        assert value.keys() == {"k", "v"}
        assert 0 <= value["k"] <= 99
    if "grammar" in constraint and one.finish_reason == "stop":
        assert re.fullmatch("<([a-z]{2})*>", one.text)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small tensors: one thread is faster than two that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded(VOCAB_SIZE)


@pytest.fixture(scope="module")
def drafter(loaded):
    return knowing_drafter(loaded)


@pytest.fixture(scope="module")
def expected(loaded):
    return tokens_of(generate(engine(loaded)))


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_every_text_keeps_its_structure(loaded, drafter, temperature, has_drafts):
    llm = engine(loaded, drafter if has_drafts else None)
    for seed in range(3):
        outputs = generate(llm, requests(temperature=temperature, seed=seed, max_tokens=40))
        for output, constraint in zip(outputs, CONSTRAINTS, strict=True):
            assert_structured(output, constraint)
        assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 4
    assert_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 9},
        {"async_scheduling": True},
        {"max_num_seqs": 2, "max_num_batched_tokens": 10},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "preemption", "async", "chunked", "no-prefix-cache"],
)
@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_greedy_text_is_the_same_however_it_is_computed(
    loaded, drafter, expected, options, has_drafts
):
    llm = engine(loaded, drafter if has_drafts else None, **options)
    assert tokens_of(generate(llm)) == expected
    if "num_gpu_blocks_override" in options:
        assert llm.engine.scheduler.stats().num_preemptions > 0
    if has_drafts:
        counts = llm.draft_counts
        assert counts is not None
        # Some windows stand as a whole, some break off.
        assert 0 < counts.num_accepted[-1] < counts.num_accepted[0] < counts.num_drafted[0]
    assert_idle(llm)
    assert tokens_of(generate(llm)) == expected


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
def test_every_method_keeps_greedy_text(loaded, drafter, expected, method, drawn):
    speculative = {"rejection_sample_method": method, "draft_sample_method": drawn}
    llm = engine(loaded, drafter, speculative=speculative)
    assert tokens_of(generate(llm)) == expected


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["in-step", "async"])
def test_windows_of_different_lengths_keep_greedy_text(loaded, drafter, expected, options):
    llm = engine(loaded, drafter, **options)
    schedule = RandomSchedule(NUM_DRAFTS, seed=4)
    llm.engine.drafting.schedule = schedule
    assert tokens_of(generate(llm)) == expected
    assert len(set(schedule.lens_seen)) == NUM_DRAFTS + 1
    assert schedule.num_resumed > 0
    assert_idle(llm)


def test_synthetic_acceptance_takes_no_draft_that_the_grammar_forbids(loaded, drafter):
    speculative = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 1.0, 1.0],
    }
    llm = engine(loaded, drafter, speculative=speculative)
    for output, constraint in zip(generate(llm), CONSTRAINTS, strict=True):
        assert_structured(output, constraint)
    counts = llm.draft_counts
    assert counts is not None
    assert 0 < sum(counts.num_accepted) < sum(counts.num_drafted)


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_requests_without_a_structure_are_not_changed_by_those_with_one(
    loaded, drafter, has_drafts
):
    llm = engine(loaded, drafter if has_drafts else None)
    free = constrained(None, ignore_eos=True)
    alone = tokens_of(generate(llm, [free] * 3))
    mixed = [requests()[0], free, requests()[3], free, requests()[5], free]
    order = [prompts()[index] for index in (0, 0, 3, 1, 5, 2)]
    found = tokens_of(generate(llm, mixed, order))
    assert found[1::2] == alone


def test_outputs_of_one_request_follow_their_own_text(loaded, drafter):
    params = constrained({"regex": "[a-z]{3}[0-9]{3}"}, n=5, temperature=2.0, seed=3)
    (plain,) = generate(engine(loaded), [params])
    llm = engine(loaded, drafter, num_gpu_blocks_override=10, async_scheduling=True)
    (found,) = generate(llm, [params])
    for output in (plain, found):
        texts = [one.text for one in output.outputs]
        assert all(re.fullmatch("[a-z]{3}[0-9]{3}", text) for text in texts)
        assert len(set(texts)) > 1


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_what_ends_a_text_among_accepted_drafts_ends_it(loaded, drafter, has_drafts):
    llm = engine(loaded, drafter if has_drafts else None)
    loose = {"regex": "[!-}]{8,}"}
    (free,) = generate(llm, [constrained(loose, ignore_eos=True)])
    text = free.outputs[0].text
    stops = [text[5], text[7]]
    params = [
        constrained(loose, stop=[stops[0]]),
        constrained(loose, stop_token_ids=[ord(stops[1]) - 32]),
        constrained({"regex": "[!-}]{6}"}),
        constrained({"regex": "[!-}]{6}"}, stop_token_ids=[0]),
    ]
    found = [output.outputs[0] for output in generate(llm, params, [prompts()[0]] * 4)]
    assert found[0].text == text[: text.index(stops[0])]
    assert found[0].stop_reason == stops[0]
    assert found[1].text == text[: text.index(stops[1])]
    assert found[1].stop_reason == ord(stops[1]) - 32
    assert [len(one.text) for one in found[2:]] == [6, 6]
    assert all(one.finish_reason == "stop" for one in found)
    assert_idle(llm)


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_ends_repeat_where_the_text_is_over_and_the_output_is_not(loaded, drafter, has_drafts):
    llm = engine(loaded, drafter if has_drafts else None)
    two = {"regex": "[0-9]{2}"}
    params = [constrained(two, ignore_eos=True, max_tokens=9), constrained(two, min_tokens=7)]
    ignored, early = (list(output.outputs[0].token_ids) for output in generate(llm, params))
    assert (len(ignored), set(ignored[2:])) == (9, {EOS})
    # The first that counts is the seventh.
    assert (len(early), set(early[2:])) == (7, {EOS})


def test_log_probabilities_are_those_before_the_mask(loaded):
    llm = engine(loaded)
    (output,) = generate(llm, [constrained({"regex": "[0-9]{3}"}, logprobs=2)])
    one = output.outputs[0]
    assert one.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids) == 4
    assert any(
        entry[token].rank > 1 for entry, token in zip(one.logprobs, one.token_ids, strict=True)
    )


BAD = [
    ({"regex": "[0-9"}, GrammarError, "unclosed character class"),
    ({"json": {"type": "thing"}}, GrammarError, "Invalid type: thing"),
    ({"grammar": "start: foo"}, GrammarError, "unknown name"),
    ({"structural_tag": "{}"}, UnsupportedRequestError, "structural_tag"),
]


@pytest.mark.parametrize(("constraint", "error", "words"), BAD, ids=[str(b[0]) for b in BAD])
def test_a_bad_constraint_is_refused_and_the_engine_goes_on(
    loaded, expected, constraint, error, words
):
    llm = engine(loaded)
    with pytest.raises(error, match=words):
        generate(llm, [*requests()[:2], constrained(constraint)])
    assert_idle(llm)
    assert tokens_of(generate(llm)) == expected


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["in-step", "async"])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_a_matcher_that_fails_ends_its_request_and_no_other(  # noqa: PLR0917, fixtures
    loaded, drafter, expected, monkeypatch, has_drafts, options
):
    llm = engine(loaded, drafter if has_drafts else None, **options)
    append = TokenMatcher.append

    def failing(matcher, token_ids):
        append(matcher, token_ids)
        if matcher._grammar is broken and len(matcher._token_ids) >= 3:
            matcher.fail("the lexer has too many states")

    broken = llm.grammars.compile(StructuredOutputsParams(**CONSTRAINTS[2]))
    monkeypatch.setattr(TokenMatcher, "append", failing)
    outputs = generate(llm)
    assert outputs[2].outputs[0].finish_reason == "error"
    assert outputs[2].outputs[0].error == "the lexer has too many states"
    assert outputs[1].outputs[0].error is None
    kept = list(outputs[2].outputs[0].token_ids)
    assert expected[2][: len(kept)] == kept
    others = [index for index in range(len(CONSTRAINTS)) if index != 2]
    found = tokens_of(outputs)
    assert [found[index] for index in others] == [expected[index] for index in others]
    assert_idle(llm)


def test_a_dead_end_of_the_vocabulary_ends_its_request(loaded, expected):
    llm = engine(loaded)
    outputs = generate(llm, [constrained({"regex": "[0-9]\u00e9"}), *requests()[1:]])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert tokens_of(outputs)[1:] == expected[1:]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
def test_sampled_text_follows_the_masked_law_of_the_target(method, drawn):
    """Frequencies of three tokens under a grammar, against their exact probabilities."""
    num_samples, prompt, vocab_size = 1500, [5, 2], 13
    loaded = tiny_loaded(vocab_size)
    llm = engine(
        loaded,
        knowing_drafter(loaded),
        speculative={"rejection_sample_method": method, "draft_sample_method": drawn},
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    # Letters of either kind in turn; after each of the second kind it may end.
    constraint = {"regex": "([ -#'][$-&)*])+"}
    params = [
        constrained(constraint, temperature=1.3, seed=seed, max_tokens=3)
        for seed in range(num_samples)
    ]
    outputs = llm.generate([prompt] * num_samples, params, use_tqdm=False)
    law = exact_law(loaded, prompt)
    counts = dict.fromkeys(law, 0)
    for output in outputs:
        counts[tuple(output.outputs[0].token_ids)] += 1
    assert llm.draft_counts is not None
    assert llm.draft_counts.accepted_length > 1.1
    rare = {key for key, p in law.items() if p * num_samples < 5}
    cells = [(counts[key], law[key] * num_samples) for key in law if key not in rare]
    if rare:
        mass = sum(law[key] for key in rare) * num_samples
        cells.append((sum(counts[key] for key in rare), mass))
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = len(cells) - 1
    # Wilson and Hilferty's normal approximation of the chi-squared law, p = 1e-4.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi2 < limit, f"{chi2:.1f} on {degrees} degrees, limit {limit:.1f}"


def exact_law(loaded, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Enumerate what the target writes under the letters in turn, with its probabilities."""
    turns = [[0, 1, 2, 3, 7], [4, 5, 6, 9, 10]]
    config = loaded.model.config
    end = config.vocab_size - 1
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(3):
        longer = {text: mass for text, mass in law.items() if text[-1:] == (end,)}
        for text, mass in law.items():
            if text in longer:
                continue
            feed = torch.tensor([*prompt, *text])
            hidden = loaded.model.forward(feed, torch.arange(len(feed)), PlainCache(config))
            logits = loaded.model.compute_logits(hidden[-1:])[0].double() / 1.3
            may_follow = torch.zeros(config.vocab_size, dtype=torch.bool)
            may_follow[turns[place % 2] + ([end] if place == 2 else [])] = True
            probabilities = logits.masked_fill(~may_follow, -torch.inf).softmax(0)
            for token in may_follow.nonzero()[:, 0].tolist():
                longer[(*text, token)] = mass * float(probabilities[token])
        law = longer
    return law


@pytest.fixture(scope="module")
def smollm2(model_path):
    llm = LLM(model_path, device="cpu", max_model_len=256)
    yield llm
    llm.close()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_smollm2_writes_what_is_asked(smollm2, temperature):
    kinds = [
        {"json": PERSON, "whitespace_pattern": "[ ]?"},
        {"json": json.dumps(PERSON), "disable_any_whitespace": True},
        {"regex": r"\+[0-9]{2} [0-9]{3}-[0-9]{4}"},
        {"choice": ["Positive", "Negative", "I do not know."]},
        {"grammar": 'start: SUM " = " NUM\nSUM: NUM (" + " NUM){1,3}\nNUM: /[0-9]{1,3}/'},
        {"grammar": 'root ::= "yes" | "no"'},
        {"json_object": True, "disable_any_whitespace": True},
    ]
    params = [constrained(kind, temperature=temperature, seed=1, max_tokens=60) for kind in kinds]
    asked = ["Describe a person as JSON:\n"] * len(kinds)
    outputs = [output.outputs[0] for output in smollm2.generate(asked, params, use_tqdm=False)]
    texts = [output.text for output in outputs]
    # Any object may be as long as it likes.
    assert {output.finish_reason for output in outputs[:-1]} == {"stop"}
    for text in texts[:2]:
        person = json.loads(text)
        assert person.keys() == {"name", "age", "likes"}
        assert 0 <= person["age"] <= 120
    assert texts[1] == json.dumps(json.loads(texts[1]), separators=(",", ":"), ensure_ascii=False)
    assert re.fullmatch(r"\+[0-9]{2} [0-9]{3}-[0-9]{4}", texts[2])
    assert texts[3] in kinds[3]["choice"]
    assert re.fullmatch(r"[0-9]{1,3}( \+ [0-9]{1,3}){1,3} = [0-9]{1,3}", texts[4])
    assert texts[5] in {"yes", "no"}
    assert texts[6].startswith("{")
    if outputs[6].finish_reason == "stop":
        assert isinstance(json.loads(texts[6]), dict)
