"""Parts of a served engine on their own: sampling parameters, log-probabilities, waves, load."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from extkv.errors import InvalidArgumentError, UnsupportedRequestError
from extkv.outputs import RowLogprobs
from extkv.resolved_sampling import ModelLimits
from extkv.serve.outputs import pack_logprobs
from extkv.serve.sampling import fit_sampling
from extkv.serve.stats import REFRESH_S, Load, LoadStats
from extkv.serve.waves import WaveState

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


def test_a_request_of_a_wave_that_is_over_starts_the_current_one():
    waves = WaveState()
    assert waves.take_request(0) is None
    assert waves.is_running
    assert waves.finish() == 0
    assert waves.take_request(0) == 1
    assert waves.take_request(0) is None, "it runs already"
    waves.finish()
    assert waves.take_request(5) is None
    assert waves.wave == 5


def test_waves_are_started_by_the_coordinator_but_for_who_asked_and_old_ones():
    waves = WaveState()
    waves.start(3, is_excluded=True)
    assert (waves.wave, waves.is_running) == (3, False)
    waves.start(2, is_excluded=False)
    assert (waves.wave, waves.is_running) == (3, False)
    waves.start(3, is_excluded=False)
    assert waves.is_running


def test_the_scheduler_is_asked_now_and_then_and_counts_are_told_once():
    asked = []

    def stats():
        asked.append(1)
        count = len(asked)
        prefix = SimpleNamespace(
            num_requests=count, num_query_tokens=10 * count, num_hit_tokens=4 * count
        )
        return SimpleNamespace(num_free_blocks=3, num_blocks=4, prefix_cache=prefix)

    load = LoadStats(SimpleNamespace(stats=stats))
    load.note_step()
    first = load.take(Load(1, 2), wave=5, now_s=100.0)
    assert (first["num_running_reqs"], first["num_waiting_reqs"]) == (1, 2)
    assert (first["step_counter"], first["current_wave"]) == (1, 5)
    assert first["kv_cache_usage"] == 0.25
    assert first["prefix_cache_stats"] == {"requests": 1, "queries": 10, "hits": 4}
    second = load.take(Load(1, 2), wave=5, now_s=100.0 + REFRESH_S / 2)
    assert second["prefix_cache_stats"] == {"requests": 0, "queries": 0, "hits": 0}
    assert len(asked) == 1
    third = load.take(Load(1, 2), wave=5, now_s=100.0 + REFRESH_S)
    assert third["prefix_cache_stats"] == {"requests": 1, "queries": 10, "hits": 4}
