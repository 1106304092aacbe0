"""Which tokens may follow: along an output, along its drafts, at its end, and after a failure."""

from __future__ import annotations

import logging
import random

import llguidance.numpy
import pytest
import torch
from extkv.dspark.options import SpeculativeOptions
from extkv.dspark.verification import Verifier, Window
from extkv.engine.sampler import Sampler
from extkv.engine.sampling_slots import SlotRequest
from extkv.errors import InvalidArgumentError
from extkv.structured_outputs.masks import fill_masks
from support.grammars import EOS, VOCAB_SIZE, allowed, ids, masks_of, matcher_of, resolved, text_of

DIGITS = {"regex": "[0-9]+"}
TWO = {"regex": "[0-9]{2}"}


def test_a_mask_follows_the_output():
    matcher = matcher_of({"choice": ["abc", "abd", "x"]})
    assert allowed(masks_of(matcher)) == "ax"
    matcher.append(ids("ab"))
    assert allowed(masks_of(matcher)) == "cd"
    matcher.append(ids("d"))
    assert allowed(masks_of(matcher)) == "¶"


def test_masks_of_drafts_are_those_of_the_output_with_them():
    matcher = matcher_of({"choice": ["abc", "abd", "x"]})
    masks = masks_of(matcher, ids("abc"))
    assert [allowed(masks, place) for place in range(4)] == ["ax", "b", "cd", "¶"]
    assert masks.row_ids.tolist() == [0, 1, 2, 3]
    assert not masks.unreachable
    assert not masks.failures
    # The matcher has not moved.
    assert allowed(masks_of(matcher)) == "ax"


def test_rows_after_a_forbidden_draft_allow_everything():
    masks = masks_of(matcher_of(DIGITS), ids("1x23"))
    assert allowed(masks, 1) == "0123456789¶"
    assert masks.unreachable == {2, 3, 4}
    assert all(len(allowed(masks, place)) == VOCAB_SIZE for place in (2, 3, 4))


def test_b43_a_draft_that_the_grammar_forbids_moves_nothing(caplog, capfd):
    matcher = matcher_of(DIGITS)
    with caplog.at_level(logging.DEBUG):
        masks = masks_of(matcher, ids("1x2"))
        assert masks.unreachable == {2, 3}
        matcher.append(ids("17"))
        assert masks_of(matcher, ids("x")).unreachable == {1}
    assert allowed(masks_of(matcher)) == "0123456789¶"
    assert matcher.failure is None
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(8))
def test_looking_ahead_never_changes_what_comes(seed):
    generator = random.Random(seed)
    constraint = {"json": {"type": "object", "properties": {"a": {"type": "number"}}}}
    matcher, output = matcher_of(constraint), []
    for _ in range(30):
        drafts = [generator.randrange(VOCAB_SIZE) for _ in range(2)]
        choices = ids(allowed(masks_of(matcher, drafts)).replace("¶", ""))
        assert allowed(masks_of(matcher)) == allowed(
            masks_of(matcher_of(constraint, text_of(output)))
        )
        if not choices:
            break
        token = generator.choice(choices)
        # The first draft is right, the others are what they are.
        masks = masks_of(matcher, [token, *drafts])
        output.append(token)
        assert allowed(masks, 1) == allowed(masks_of(matcher_of(constraint, text_of(output))))
        matcher.append([token])


def test_rows_of_several_outputs_and_of_none_are_told_apart():
    one, other = matcher_of(DIGITS, "4"), matcher_of({"choice": ["ab", "b"]})
    rows = [(None, ()), (other, ()), (other, ids("a")), (None, ()), (one, ()), (one, ids("7"))]
    masks = fill_masks(rows, VOCAB_SIZE)
    assert masks.row_ids.tolist() == [1, 2, 4, 5]
    found = [allowed(masks, place) for place in range(4)]
    assert found == ["ab", "b", "0123456789¶", "0123456789¶"]


def test_several_rows_of_one_place_have_one_mask():
    matcher = matcher_of(TWO)
    masks = fill_masks([(matcher, ()), (matcher, ()), (matcher, ids("1"))], VOCAB_SIZE)
    assert [allowed(masks, place) for place in range(3)] == ["0123456789"] * 3


def test_no_rows_have_no_masks():
    masks = fill_masks([(None, ())], VOCAB_SIZE)
    assert masks.words.shape == (0, 3)
    assert masks.row_ids.tolist() == []


STOPS = {"stop_token_ids": ids("|a")}


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, "¶"), (STOPS, "a|¶"), ({"ignore_eos": True, **STOPS}, "a|"), ({"ignore_eos": True}, "¶")],
    ids=["eos", "stops", "stops-alone", "ignored"],
)
def test_a_complete_text_is_followed_by_what_ends_the_output(fields, ends):
    assert allowed(masks_of(matcher_of(TWO, "12", **fields))) == ends
    assert allowed(masks_of(matcher_of(DIGITS, "12", **fields))) == "0123456789" + ends
    masks = masks_of(matcher_of(TWO, "1", **fields), ids("2"))
    assert allowed(masks, 1) == ends


