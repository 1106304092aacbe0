"""Sampling parameters: vLLM's defaults, every refusal, and what a model makes of them."""

import dataclasses
import math

import numpy as np
import pytest
from extkv.errors import InvalidArgumentError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import MAX_LOGPROBS, SamplingParams, request_seed
from hypothesis import assume, given
from hypothesis import strategies as st

NAN, INF = math.nan, math.inf
WORDS = {"bad": [3], " bad": [4], "worse": [5, 6], " worse": [5, 9], "long": [7, 8], " long": [9]}
LIMITS = ModelLimits(vocab_size=10, max_model_len=100, eos_token_ids=(0, 1), encode=WORDS.get)


def resolve(num_prompt_tokens=20, limits=LIMITS, **fields):
    params = SamplingParams(**fields)
    return resolve_sampling_params(params, limits, num_prompt_tokens=num_prompt_tokens)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    numbers = (params.n, params.temperature, params.top_p, params.top_k, params.min_p)
    assert numbers == (1, 1.0, 1.0, 0, 0.0)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.skip_special_tokens, params.detokenize) == (True, True)
    assert (params.ignore_eos, params.include_stop_str_in_output) == (False, False)
    assert (params.logit_bias, params.allowed_token_ids) == (None, None)


REFUSED = [
    ("n", 0, "at least 1"),
    ("n", 1.5, "integer"),
    ("n", True, "integer"),
    ("presence_penalty", -2.1, "at least -2 and at most 2"),
    ("presence_penalty", 2.1, "at least -2 and at most 2"),
    ("presence_penalty", NAN, "finite"),
    ("frequency_penalty", 3, "at least -2 and at most 2"),
    ("frequency_penalty", -INF, "finite"),
    ("frequency_penalty", "1", "number"),
    ("repetition_penalty", 0, "more than 0"),
    ("repetition_penalty", -1.0, "more than 0"),
    ("repetition_penalty", INF, "finite"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", NAN, "finite"),
    ("temperature", INF, "finite"),
    ("temperature", 1e39, "at most 3.4"),
    ("temperature", None, "number"),
    ("temperature", False, "number"),
    ("top_p", 0, "more than 0 and at most 1"),
    ("top_p", 1.1, "more than 0 and at most 1"),
    ("top_p", NAN, "finite"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.0, "integer"),
    ("min_p", -0.1, "at least 0 and at most 1"),
    ("min_p", 1.1, "at least 0 and at most 1"),
    ("seed", 2**64, "from -9223372036854775808 to 18446744073709551615"),
    ("seed", -(2**63) - 1, "from"),
    ("seed", "1", "integer"),
    ("stop", [""], "non-empty"),
    ("stop", "", "non-empty"),
    ("stop", [5], "strings"),
    ("stop", 5, "sequence"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", ["1"], "integer"),
    ("ignore_eos", 1, "True or False"),
    ("detokenize", None, "True or False"),
    ("skip_special_tokens", "no", "True or False"),
    ("include_stop_str_in_output", 0, "True or False"),
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most max_tokens 16"),
    ("logprobs", -1, "from 0 to 20"),
    ("logprobs", MAX_LOGPROBS + 1, "from 0 to 20"),
    ("prompt_logprobs", -1, "from 0 to 20"),
    ("prompt_logprobs", MAX_LOGPROBS + 1, "from 0 to 20"),
    ("bad_words", [""], "non-empty"),
    ("bad_words_token_ids", [[]], "at least one token"),
    ("bad_words_token_ids", [[-1]], "at least 0"),
    ("bad_words_token_ids", [3], "sequence"),
    ("logit_bias", {-1: 0.0}, "at least 0"),
    ("logit_bias", {"1": 0.0}, "integer"),
    ("logit_bias", {1: NAN}, "finite"),
    ("logit_bias", {1: INF}, "finite"),
    ("logit_bias", [1], "mapping"),
    ("allowed_token_ids", [], "at least one token"),
    ("allowed_token_ids", [-1], "at least 0"),
    ("structured_outputs", {"regex": "a"}, "StructuredOutputsParams"),
]


@pytest.mark.parametrize(
    ("field", "value", "limit"), REFUSED, ids=[f"{name}={value!r}" for name, value, _ in REFUSED]
)
def test_refusals_name_field_value_and_limit(field, value, limit):
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field)
    assert " is " in message
    assert limit in message


def test_several_greedy_outputs_are_refused():
    with pytest.raises(InvalidArgumentError, match="n is 2, expected 1 with greedy temperature 0"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=0.5).n == 2


def test_stop_strings_without_text_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"stop is .* detokenize False"):
        SamplingParams(stop=["x"], detokenize=False)


def test_every_field_has_a_refusal():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == {name for name, _, _ in REFUSED}


def test_limits_themselves_are_accepted():
    params = SamplingParams(
        top_p=1,
        min_p=1,
        top_k=-1,
        presence_penalty=-2,
        frequency_penalty=2,
        logprobs=0,
        prompt_logprobs=MAX_LOGPROBS,
        min_tokens=16,
        seed=2**64 - 1,
    )
    assert params.seed == 2**64 - 1


