"""Inputs of a step: what is uploaded, and what padded rows and captured graphs see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from extkv.engine.batch import InputBuffers
from extkv.engine.config import EngineConfig
from extkv.errors import InvalidArgumentError
from extkv.sched import Scheduler

CONFIG = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)


def scheduler() -> Scheduler:
    return Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        vocab_size=100,
        block_size=16,
        num_blocks=40,
    )


def decode_plan(num_seqs: int):
    made = scheduler()
    for request_id in range(num_seqs):
        made.add_request(request_id, [1 + request_id] * 3, max_tokens=5)
    made.schedule()
    made.update(list(range(num_seqs)), list(range(num_seqs + 1)), [7] * num_seqs)
    return made.schedule()


def buffers() -> InputBuffers:
    made = InputBuffers(CONFIG, torch.device("cpu"))
    made.worst_case()  # leaves other content behind, as start-up does
    return made


def test_a_prefill_step_is_uploaded_as_planned():
    made = scheduler()
    made.add_request(1, list(range(10, 30)), max_tokens=5)
    made.add_request(2, [5, 6], max_tokens=5)
    plan = made.schedule()
    inputs = buffers().fill(plan)
    assert inputs.token_ids.tolist() == [*range(10, 30), 5, 6]
    assert inputs.positions.tolist() == [*range(20), 0, 1]
    assert inputs.query_start_loc.tolist() == [0, 20, 22]
    assert inputs.seq_lens.tolist() == [20, 2]
    assert inputs.sample_rows.tolist() == [19, 21]
    assert inputs.max_query_len == 20
    blocks = plan.block_tables
    assert np.array_equal(inputs.block_table[:, : blocks.shape[1]].numpy(), blocks)


def test_b33_padded_rows_store_nothing_and_read_nothing():
    plan = decode_plan(3)
    inputs = buffers().fill_decode(plan, 8, 1)
    # Sequences past the plan's have no token; tokens past its own belong to no sequence.
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert inputs.seq_lens.tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert inputs.slot_mapping[3:].tolist() == [-1] * 5
    assert inputs.token_ids.tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
    assert inputs.max_query_len == 1


@pytest.mark.parametrize("num_seqs", [1, 4, 8])
def test_graphs_are_captured_over_a_batch_that_touches_no_cache(num_seqs: int):
    inputs = buffers().decode_views(num_seqs, 1)
    assert inputs.query_start_loc.tolist() == list(range(num_seqs + 1))
    assert inputs.seq_lens.tolist() == [0] * num_seqs
    assert inputs.slot_mapping.tolist() == [-1] * num_seqs
    assert inputs.token_ids.shape == inputs.positions.shape == (num_seqs,)


def test_graph_inputs_and_step_inputs_are_the_same_memory():
    made = buffers()
    captured = made.decode_views(4, 1)
    filled = made.fill_decode(decode_plan(4), 4, 1)
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "query_start_loc"):
        assert getattr(captured, name).data_ptr() == getattr(filled, name).data_ptr()
        assert torch.equal(getattr(captured, name), getattr(filled, name))


def test_windows_of_drafts_are_packed_from_the_front():
    made = InputBuffers(CONFIG, torch.device("cpu"), max_query_len=3)
    scheduler = Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        vocab_size=100,
        block_size=16,
        num_blocks=40,
        num_speculative_tokens=2,
        num_lookahead_tokens=2,
    )
    for request_id in (1, 2):
        scheduler.add_request(request_id, [5, 6, 7], max_tokens=9)
    scheduler.schedule()
    scheduler.update([1, 2], [0, 1, 2], [8, 9])
    scheduler.set_drafts(1, [10, None])
    inputs = made.fill_decode(scheduler.schedule(), 6, 3)
    # A placeholder is embedded as token 0.
    assert inputs.token_ids.tolist() == [8, 10, 0, 9, 0, 0]
    assert inputs.positions[:4].tolist() == [3, 4, 5, 3]
    # A graph of six tokens has room for six sequences, whatever the windows.
    assert inputs.query_start_loc.tolist() == [0, 3, 4, 4, 4, 4, 4]
    assert inputs.seq_lens.tolist() == [6, 4, 0, 0, 0, 0]
    assert inputs.slot_mapping[4:].tolist() == [-1] * 2
    assert inputs.max_query_len == 3
    captured = made.decode_views(6, 3)
    assert captured.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert captured.seq_lens.tolist() == [0] * 6
    assert captured.token_ids.data_ptr() == inputs.token_ids.data_ptr()
    # Above the sequences there are, a graph has all of them.
    assert made.decode_views(20, 3).query_start_loc.tolist() == list(range(9))


def test_the_worst_step_has_every_token_and_stores_none():
    inputs = InputBuffers(CONFIG, torch.device("cpu")).worst_case()
    assert inputs.token_ids.shape == (64,)
    assert inputs.query_start_loc.tolist() == list(range(0, 65, 8))
    assert (inputs.slot_mapping == -1).all()
    assert not inputs.seq_lens.any()


def test_graph_sizes_cover_every_batch():
    assert CONFIG.graph_batch_sizes() == [1, 2, 4, 8]
    wide = EngineConfig(max_model_len=16, max_num_seqs=20, max_num_batched_tokens=20)
    assert wide.graph_batch_sizes() == [1, 2, 4, 8, 16, 20]


def test_token_sizes_are_small_steps_up_to_every_window_whole():
    assert CONFIG.graph_token_sizes(5) == [2, 4, 8, 16, 24, 32, 40]
    wide = EngineConfig(max_model_len=16, max_num_seqs=256, max_num_batched_tokens=4096)
    sizes = wide.graph_token_sizes(8)
    assert (sizes[0], sizes[-1], len(sizes)) == (2, 2048, 50)
    assert all(size in sizes for size in range(8, 129, 8))
    steps = [(b - a) / a for a, b in itertools.pairwise(sizes) if a >= 128]
    assert max(steps) <= 1 / 8
    assert EngineConfig(max_model_len=16, max_num_seqs=1).graph_token_sizes(3) == [2, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"block_size": -1}, "block_size is -1"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_seqs = 65"),
    ],
)
def test_limits_are_checked(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        EngineConfig(**{"max_model_len": 128, **options})
