"""The scheduler from Python: whole generations, arrays, ends, drafts, resizing, threads."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from extkv import _extkv
from extkv.errors import SchedulerError, UnknownRequestError
from extkv.sched import FinishReason, StepPlan
from extkv.sched import scheduler as scheduling
from support.toy_engine import ToyEngine, expected_text, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = {
    1: [5, 6, 7],
    2: list(range(11)),
    3: [9],
    4: [80, 3] * 7,
    5: list(range(40, 53)),
}


def crowded_engine() -> ToyEngine:
    """Five requests on a budget of 6 tokens and a pool for two of them."""
    engine = ToyEngine(
        max_num_batched_tokens=6,
        num_blocks=9,
        long_prefill_token_threshold=5,
    )
    for request_id, prompt in PROMPTS.items():
        engine.scheduler.add_request(request_id, prompt, max_tokens=12)
    return engine


def arrays_of(plan: StepPlan) -> dict[str, np.ndarray]:
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


def test_chunked_prefill_and_preemption_leave_the_text_unchanged():
    engine = crowded_engine()
    plans = engine.run()
    assert engine.texts == {i: expected_text(prompt, 12) for i, prompt in PROMPTS.items()}
    assert set(engine.finish_reasons.values()) == {FinishReason.LENGTH}
    assert engine.scheduler.stats().num_preemptions > 0
    assert any(plan.preempted_request_ids for plan in plans)
    assert any(len(plan.sample_rows) < plan.num_requests for plan in plans), "a prompt was cut"
    assert max(plan.num_tokens for plan in plans) == 6
    assert max(int(plan.num_scheduled_tokens.max()) for plan in plans) == 5
    last = engine.scheduler.schedule()
    ended = [i for plan in [*plans, last] for i in plan.finished_request_ids]
    assert sorted(ended) == sorted(PROMPTS)


def test_equal_calls_give_equal_plans():
    for one, other in zip(crowded_engine().run(), crowded_engine().run(), strict=True):
        assert one.step_id == other.step_id
        assert one.preempted_request_ids == other.preempted_request_ids
        assert one.finished_request_ids == other.finished_request_ids
        for name, array in arrays_of(one).items():
            np.testing.assert_array_equal(array, arrays_of(other)[name], strict=True)


def test_plan_describes_a_decoding_row_and_a_prompt():
    scheduler = make_scheduler(num_lookahead_tokens=2)
    scheduler.add_request(2**64 - 1, [5, 6, 7, 8, 9, 10], max_tokens=4)
    scheduler.schedule()
    scheduler.update([2**64 - 1], [0, 1], [20])
    scheduler.add_request(0, [1, 2, 3], max_tokens=4)
    plan = scheduler.schedule()
    assert (plan.step_id, plan.num_requests, plan.num_tokens) == (2, 2, 4)
    assert (plan.num_decode_requests, plan.is_pure_decode, plan.is_empty) == (1, False, False)
    assert plan.request_ids.tolist() == [2**64 - 1, 0]
    assert plan.request_slots.tolist() == [0, 1]
    assert plan.slot_generations.tolist() == [1, 1]
    assert plan.num_scheduled_tokens.tolist() == [1, 3]
    assert plan.num_computed_tokens.tolist() == [6, 0]
    assert plan.seq_lens.tolist() == [7, 3]
    assert plan.num_draft_tokens.tolist() == [0, 0]
    assert plan.query_start_loc.tolist() == [0, 1, 4]
    assert plan.input_token_ids.tolist() == [20, 1, 2, 3]
    assert plan.positions.tolist() == [6, 0, 1, 2]
    assert plan.sample_rows.tolist() == [0, 3]
    assert plan.sample_start_loc.tolist() == [0, 1, 2]
    assert plan.block_tables.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert plan.slot_mapping.tolist() == [6, 12, 13, 14]


@pytest.mark.parametrize("num_requests", [0, 1, 3])
def test_plan_arrays_have_their_dtypes_and_shapes(num_requests: int):
    scheduler = make_scheduler()
    for request_id in range(num_requests):
        scheduler.add_request(request_id, [7] * 5, max_tokens=2)
    plan = scheduler.schedule()
    num_tokens, width = 5 * num_requests, 2 if num_requests else 0
    per_request = {
        "request_ids": np.uint64,
        "request_slots": np.int32,
        "slot_generations": np.uint32,
        "num_scheduled_tokens": np.int32,
        "num_computed_tokens": np.int32,
        "seq_lens": np.int32,
        "num_draft_tokens": np.int32,
        "sample_rows": np.int32,
    }
    expected = {name: (dtype, (num_requests,)) for name, dtype in per_request.items()} | {
        "query_start_loc": (np.int32, (num_requests + 1,)),
        "sample_start_loc": (np.int32, (num_requests + 1,)),
        "input_token_ids": (np.int32, (num_tokens,)),
        "positions": (np.int64, (num_tokens,)),
        "slot_mapping": (np.int64, (num_tokens,)),
        "block_tables": (np.int32, (num_requests, width)),
    }
    found = {name: (array.dtype.type, array.shape) for name, array in arrays_of(plan).items()}
    assert found == expected
    assert plan.block_table_width == width
    assert plan.is_empty == (num_requests == 0)


def test_plan_arrays_go_to_torch_without_a_copy_or_a_warning():
    scheduler = make_scheduler()
    scheduler.add_request(1, [5, 6, 7], max_tokens=1)
    plan = scheduler.schedule()
    torch.from_numpy(plan.input_token_ids)[0] = 9
    assert plan.input_token_ids.tolist() == [9, 6, 7]


def test_plan_stays_as_it_was_when_the_scheduler_goes_on():
    engine = ToyEngine()
    engine.scheduler.add_request(1, [5, 6, 7], max_tokens=3)
    first, _ = engine.run_step()
    engine.run()
    assert first.input_token_ids.tolist() == [5, 6, 7]


PACKINGS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda numbers: np.array(numbers, np.int32),
    "int64": lambda numbers: np.array(numbers, np.int64),
    "uint64": lambda numbers: np.array(numbers, np.uint64),
    "strided": lambda numbers: np.repeat(np.array(numbers, np.int32), 2)[::2],
    "swapped": lambda numbers: np.array(numbers, np.dtype(np.int32).newbyteorder()),
    "tensor": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
}


@pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)
def test_numbers_may_come_in_any_container(pack: Callable[[list[int]], Any]):
    scheduler = make_scheduler()
    scheduler.add_request(1, pack([5, 6, 7]), max_tokens=1, stop_token_ids=pack([3]))
    assert scheduler.schedule().input_token_ids.tolist() == [5, 6, 7]
    assert scheduler.update(pack([1]), pack([0, 1]), pack([8])).token_ids.tolist() == [8]


def test_native_scheduler_takes_bytes_and_bytearrays():
    scheduler = make_scheduler()
    scheduler.add_request(1, np.array([5, 6], np.int32).tobytes(), max_tokens=1)
    plan = scheduler._native.schedule()
    assert isinstance(plan, _extkv.Plan)
    offsets, token_ids = np.array([0, 1], np.int32), np.array([8], np.int32)
    output = scheduler._native.update(plan.request_ids, bytearray(offsets), bytes(token_ids), ())
    assert isinstance(output, _extkv.StepOutput)
    assert (output.step_id, output.num_requests) == (1, 1)
    assert output.request_ids == plan.request_ids


def test_prefix_hits_are_counted():
    engine = ToyEngine()
    prompt = list(range(10))
    for request_id in (1, 2):
        engine.scheduler.add_request(request_id, prompt, max_tokens=4)
        engine.run()
    engine.scheduler.add_request(3, prompt, max_tokens=4)
    plan, (output,) = engine.run_step()
    assert output.num_cached_tokens == 8
    assert plan.num_computed_tokens.tolist() == [8]
    assert engine.texts[1] == engine.texts[2] == expected_text(prompt, 4)
    stats = engine.scheduler.stats().prefix_cache
    assert (stats.num_requests, stats.num_query_tokens, stats.num_hit_tokens) == (3, 30, 16)
    assert stats.hit_ratio == pytest.approx(16 / 30)


def test_prefixes_are_kept_apart_by_salt_and_keys_and_can_be_ignored_or_forgotten():
    engine = ToyEngine()
    prompt = list(range(10))

    def num_cached_tokens(**options: Any) -> int:
        engine.scheduler.add_request(1, prompt, max_tokens=1, **options)
        return engine.run_step()[1][0].num_cached_tokens

    assert num_cached_tokens() == 0
    assert num_cached_tokens() == 8
    assert num_cached_tokens(cache_salt="tenant") == 0
    assert num_cached_tokens(cache_salt="tenant") == 8
    assert num_cached_tokens(extra_keys=[2**64 - 1]) == 0
    assert num_cached_tokens(skip_reading_prefix_cache=True) == 0
    engine.scheduler.reset_prefix_cache()
    assert num_cached_tokens() == 0
    assert ToyEngine(enable_prefix_caching=False).scheduler.stats().num_cached_blocks == 0


def test_an_aborted_request_is_gone_and_its_result_ignored():
    engine = ToyEngine()
    for request_id in (1, 2):
        engine.scheduler.add_request(request_id, [5, request_id], max_tokens=4)
    plan = engine.scheduler.schedule()
    engine.scheduler.abort(1)
    output = engine.scheduler.update(plan.request_ids, [0, 1, 2], [50, 60])
    assert [row.request_id for row in output.requests()] == [2]
    assert engine.scheduler.schedule().finished_request_ids == [1]
    engine.scheduler.finish(2, FinishReason.STOP)
    assert not engine.scheduler.has_unfinished_requests()
    engine.scheduler.check_integrity()
    with pytest.raises(UnknownRequestError, match="request 1 is not live"):
        engine.scheduler.abort(1)


@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_token_id"),
    [
        ({"max_tokens": 2}, [10, 11], FinishReason.LENGTH, None),
        ({"eos_token_id": 10}, [10], FinishReason.STOP, None),
        ({"eos_token_id": 10, "ignore_eos": True}, [10, 11, 12, 13], FinishReason.LENGTH, None),
        ({"stop_token_ids": [11, 12]}, [10, 11], FinishReason.STOP, 11),
        ({"stop_token_ids": [0, 10], "min_tokens": 2}, [10, 11, 12, 13], FinishReason.LENGTH, None),
        ({"eos_token_id": 12, "min_tokens": 3}, [10, 11, 12], FinishReason.STOP, None),
    ],
    ids=["max_tokens", "eos", "ignore_eos", "stop", "min_tokens", "min_tokens-eos"],
)
def test_requests_end_by_their_rules(
    options: dict[str, Any], text: list[int], reason: FinishReason, stop_token_id: int | None
):
    scheduler = make_scheduler()
    scheduler.add_request(1, [1], **({"max_tokens": 4} | options))
    found: list[int] = []
    for token_id in (10, 11, 12, 13):
        assert not scheduler.schedule().is_empty
        (output,) = scheduler.update([1], [0, 1], [token_id]).requests()
        found += output.token_ids
        if output.finish_reason is not None:
            break
    assert (found, output.finish_reason, output.stop_token_id) == (text, reason, stop_token_id)
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("results", [([1, 2], [0, 1, 2], [50, 60]), ([1], [0, 1], [50])], ids=str)
def test_a_failed_row_ends_its_request_alone(results: tuple[list[int], list[int], list[int]]):
    scheduler = make_scheduler()
    for request_id in (1, 2):
        scheduler.add_request(request_id, [5], max_tokens=4)
    scheduler.schedule()
    output = scheduler.update(*results, failed_request_ids={2})
    assert output.finish_reasons.tolist() == [-1, 3]
    assert [row.token_ids for row in output.requests()] == [[50], []]
    assert output.requests()[1].finish_reason is FinishReason.ERROR
    assert scheduler.stats().num_running == 1


def test_drafts_are_verified_and_change_no_text():
    engine = ToyEngine(num_speculative_tokens=3, num_lookahead_tokens=3)
    engine.scheduler.add_request(1, PROMPTS[1], max_tokens=20)
    assert engine.scheduler.set_drafts(1, [4]) is False, "the prompt is not computed yet"
    engine.run_step()
    text = expected_text(PROMPTS[1], 20)
    assert engine.scheduler.set_drafts(1, [text[1], text[2], None]) is True
    plan, (output,) = engine.run_step()
    assert plan.input_token_ids.tolist() == [*text[:3], -1]
    assert plan.sample_rows.tolist() == [0, 1, 2, 3]
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (3, 2)
    assert output.token_ids == text[1:4]
    assert output.num_computed_tokens == 6
    while engine.scheduler.has_unfinished_requests():
        position = len(engine.texts[1])
        engine.scheduler.set_drafts(1, [text[position], 0] if position + 2 < len(text) else [])
        engine.run_step()
    assert engine.texts[1] == text
    stats = engine.scheduler.stats()
    assert 2 <= stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_cancelled_step_is_computed_again():
    engine = ToyEngine()
    engine.scheduler.add_request(1, PROMPTS[2], max_tokens=3)
    first = engine.scheduler.schedule()
    assert engine.scheduler.step_in_flight == first.step_id == 1
    engine.scheduler.cancel_step()
    assert engine.scheduler.step_in_flight is None
    again, _ = engine.run_step()
    assert again.step_id == 2
    assert again.input_token_ids.tolist() == first.input_token_ids.tolist() == PROMPTS[2]
    engine.run()
    assert engine.texts[1] == expected_text(PROMPTS[2], 3)


def test_the_pool_grows_and_shrinks_under_running_requests():
    engine = ToyEngine(num_blocks=8)
    for request_id in (4, 5):
        engine.scheduler.add_request(request_id, PROMPTS[request_id], max_tokens=6)
        engine.run_step()
    engine.scheduler.grow(12)
    assert engine.scheduler.num_blocks == engine.scheduler.stats().num_blocks == 12
    with pytest.raises(SchedulerError, match="cannot shrink from 12 to 5 blocks: block"):
        engine.scheduler.shrink(5)
    assert engine.scheduler.vacate(5) == 1
    engine.scheduler.shrink(5)
    assert engine.scheduler.schedule().preempted_request_ids == [5]
    engine.scheduler.cancel_step()
    engine.run()
    assert engine.texts == {i: expected_text(PROMPTS[i], 6) for i in (4, 5)}


def test_priority_policy_serves_the_lower_value_first():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    scheduler.add_request(1, [5], max_tokens=1, priority=2**31 - 1)
    scheduler.add_request(2, [5], max_tokens=1, priority=-(2**31))
    assert scheduler.schedule().request_ids.tolist() == [2]


def test_limits_follow_from_the_configuration():
    scheduler = make_scheduler(num_speculative_tokens=7, max_num_seqs=16, num_lookahead_tokens=7)
    assert scheduler.max_num_sample_rows == 64
    assert scheduler.max_num_draft_requests == 9
    assert scheduler.max_num_blocks_per_request == 8
    assert scheduler.num_blocks_needed(5, 4) == 6
    assert scheduler.num_blocks_needed(5, 2**32 - 1) == 8


def test_whole_prompts_only_without_chunked_prefill():
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32)
    for request_id in (1, 2):
        scheduler.add_request(request_id, [5] * 20, max_tokens=1)
    assert scheduler.schedule().num_scheduled_tokens.tolist() == [20]


def test_stats_tell_where_requests_stand():
    engine = ToyEngine(max_num_seqs=1)
    for request_id in (1, 2):
        engine.scheduler.add_request(request_id, PROMPTS[2], max_tokens=3)
    engine.run_step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (32, 29, 2)
    assert stats.prefix_cache_resumed.hit_ratio == 0


def test_finish_reasons_are_the_strings_of_vllm():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
    assert FinishReason("stop") is FinishReason.STOP
    assert f"{FinishReason.ABORT}" == "abort"


def test_threads_share_a_scheduler():
    engine = ToyEngine(max_num_batched_tokens=8, num_blocks=12, num_speculative_tokens=2)
    scheduler = engine.scheduler
    unexpected: list[BaseException] = []

    def come_and_go(first_id: int) -> None:
        try:
            for request_id in range(first_id, first_id + 200):
                scheduler.add_request(request_id, PROMPTS[2], max_tokens=6)
                with contextlib.suppress(SchedulerError):  # a step may be in flight
                    scheduler.set_drafts(request_id, [1, None])
                if request_id % 4:
                    scheduler.abort(request_id)
        except BaseException as error:  # noqa: BLE001 whatever it is, the test shows it
            unexpected.append(error)

    threads = [threading.Thread(target=come_and_go, args=(i * 1000,)) for i in range(2)]
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            plan = scheduler.schedule()
            if not plan.is_empty:
                scheduler.cancel_step()
            scheduler.check_integrity()
    finally:
        sys.setswitchinterval(switch_interval)
        for thread in threads:
            thread.join()
    assert not unexpected
    engine.run()
    assert len(engine.texts) == 100
    assert all(text == expected_text(PROMPTS[2], 6) for text in engine.texts.values())


def test_docstring_example_runs():
    results = doctest.testmod(scheduling)
    assert results.attempted > 0
    assert results.failed == 0
