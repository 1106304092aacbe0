"""Parts of a served engine on their own: sampling parameters, log-probabilities, load."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from extkv.dspark.verification import DraftCounts
from extkv.errors import InvalidArgumentError, UnsupportedRequestError
from extkv.outputs import RowLogprobs
from extkv.resolved_sampling import ModelLimits
from extkv.serve.outputs import pack_logprobs
from extkv.serve.sampling import fit_sampling
from extkv.serve.stats import Load, LoadStats

LIMITS = ModelLimits(vocab_size=100, max_model_len=64)


def fit(**wire):
    return fit_sampling(wire, LIMITS, num_prompt_tokens=10)


def test_front_ends_have_said_what_stops_a_request():
    found = fit(
        stop=["no"],
        ignore_eos=True,
        stop_token_ids=[5, 6],
        _eos_token_id=2,
        _all_stop_token_ids=[2, 5, 6, 7],
        min_tokens=3,
        max_tokens=None,
    )
    assert found.stop == ()
    assert found.eos_token_id == 2
    assert found.stop_token_ids == (5, 6)
    assert set(found.late_token_ids) == {2, 5, 6, 7}
    assert found.max_tokens == 54


def test_defaults_are_those_of_the_wire():
    found = fit()
    assert (found.max_tokens, found.eos_token_id, found.stop_token_ids) == (16, None, ())
    assert found.params.temperature == 1.0
    assert not found.params.detokenize


def test_bad_words_come_as_tokens():
    found = fit(bad_words=["x"], _bad_words_token_ids=[[1], [2, 3]])
    assert found.bad_sequences == ((1,), (2, 3))


@pytest.mark.parametrize(
    "wire",
    [
        {"thinking_token_budget": 5},
        {"repetition_detection": {"max_pattern_size": 1}},
        {"logprob_token_ids": [1]},
        {"prompt_logprobs": -1},
        {"n": 3},
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(wire):
    with pytest.raises(UnsupportedRequestError, match=next(iter(wire))):
        fit(**wire)


def test_structured_outputs_need_a_tokenizer_and_are_checked():
    with pytest.raises(InvalidArgumentError, match="structured_outputs"):
        fit(structured_outputs={"choice": ["a"]})
    with pytest.raises(InvalidArgumentError, match="'choices' is no field"):
        fit(structured_outputs={"choices": ["a"]})


def test_bad_values_are_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="top_p"):
        fit(top_p=2.0)


@hypothesis.given(st.data())
def test_log_probabilities_keep_the_order_of_the_likeliest(data):
    num_logprobs = data.draw(st.integers(0, 5))
    num_tokens = data.draw(st.integers(1, 4))
    values = np.random.default_rng(data.draw(st.integers(0, 1000))).permutation(50)
    entries, expected = [], []
    for _ in range(num_tokens):
        order = sorted(range(50), key=lambda token: -values[token])
        own = data.draw(st.integers(0, 49))
        top = order[:num_logprobs]
        row = RowLogprobs(
            own, float(values[own]), order.index(own) + 1, top, [float(values[t]) for t in top]
        )
        entries.append(row.to_entry())
        expected.append(([own, *top], order.index(own) + 1))
    arrays = pack_logprobs(entries, num_logprobs)
    ids = np.frombuffer(arrays.token_ids, np.int32).reshape(num_tokens, num_logprobs + 1)
    found = np.frombuffer(arrays.logprobs, np.float32).reshape(ids.shape)
    ranks = np.frombuffer(arrays.ranks, np.int32)
    assert arrays.num_columns == num_logprobs + 1
    assert [(row.tolist(), rank) for row, rank in zip(ids, ranks, strict=True)] == expected
    assert (found == values[ids]).all()


class Scheduler:
    """Gives the statistics that it is told to."""

    def __init__(self) -> None:
        self.tell(0, 0)

    def tell(self, num_prefixes: int, num_resumed: int) -> None:
        prefix, resumed = (
            SimpleNamespace(
                num_requests=count, num_query_tokens=10 * count, num_hit_tokens=4 * count
            )
            for count in (num_prefixes, num_resumed)
        )
        self.found = SimpleNamespace(
            num_running=1,
            num_waiting=2,
            num_free_blocks=3,
            num_blocks=4,
            prefix_cache=prefix,
            prefix_cache_resumed=resumed,
        )

    def stats(self) -> SimpleNamespace:
        return self.found


def test_gauges_are_those_of_the_last_look_and_counts_are_told_once():
    scheduler = Scheduler()
    stats = LoadStats(scheduler)
    scheduler.tell(3, 1)
    load = stats.look(num_held=5)
    assert load == Load(1, 7)
    assert stats.counts(load) == {
        "num_running_reqs": 1,
        "num_waiting_reqs": 7,
        "kv_cache_usage": 0.25,
    }
    first = stats.take(load, num_resets=1)
    assert first["prefix_cache_stats"] == {
        "reset": True,
        "requests": 3,
        "queries": 30,
        "hits": 12,
        "preempted_requests": 1,
        "preempted_queries": 10,
        "preempted_hits": 4,
    }
    assert first["spec_decoding_stats"] is None
    again = stats.take(load, num_resets=1)["prefix_cache_stats"]
    assert not any(again.values())
    scheduler.tell(4, 1)
    stats.look(0)
    assert stats.take(load, num_resets=1)["prefix_cache_stats"]["queries"] == 10


def test_drafts_are_told_once_with_every_place_of_the_block():
    counts = DraftCounts()
    stats = LoadStats(Scheduler(), counts, num_drafts=3)
    assert stats.take(Load(0, 0))["spec_decoding_stats"] is None
    counts.add(2, 1)
    counts.add(2, 2)
    assert stats.take(Load(0, 0))["spec_decoding_stats"] == {
        "num_spec_tokens": 3,
        "num_drafts": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 3,
        "num_accepted_tokens_per_pos": [2, 1, 0],
        "num_draft_tokens_per_pos": [2, 2, 0],
    }
    assert stats.take(Load(0, 0))["spec_decoding_stats"] is None
    counts.add(3, 0)
    found = stats.take(Load(0, 0))["spec_decoding_stats"]
    assert found["num_draft_tokens_per_pos"] == [1, 1, 1]
    assert found["num_accepted_tokens"] == 0