def test_after_an_end_come_ends_only_also_among_drafts():
    matcher = matcher_of(DIGITS, "1", stop_token_ids=ids("|"))
    masks = masks_of(matcher, [*ids("|"), EOS, *ids("3")])
    assert [allowed(masks, place) for place in (1, 2)] == ["|¶", "|¶"]
    assert masks.unreachable == {3}
    assert allowed(masks_of(matcher)) == "0123456789|¶"
    matcher.append([EOS])
    assert allowed(masks_of(matcher, [EOS]), 1) == "|¶"
    matcher.append(ids("|"))
    assert allowed(masks_of(matcher)) == "|¶"
    assert matcher.failure is None


def test_a_stop_token_that_the_grammar_knows_is_text():
    matcher = matcher_of({"regex": r"a\|b"}, "a", stop_token_ids=ids("|"))
    assert allowed(masks_of(matcher, ids("|")), 1) == "b"


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}], ids=["eos", "ignored"])
def test_min_tokens_hold_as_long_as_the_text_can_go_on(fields):
    early = {"min_tokens": 3, "max_tokens": 9, "stop_token_ids": ids("5")} | fields
    assert allowed(masks_of(matcher_of(DIGITS, "1", **early))) == "012346789"
    masks = masks_of(matcher_of(DIGITS, "1", **early), ids("22"))
    assert [allowed(masks, place)[-1] for place in range(3)] == ["9", "9", "9" if fields else "¶"]
    assert "5" in allowed(masks, 2)
    # Nothing but an end can follow, so it may, early as it is.
    over = {**early, "stop_token_ids": ids("|"), "min_tokens": 5}
    assert "|" in allowed(masks_of(matcher_of(TWO, "12", **over)))


def test_a_token_that_may_not_follow_is_a_failure_of_its_output():
    matcher = matcher_of(DIGITS, "12")
    matcher.append(ids("x3"))
    assert matcher.failure == "token 88 at place 2 of the output: the grammar does not allow it"
    masks = masks_of(matcher, ids("1"))
    assert masks.failures == dict.fromkeys([0, 1], matcher.failure)
    assert not masks.unreachable


def test_a_dead_end_among_drafts_is_a_failure_from_there_on_and_of_no_other():
    # After "!" nothing in the vocabulary can follow.
    matcher, other = matcher_of({"regex": "[a-c!]\u00e9|[a-c]d*"}), matcher_of(TWO)
    rows = [(matcher, ids("!d")[:n]) for n in range(3)] + [(other, ids("12")[:n]) for n in range(3)]
    masks = fill_masks(rows, VOCAB_SIZE)
    assert set(masks.failures) == {1, 2}
    assert "no token of the vocabulary can follow" in masks.failures[1]
    assert [allowed(masks, place) for place in (0, 3, 4, 5)] == ["!abc", *["0123456789"] * 2, "¶"]
    # The output itself has not failed: the draft may be rejected.
    assert matcher.failure is None
    matcher.append(ids("a"))
    assert allowed(masks_of(matcher, ids("d")), 1) == "d¶"


def test_a_panic_of_the_library_fails_the_output_it_comes_from(monkeypatch):
    class Panic(BaseException):
        pass

    good, bad = matcher_of(DIGITS), matcher_of(TWO)
    fill = llguidance.numpy.fill_next_token_bitmask

    def panicking(matcher, words, place):
        if matcher is bad.unfilled:
            raise Panic("index out of range")
        fill(matcher, words, place)

    def panicking_par(*_):
        raise Panic("somewhere")

    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", panicking)
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", panicking_par)
    masks = fill_masks([(good, ()), (bad, ())], VOCAB_SIZE)
    assert masks.failures == {1: "Panic: index out of range"}
    assert allowed(masks) == "0123456789"
    assert bad.failure == "Panic: index out of range"


def test_many_outputs_are_filled_as_each_alone():
    texts = ["", "1", "12", "123", "9" * 20]
    matchers = [matcher_of(DIGITS, text) for text in texts] + [matcher_of(TWO, "1")]
    masks = fill_masks([(matcher, ()) for matcher in matchers], VOCAB_SIZE)
    for place, matcher in enumerate(matchers):
        assert allowed(masks, place) == allowed(masks_of(matcher))


def sampler_of(*samplings) -> Sampler:
    sampler = Sampler(vocab_size=VOCAB_SIZE, num_slots=len(samplings), device=torch.device("cpu"))
    for slot, sampling in enumerate(samplings):
        sampler.enter(slot, 1, SlotRequest(sampling, prompt_token_ids=[1], seed=slot))
    return sampler


