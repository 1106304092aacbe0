"""Text of one output: whole characters, stop strings across tokens, what is held back."""

import itertools

import pytest
from extkv.models.tokenizer import IncrementalDetokenizer
from extkv.output_text import OutputText
from extkv.outputs import CompletionOutput, Logprob, RequestMetrics, RowLogprobs
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams
from hypothesis import given
from hypothesis import strategies as st

LIMITS = ModelLimits(vocab_size=1000, max_model_len=1000)


class Pieces:
    """A tokenizer whose token `i` is the i-th piece."""

    def __init__(self, pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def start(pieces, **fields):
    resolved = resolve_sampling_params(SamplingParams(**fields), LIMITS, num_prompt_tokens=1)
    return OutputText(IncrementalDetokenizer(Pieces(pieces)), resolved)


def write(pieces, **fields):
    """Feed the pieces and return the text, the stop string, and what each step released."""
    text = start(pieces, **fields)
    seen, stop = [""], None
    for token_id in range(len(pieces)):
        stop = text.push(token_id)
        seen.append(text.text)
        if stop is not None:
            break
    seen.append(text.finish())
    taken = []
    for before, after in itertools.pairwise(seen):
        # Text is only ever appended to.
        assert after.startswith(before)
        taken.append(after[len(before) :])
    return text.text, stop, taken


@pytest.mark.parametrize("stop", [["lo", "ell"], ["ell", "lo"]], ids=str)
def test_b47_the_stop_string_complete_first_wins_whatever_the_order(stop):
    assert write(["hello"], stop=stop)[:2] == ("h", "ell")


@pytest.mark.parametrize("stop", list(itertools.permutations(["bc", "abcd", "abc"])), ids=str)
@pytest.mark.parametrize("pieces", [["xabcd"], ["xa", "bcd"], ["x", "a", "b", "c", "d"]], ids=str)
def test_of_stop_strings_that_end_together_the_longest_wins(pieces, stop):
    assert write(pieces, stop=stop)[:2] == ("x", "abc")


def test_stop_strings_are_found_across_tokens():
    assert write(["one s", "t", "op two"], stop="stop")[:2] == ("one ", "stop")


def test_the_stop_string_stays_in_the_text_if_asked_for():
    fields = {"stop": "stop", "include_stop_str_in_output": True}
    text, stop, taken = write(["one s", "t", "op two"], **fields)
    assert (text, stop) == ("one stop", "stop")
    assert taken == ["one s", "t", "op", ""]


def test_text_that_may_begin_a_stop_string_is_held_back():
    _, _, taken = write(["a", "s", "t", "x", "st"], stop=["stop"])
    assert taken == ["a", "", "", "stx", "", "st"]


def test_no_text_is_held_back_without_need():
    assert write(["stone", "b"], stop=["stop"])[2] == ["stone", "b", ""]
    assert write(["a", "s", "t"])[2] == ["a", "s", "t", ""]


def test_a_stop_string_may_begin_within_another_try():
    assert write(["a", "a", "b"], stop="ab")[:2] == ("a", "ab")
    assert write(["a", "b", "a", "b", "a", "c"], stop="abac")[:2] == ("ab", "abac")


def test_characters_are_never_halved():
    snowman = "☃".encode()
    text, _, taken = write([b"x" + snowman[:1], snowman[1:2], snowman[2:] + b"y"])
    assert taken == ["x", "", "☃y", ""]
    assert text == "x☃y"


def test_an_incomplete_character_at_the_end_is_a_replacement_character():
    assert write([b"x", "é".encode()[:1]])[2] == ["x", "", "\ufffd"]


def test_a_stop_string_of_halved_characters_is_found():
    word = "é☃".encode()
    assert write([b"a" + word[:1], word[1:3], word[3:] + b"b"], stop="é☃")[:2] == ("a", "é☃")


def test_nothing_follows_a_stop_string_not_even_half_a_character():
    assert write([b"end" + "é".encode()[:1]], stop="end")[:2] == ("", "end")


def test_stop_strings_within_min_tokens_are_text():
    assert write(["stop", "a", "stop"], stop="stop", min_tokens=1)[:2] == ("stopa", "stop")
    assert write(["stop", "a"], stop="stop", min_tokens=1) == ("stopa", None, ["stop", "a", ""])


def test_a_stop_string_may_begin_within_min_tokens():
    assert write(["st", "op"], stop="stop", min_tokens=1)[:2] == ("", "stop")
    assert write(["st", "op"], stop="stop", min_tokens=2)[:2] == ("stop", None)


@pytest.mark.parametrize(("keeps", "expected"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token_counts_only_if_asked_for(keeps, expected):
    text = start(["a", "b"], include_stop_str_in_output=keeps)
    text.push(0)
    assert text.push(1, is_stop_token=True) is None
    assert text.finish() == expected


def test_text_held_back_comes_when_a_stop_token_ends_the_output():
    text = start(["st", "</s>"], stop="stop")
    assert text.push(0) is None
    assert text.text == ""
    text.push(1, is_stop_token=True)
    assert text.finish() == "st"


def test_without_a_detokenizer_there_is_no_text():
    resolved = resolve_sampling_params(
        SamplingParams(detokenize=False), LIMITS, num_prompt_tokens=1
    )
    text = OutputText(None, resolved)
    assert text.push(5) is None
    assert (text.text, text.finish()) == ("", "")


def test_an_empty_output_has_an_empty_text():
    assert write([])[:2] == ("", None)


def test_the_text_of_an_aborted_output_can_be_finished_twice():
    text = start(["st"], stop="stop")
    text.push(0)
    assert (text.finish(), text.finish()) == ("st", "st")


def naive(text, ends, stops, min_tokens, *, keeps):
    """Search the whole text: the first place where a stop string ends, past the early tokens."""
    first = ends[min_tokens - 1] if min_tokens else 0
    for end in range(first + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if keeps else text[: end - len(stop)], stop
    return text, None


LETTERS = st.text("ab☃", min_size=1, max_size=4)


@given(
    pieces=st.lists(st.text("ab☃", max_size=4), max_size=12),
    stops=st.lists(LETTERS, max_size=3),
    min_tokens=st.integers(0, 4),
    keeps=st.booleans(),
)
def test_text_is_that_of_a_search_over_the_whole_text(pieces, stops, min_tokens, keeps):
    found = write(pieces, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=keeps)
    ends = list(itertools.accumulate(map(len, pieces)))
    if min_tokens >= len(pieces):
        expected = ("".join(pieces), None)
    else:
        expected = naive("".join(pieces), ends, stops, min_tokens, keeps=keeps)
    assert found[:2] == expected


@given(text=st.text("ab☃", max_size=20), stops=st.lists(LETTERS, max_size=3), data=st.data())
def test_text_does_not_depend_on_how_it_falls_into_tokens(text, stops, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))))
    pieces = [encoded[a:b] for a, b in itertools.pairwise([0, *cuts, len(encoded)])]
    assert write(pieces, stop=stops)[:2] == write([encoded], stop=stops)[:2]


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_beginnings_of_stop_strings_are_held_back(pieces, stops):
    text = start(pieces, stop=stops)
    for token_id in range(len(pieces)):
        if text.push(token_id) is not None:
            return
        whole = "".join(pieces[: token_id + 1])
        held = whole[len(text.text) :]
        assert whole.startswith(text.text)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        # Nothing more could have been held back.
        longer = whole[max(0, len(text.text) - 1) :]
        assert len(longer) == len(held) or not any(stop.startswith(longer) for stop in stops)


def test_logprob_entries_have_the_chosen_token_first_and_share_ranks():
    row = RowLogprobs(7, -2.0, 4, [5, 3, 9], [-0.5, -0.5, -1.5])
    entry = row.to_entry(str)
    assert list(entry) == [7, 5, 3, 9]
    assert entry[7] == Logprob(-2.0, 4, "7")
    assert [entry[token_id].rank for token_id in (5, 3, 9)] == [1, 1, 3]


def test_a_chosen_token_among_the_likeliest_is_listed_once():
    entry = RowLogprobs(3, -0.5, 1, [5, 3], [-0.5, -0.5]).to_entry()
    assert entry == {3: Logprob(-0.5, 1), 5: Logprob(-0.5, 1)}


def test_outputs_are_finished_when_they_have_a_reason():
    assert not CompletionOutput(0).finished()
    assert CompletionOutput(0, finish_reason="length").finished()


def test_metrics_are_differences_of_times():
    metrics = RequestMetrics(arrival_s=1.0)
    assert (metrics.queue_s, metrics.prefill_s, metrics.decode_s) == (None, None, None)
    metrics.first_scheduled_s = 1.5
    metrics.add_token(3.5)
    metrics.add_token(7.5)
    assert (metrics.queue_s, metrics.prefill_s, metrics.decode_s) == (0.5, 2.0, 4.0)
