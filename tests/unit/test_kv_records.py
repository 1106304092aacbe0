"""The binding of sizing: traces and records as JSON, and which error each refusal becomes."""

from __future__ import annotations

import json

import extkv
import pytest
from extkv import _extkv

FACTS = {"bytes_per_block": 10, "num_segments": 2, "block_size": 16}


def reading(phase: str, free: int) -> dict:
    return {
        "phase": phase,
        "before": {"driver_free_bytes": free},
        "after": {"driver_free_bytes": free},
    }


def trace(**changes) -> str:
    values = {
        "device_total_bytes": 1000,
        "phases": [reading("start", 900), reading("measured", 800)],
        "committed_bytes": 0,
        "transient_peak_bytes": 50,
        "reserve_bytes": 0,
        "foreign_bytes": 0,
        "encoder_cache_bytes": 0,
        "granule_bytes": 1,
        "cache": FACTS,
        "reserved_blocks": 100,
        "max_model_len": 64,
        "gpu_memory_utilization": 0.92,
        "kv_cache_memory_bytes": None,
        "mode": "extensible",
    }
    return json.dumps({**values, **changes})


def record(**changes) -> str:
    return _extkv.size_from_trace(trace(**changes))[0]


def test_a_trace_gives_a_record_a_table_and_a_sentence():
    text, table, sentence = _extkv.size_from_trace(trace())
    plan = json.loads(text)["plan"]
    # 1000 x 0.92 - 200 used - 50 - 2, in blocks of 10.
    assert (plan["blocks"], plan["limit"]) == (66, "utilization")
    assert "66 blocks of 16 tokens" in table
    assert "66 blocks" in sentence
    assert _extkv.replay_record(text) == (text, table, sentence)


def test_ranks_take_the_minimum_and_keep_why():
    records = [record(), record(transient_peak_bytes=300), record()]
    assert _extkv.agree(records) == (41, 1)
    text, table, sentence = _extkv.limit_record(records[0], 41)
    values = json.loads(text)
    assert (values["plan"]["blocks"], values["plan"]["limit"]) == (41, "other_rank")
    assert values["adjustments"] == [{"kind": "other_rank", "blocks": 41}]
    assert "a rank that has fewer" in table
    assert _extkv.replay_record(text) == (text, table, sentence)


def test_memory_gone_before_committing_makes_the_plan_smaller():
    text, _, _ = _extkv.check_commit(record(), 500, 20)
    values = json.loads(text)
    assert values["plan"]["blocks"] == 46
    assert values["adjustments"][0]["driver_free_bytes"] == 500
    unchanged, _, _ = _extkv.check_commit(record(), 900, 0)
    assert json.loads(unchanged)["plan"]["blocks"] == 66


def test_reservation_and_encoder_cache_are_products():
    assert _extkv.reservation_blocks(1000, 0.92, 10) == 92
    assert _extkv.encoder_cache_bytes(8192, 4096, "bfloat16") == 8192 * 4096 * 2
    assert _extkv.encoder_cache_bytes(0, 4096, "bfloat16") == 0


def test_an_estimate_is_json_and_a_table():
    facts = {
        "device_total_bytes": 141_000_000_000,
        "parameter_bytes": 16_381_470_720,
        "cache": {"bytes_per_block": 2_359_296, "num_segments": 72, "block_size": 16},
        "granule_bytes": 2 << 20,
        "max_model_len": 40_960,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 1.0,
    }
    text, table = _extkv.estimate(json.dumps(facts), "{}")
    values = json.loads(text)
    assert values["plan"]["blocks"] == 51_277
    assert values["summary"]["bytes_per_token"] == 147_456
    assert "51,277 blocks of 16 tokens" in table
    text, _ = _extkv.estimate(json.dumps(facts), '{"graphs_bytes": 0}')
    assert json.loads(text)["plan"]["blocks"] == 51_732


def test_too_little_for_one_request_names_the_longest_that_fits():
    with pytest.raises(extkv.CacheTooSmallError, match="lower max_model_len") as raised:
        _extkv.size_from_trace(trace(max_model_len=2000))
    error = raised.value
    assert (error.longest_len, error.needed_blocks, error.available_blocks) == (1056, 125, 66)
    assert isinstance(error, MemoryError)
    assert isinstance(error, extkv.SizingError)
    with pytest.raises(extkv.CacheTooSmallError) as raised:
        _extkv.check_commit(record(), 60, 0)
    assert (raised.value.longest_len, raised.value.available_blocks) == (0, 0)
    assert extkv.CacheTooSmallError("made by hand").longest_len == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: record(reserved_blocks=None), "needs the number of blocks"),
        (lambda: record(kv_cache_memory_bytes=1), "cannot be combined with the extensible cache"),
        (lambda: record(device_total_bytes=0), "device_total_bytes is 0"),
        (lambda: record(phases=[reading("start", 900)]), "no reading of phase measured"),
        (lambda: record(mode="fixed", kv_cache_memory_bytes=900), "leaves too little"),
        (lambda: record(committed_bytes=900), "committed and"),
        (lambda: _extkv.limit_record(record(), 67), "67 blocks asked of a plan"),
        (lambda: _extkv.agree([]), "no rank has a plan"),
        (lambda: _extkv.agree([record(), record(max_model_len=32)]), "rank 1 has max_model_len"),
        (lambda: _extkv.reservation_blocks(1000, 0.0, 10), "gpu_memory_utilization is 0"),
        (lambda: _extkv.reservation_blocks(1000, 0.5, 0), "bytes_per_block is 0"),
    ],
)
def test_refusals_of_sizing_are_sizing_errors(make, message):
    with pytest.raises(extkv.SizingError, match=message) as raised:
        make()
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _extkv.size_from_trace("{"), "cannot read the sizing record .*EOF"),
        (lambda: record(unknown=1), "unknown field"),
        (lambda: record(gpu_memory_utilization=1.5), "gpu_memory_utilization is 1.5"),
        (lambda: _extkv.replay_record('{"format": 2}'), "has format 2; this version reads 1"),
        (
            lambda: _extkv.replay_record(record().replace('"blocks": 66', '"blocks": 65')),
            "stored plan of 65 blocks differs from what its trace gives, 66",
        ),
        (lambda: _extkv.estimate("{}", "{}"), "missing field"),
        (lambda: _extkv.encoder_cache_bytes(1, 1, "float7"), "unknown dtype"),
    ],
)
def test_text_that_is_no_record_is_an_argument_error(make, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        make()


def test_an_encoder_cache_past_64_bits_is_refused():
    with pytest.raises(extkv.LayoutError, match="bytes of an encoder cache overflows"):
        _extkv.encoder_cache_bytes(2**40, 2**40, "bfloat16")