def sampled(sampler: Sampler, logits: torch.Tensor, positions: list[int]):
    slots = list(range(len(positions)))
    return sampler.sample(logits, slots, [1] * len(slots), positions).wait()


GREEDY = {"temperature": 0, "max_tokens": 9}


def test_the_likeliest_token_that_the_grammar_allows_is_chosen():
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).repeat(2, 1)
    before = logits.clone()
    sampler = sampler_of(resolved(TWO, **GREEDY), resolved({"choice": ["ab"]}, **GREEDY))
    assert sampled(sampler, logits, [1, 1]).token_ids == ids("9a")
    assert torch.equal(logits, before)
    sampler.append(0, ids("9"))
    sampler.append(1, ids("a"))
    assert sampled(sampler, logits, [2, 2]).token_ids == ids("9b")
    sampler.append(0, ids("9"))
    assert sampled(sampler, logits[:1], [3]).token_ids == [EOS]


def test_a_broken_row_fails_under_its_mask_and_a_row_without_tokens_alone():
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, 70] = torch.nan
    nothing = resolved(TWO, allowed_token_ids=ids("ab"), **GREEDY)
    found = sampled(
        sampler_of(resolved(TWO, **GREEDY), nothing, resolved(TWO, **GREEDY)), logits, [1, 1, 1]
    )
    assert found.token_ids == [None, None, ids("0")[0]]
    assert "NaN" in found.failures[0]
    assert "no token can be chosen" in found.failures[1]


def test_a_failed_matcher_fails_its_row_and_no_other():
    sampler = sampler_of(resolved(TWO, **GREEDY), resolved(TWO, **GREEDY))
    sampler.append(0, ids("x"))
    found = sampled(sampler, torch.zeros(2, VOCAB_SIZE), [2, 1])
    assert found.token_ids == [None, ids("0")[0]]
    assert "token 88 at place 0" in found.failures[0]


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_b43_at_most_one_of_the_drafts_1_x_2_is_accepted(method, temperature, caplog):
    """Digits only; the drafts were chosen, so the law of each is its own token alone."""
    params = {**GREEDY, "temperature": temperature}
    rates = (1.0,) * 3 if method == "synthetic" else None
    options = SpeculativeOptions(rejection_sample_method=method, synthetic_acceptance_rates=rates)
    sampler = sampler_of(resolved(DIGITS, **params), resolved(DIGITS, **params))
    verifier = Verifier(sampler, options, num_drafts=3)
    # The target likes what was drafted.
    logits = torch.full((8, VOCAB_SIZE), -5.0)
    for window in range(2):
        logits[range(4 * window, 4 * window + 4), ids("1x2y")] = 5.0
    windows = [Window(slot, 1, 1, 1, ids("1x2")) for slot in range(2)]
    with caplog.at_level(logging.DEBUG):
        found = verifier.verify(logits, windows, None).wait()
    assert not found.failures
    assert not caplog.records
    for window in found.windows:
        assert len(window) == 2
        assert text_of(window).isdigit()
        assert window[0] == ids("1")[0]
    for slot, window in enumerate(found.windows):
        sampler.append(slot, window)
    again = sampled(sampler, torch.zeros(2, VOCAB_SIZE), [3, 3])
    assert all(text_of([token]) in "0123456789¶" for token in again.token_ids)


def test_a_window_fails_where_it_decides_without_a_mask_and_else_not():
    # After "!" nothing in the vocabulary can follow.
    sampling = resolved({"regex": "[a-c!]\u00e9|[a-c]d*"}, **GREEDY)
    sampler = sampler_of(sampling, sampling)
    verifier = Verifier(sampler, SpeculativeOptions(), num_drafts=2)
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[0, ids("!")] = logits[3, ids("a")] = 5.0
    windows = [Window(slot, 1, 1, 1, ids("!d")) for slot in range(2)]
    found = verifier.verify(logits, windows, None).wait()
    assert "no token of the vocabulary can follow" in found.failures[0]
    assert set(found.failures) == {0}
    assert found.windows[1] == ids("a")


def test_a_position_whose_tokens_are_not_known_is_refused():
    sampler = sampler_of(resolved(TWO, **GREEDY))
    with pytest.raises(InvalidArgumentError, match="position is 2, expected 1"):
        sampled(sampler, torch.zeros(1, VOCAB_SIZE), [2])


def test_masks_of_a_large_step_are_applied_in_parts(monkeypatch):
    monkeypatch.setattr("extkv.engine.sampler._MASKED_ROWS", 2)
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).repeat(5, 1)
    sampler = sampler_of(*[resolved(TWO, **GREEDY)] * 5)
    assert sampled(sampler, logits, [1] * 5).token_ids == ids("9") * 5
