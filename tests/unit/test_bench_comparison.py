"""Medians, speed-ups and alternation of a bench."""

import json

import pytest
from extkv.bench.comparison import Comparison, Row, turns
from extkv.bench.contestants import random_prompts, share_of_equal
from extkv.bench.runs import BenchSettings
from extkv.errors import InvalidArgumentError

ROWS = (
    Row("first token", "ms", (10.0, 30.0, 20.0), (50.0, 40.0, 30.0)),
    Row("output tokens", "tokens/s", (30.0,), (20.0,), is_rate=True),
)
STARTUP = {"load": 1.5, "first token": 0.5}
RESULT = Comparison("latency", {"batch_size": 1}, STARTUP, ROWS, 0.5, {})


def test_speedup_is_of_medians_and_above_one_where_extkv_is_faster():
    assert [row.speedup for row in ROWS] == [2.0, 1.5]


def test_the_two_alternate():
    assert [order[0] for _, order in turns(4)] == ["extkv", "transformers"] * 2
    assert all(set(order) == {"extkv", "transformers"} for _, order in turns(4))


def test_table_has_ratios_and_start_up_by_phase():
    lines = RESULT.table().splitlines()
    assert lines[0] == "latency: batch_size 1"
    assert lines[3].split() == ["first", "token", "20.00", "40.00", "ms", "2.00", "x"]
    assert "same tokens in 50% of the answers" in lines
    assert lines[-1].split() == ["together", "2.00"]


def test_json_has_samples_medians_and_ratios():
    values = json.loads(RESULT.to_json())
    assert values["startup_s"] == STARTUP
    row = values["rows"][0]
    assert row["extkv"] == [10.0, 30.0, 20.0]
    assert (row["extkv_median"], row["transformers_median"], row["speedup"]) == (20.0, 40.0, 2.0)


def test_prompts_are_those_of_their_seed():
    prompts = random_prompts(3, 5, 17, seed=1)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(0 <= token_id < 17 for prompt in prompts for token_id in prompt)
    assert prompts == random_prompts(3, 5, 17, seed=1) != random_prompts(3, 5, 17, seed=2)


def test_equal_answers_are_counted_whole():
    assert share_of_equal([[1, 2], [3]], [[1, 2], [4]]) == 0.5


@pytest.mark.parametrize(
    "name", ["num_prompts", "batch_size", "input_len", "output_len", "num_rounds"]
)
def test_rejects_a_size_of_zero(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0, expected at least 1"):
        BenchSettings(**{name: 0})