def test_integers_and_numbers_of_numpy_are_accepted():
    params = SamplingParams(top_k=np.int64(3), top_p=np.float32(0.5), stop_token_ids=np.array([4]))
    assert params.stop_token_ids == (4,)


def test_one_stop_string_stands_for_itself_and_lists_become_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words=["a"]).bad_words == ("a",)


def test_parameters_are_frozen_and_own_their_lists():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 5.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_seed_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=1.1e-5).is_greedy


def test_max_tokens_none_is_what_fits():
    assert resolve(max_tokens=None).max_tokens == 80
    assert resolve(max_tokens=200).max_tokens == 80
    assert resolve(max_tokens=7).max_tokens == 7


def test_min_tokens_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgumentError, match="min_tokens is 81, expected at most the 80"):
        resolve(min_tokens=81, max_tokens=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [10]},
        {"allowed_token_ids": [1, 10]},
        {"logit_bias": {10: 1.0}},
        {"bad_words_token_ids": [[1, 10]]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_tokens_out_of_range_are_refused(fields):
    name = next(iter(fields))
    with pytest.raises(InvalidArgumentError, match=f"{name} is 10, .* below vocab_size 10"):
        resolve(**fields)


def test_other_eos_tokens_are_stop_tokens_unless_eos_is_ignored():
    resolved = resolve(stop_token_ids=[5])
    assert (resolved.eos_token_id, resolved.stop_token_ids) == (0, (5, 1))
    assert resolve(stop_token_ids=[5], ignore_eos=True).stop_token_ids == (5,)


def test_every_stop_token_is_late_with_min_tokens():
    assert resolve(stop_token_ids=[5], min_tokens=2).late_token_ids == (5, 0, 1)
    assert resolve(stop_token_ids=[5]).late_token_ids == ()


def test_a_model_without_eos_has_none():
    limits = dataclasses.replace(LIMITS, eos_token_ids=())
    resolved = resolve(limits=limits, min_tokens=1)
    assert (resolved.eos_token_id, resolved.late_token_ids) == (None, ())


def test_bad_words_are_bad_within_and_before_a_text():
    assert resolve(bad_words=["bad"]).bad_sequences == ((3,), (4,))
    # The spaced form begins with the same token, or is of another length.
    assert resolve(bad_words=["worse"]).bad_sequences == ((5, 6),)
    assert resolve(bad_words=["long"]).bad_sequences == ((7, 8),)
    assert resolve(bad_words_token_ids=[[3], [3]], bad_words=["bad"]).bad_sequences == ((3,), (4,))


def test_bad_words_need_a_tokenizer_and_tokens():
    with pytest.raises(InvalidArgumentError, match=r"bad_words .* without a tokenizer"):
        resolve(limits=dataclasses.replace(LIMITS, encode=None), bad_words=["bad"])
    with pytest.raises(InvalidArgumentError, match=r"bad_words is 'bad', .* at least one token"):
        resolve(limits=dataclasses.replace(LIMITS, encode=lambda _: []), bad_words=["bad"])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"allowed_token_ids": [3, 4], "bad_words": ["bad"]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [0, 0, 5], "stop_token_ids": [5], "min_tokens": 1},
            "allowed_token_ids",
        ),
        ({"bad_words_token_ids": [[token_id] for token_id in range(10)]}, "bad_words"),
    ],
    ids=["bad words", "early stops", "all bad"],
)
def test_requests_that_may_choose_nothing_are_refused(fields, name):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is .*all excluded"):
        resolve(**fields)


def test_requests_that_may_choose_something_are_not():
    assert resolve(allowed_token_ids=[0, 2], min_tokens=1).params.min_tokens == 1
    assert resolve(allowed_token_ids=[0]).params.allowed_token_ids == (0,)


def test_seeds_of_outputs_follow_one_another():
    params = SamplingParams(seed=5)
    assert [request_seed(params, index=index) for index in range(3)] == [5, 6, 7]
    assert request_seed(params, engine_seed=1, request_id="a") == 5
    assert request_seed(SamplingParams(seed=2**64 - 1)) == -1
    assert request_seed(SamplingParams(seed=2**63 - 1), index=1) == -(2**63)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100))
def test_seeds_fit_64_bits_and_agree_modulo_2_64(seed, index):
    assume(seed != -1)
    found = request_seed(SamplingParams(seed=seed), index=index)
    assert -(2**63) <= found < 2**63
    assert (found - seed - index) % 2**64 == 0


def test_seeds_without_a_seed_depend_on_engine_request_and_index():
    params = SamplingParams()
    seeds = {
        request_seed(params, index=index, engine_seed=engine_seed, request_id=request_id)
        for index in range(4)
        for engine_seed in range(4)
        for request_id in ("0", "1", "11", "")
    }
    assert len(seeds) == 64
    assert request_seed(params, request_id="x") == request_seed(params, request_id="x")
