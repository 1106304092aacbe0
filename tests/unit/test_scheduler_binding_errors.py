"""What the scheduler refuses from Python: class, message, and that nothing changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from extkv.errors import ExtkvError, InvalidRequestError, SchedulerError, UnknownRequestError
from extkv.sched import FinishReason, Scheduler
from support.toy_engine import VOCAB_SIZE, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE = 10**5000


def verifying() -> Scheduler:
    """A scheduler with request 1 verifying draft 7 and a placeholder in step 2, still in flight."""
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(1, [5, 6], max_tokens=8)
    scheduler.schedule()
    scheduler.update([1], [0, 1], [9])
    scheduler.set_drafts(1, [7, None])
    scheduler.schedule()
    return scheduler


def idle() -> Scheduler:
    scheduler = verifying()
    scheduler.cancel_step()
    return scheduler


def test_errors_are_value_errors_and_errors_of_extkv():
    assert issubclass(SchedulerError, ExtkvError)
    assert issubclass(SchedulerError, ValueError)
    assert issubclass(InvalidRequestError, SchedulerError)
    assert issubclass(UnknownRequestError, SchedulerError)


LIMITS = {
    "zero seqs": ({"max_num_seqs": 0}, "max_num_seqs is 0: at least 1 is needed"),
    "zero block": ({"block_size": 0}, "block_size is 0: a block holds at least 1 token"),
    "zero blocks": ({"num_blocks": 0}, "num_blocks is 0"),
    "negative": ({"max_model_len": -1}, r"max_model_len must be in \[0, 2\*\*32\), got -1"),
    "above u32": ({"num_blocks": 2**32}, r"num_blocks must be in \[0, 2\*\*32\), got 4294967296"),
    "above int32": ({"vocab_size": 2**31}, "vocab_size is 2147483648: at most 2147483647 fits"),
    "huge": ({"block_size": HUGE}, "block_size must be in .*, got a number of thousands of digits"),
    "drafts": ({"num_speculative_tokens": 64}, "max_num_batched_tokens = 64 is too small"),
    "whole": ({"enable_chunked_prefill": False, "max_model_len": 65}, "below max_model_len = 65"),
    "policy": ({"policy": "lifo"}, 'policy must be one of fcfs, priority, got "lifo"'),
}


@pytest.mark.parametrize(("limits", "message"), LIMITS.values(), ids=LIMITS)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any], message: str):
    with pytest.raises(SchedulerError, match=message):
        make_scheduler(**limits)


REQUESTS = {
    "duplicate": ({"request_id": 1}, "request 1 is already live"),
    "negative id": ({"request_id": -1}, r"request_id must be in \[0, 2\*\*64\), got -1"),
    "huge id": ({"request_id": 2**64}, "request_id must be in .*, got 18446744073709551616"),
    "empty": ({"prompt_token_ids": []}, "request 2 has an empty prompt"),
    "too long": ({"prompt_token_ids": [5] * 32}, "has a prompt of 32 tokens: max_model_len = 32"),
    "vocabulary": ({"prompt_token_ids": [VOCAB_SIZE]}, "has token 97: the vocabulary ends at 97"),
    "negative token": ({"prompt_token_ids": [5, -1]}, r"must be in \[0, 2\*\*31\), got -1"),
    "huge token": ({"prompt_token_ids": [2**40]}, "prompt_token_ids must be in .* 1099511627776"),
    "int32 token": ({"prompt_token_ids": np.full(2, -3, np.int32)}, "must be in .*, got -3"),
    "int64 token": ({"prompt_token_ids": np.full(2, 2**32)}, "must be in .*, got 4294967296"),
    "bytes": ({"prompt_token_ids": b"12345"}, "has 5 bytes: a multiple of 4 needed"),
    "no output": ({"max_tokens": 0}, "request 2 has max_tokens = 0: at least 1 is needed"),
    "negative output": ({"max_tokens": -1}, "max_tokens must be in"),
    "min": ({"min_tokens": 5}, "has min_tokens = 5 above max_tokens = 4"),
    "stop": ({"stop_token_ids": [-1]}, "stop_token_ids must be in"),
    "eos": ({"eos_token_id": -1}, "eos_token_id must be in"),
    "priority": ({"priority": 2**31}, r"priority must be in \[-2\*\*31, 2\*\*31\)"),
    "keys": ({"extra_keys": [-1]}, "extra_keys must be in"),
    "never fits": ({"prompt_token_ids": [5] * 20}, "may need 6 blocks: the pool has 5"),
}


@pytest.mark.parametrize(("arguments", "message"), REQUESTS.values(), ids=REQUESTS)
def test_requests_that_can_never_run_are_refused(arguments: dict[str, Any], message: str):
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add_request(1, [5, 6], max_tokens=8)
    defaults = {"request_id": 2, "prompt_token_ids": [5, 6, 7], "max_tokens": 4}
    with pytest.raises(InvalidRequestError, match=message):
        scheduler.add_request(**(defaults | arguments))
    assert scheduler.stats().num_waiting == 1
    scheduler.check_integrity()


TYPES = {
    "id": {"request_id": "2"},
    "float": {"prompt_token_ids": [5.0]},
    "float array": {"prompt_token_ids": np.ones(3)},
    "two dims": {"prompt_token_ids": np.ones((2, 2), np.int32)},
    "text": {"prompt_token_ids": "567"},
    "none": {"prompt_token_ids": None},
    "salt": {"cache_salt": 3},
    "flag": {"ignore_eos": None},
}


@pytest.mark.parametrize("arguments", TYPES.values(), ids=TYPES)
def test_arguments_of_another_type_are_type_errors(arguments: dict[str, Any]):
    scheduler = make_scheduler()
    defaults = {"request_id": 2, "prompt_token_ids": [5, 6, 7], "max_tokens": 4}
    with pytest.raises(TypeError):
        scheduler.add_request(**(defaults | arguments))
    assert not scheduler.has_unfinished_requests()


RESULTS = {
    "missing": (([], [0], []), "request 1 has no result in step 2, which samples it"),
    "twice": (([1, 1], [0, 1, 2], [7, 8]), "request 1 has more than one result in step 2"),
    "not scheduled": (([1, 2], [0, 1, 2], [7, 8]), "request 2 was not scheduled in step 2"),
    "failed elsewhere": (([1], [0, 1], [7], [2]), "request 2 was not scheduled in step 2"),
    "no token": (([1], [0, 0], []), "request 1 has 0 sampled tokens: between 1 and 3 expected"),
    "too many": (([1], [0, 4], [7, 8, 9, 9]), "has 4 sampled tokens: between 1 and 3 expected"),
    "vocabulary": (([1], [0, 1], [VOCAB_SIZE]), "has token 97: the vocabulary ends at 97"),
    "no draft": (([1], [0, 2], [8, 9]), "accepts token 8 at index 0: draft 7 was verified"),
    "negative token": (([1], [0, 1], [-1]), "token_ids must be in .*, got -1"),
    "negative id": (([-1], [0, 1], [7]), "request_ids must be in .*, got -1"),
    "negative failed": (([1], [0, 1], [7], [-1]), "failed_request_ids must be in .*, got -1"),
    "ragged ids": ((b"1234", [0, 1], [7]), "request_ids has 4 bytes: a multiple of 8 needed"),
    "no offset": (([], [], []), "token_offsets must rise from 0 to 0"),
    "few offsets": (([1], [0], []), "one more number than request_ids, which has 1"),
    "late start": (([1], [1, 2], [7, 8]), "token_offsets must rise from 0 to 2"),
    "past the end": (([1], [0, 2], [7]), "token_offsets must rise from 0 to 1"),
    "short": (([1], [0, 1], [7, 8]), "token_offsets must rise from 0 to 2"),
    "falling": (([1, 2], [0, 2, 1], [7]), "token_offsets must rise from 0 to 1"),
    "negative offset": (([1], [-1, 1], [7]), "token_offsets must be in"),
    "packed offset": (([1], np.array([-1, 1], np.int32), [7]), "must rise from 0 to 1"),
}


@pytest.mark.parametrize(("results", "message"), RESULTS.values(), ids=RESULTS)
def test_results_that_do_not_fit_the_step_are_refused(results: tuple[Any, ...], message: str):
    scheduler = verifying()
    with pytest.raises(SchedulerError, match=message):
        scheduler.update(*results)
    scheduler.check_integrity()
    assert scheduler.step_in_flight == 2
    (output,) = scheduler.update([1], [0, 3], [7, 8, 9]).requests()
    assert (output.token_ids, output.num_accepted_tokens) == ([7, 8, 9], 2)


CALLS: dict[str, tuple[Callable[[], Any], type[SchedulerError], str]] = {
    "schedule": (lambda: verifying().schedule(), SchedulerError, "step 2 is in flight"),
    "early drafts": (lambda: verifying().set_drafts(1, []), SchedulerError, "step 2 is in flight"),
    "vacate": (lambda: verifying().vacate(1), SchedulerError, "step 2 is in flight"),
    "update": (lambda: idle().update([], [0], []), SchedulerError, "no step is in flight"),
    "cancel": (lambda: idle().cancel_step(), SchedulerError, "no step is in flight"),
    "drafts": (lambda: idle().set_drafts(1, [1] * 4), SchedulerError, "request 1 has 4 drafts"),
    "draft": (lambda: idle().set_drafts(1, [97]), SchedulerError, "request 1 has token 97"),
    "negative draft": (lambda: idle().set_drafts(1, [-1]), SchedulerError, "drafts must be in"),
    "unknown drafts": (lambda: idle().set_drafts(2, []), UnknownRequestError, "request 2 is not"),
    "abort": (lambda: idle().abort(2), UnknownRequestError, "request 2 is not live"),
    "negative abort": (lambda: idle().abort(-1), SchedulerError, "request_id must be in"),
    "finish": (lambda: idle().finish(2, FinishReason.STOP), UnknownRequestError, "request 2 is"),
    "reason": (lambda: idle().finish(1, "bored"), SchedulerError, 'reason must be one .* "bored"'),
    "grow": (lambda: idle().grow(31), SchedulerError, "cannot grow to 31 blocks: the pool has 32"),
    "grow far": (lambda: idle().grow(2**31), SchedulerError, "num_blocks is 2147483648: at most"),
    "grow down": (lambda: idle().grow(-1), SchedulerError, "num_blocks must be in .*, got -1"),
    "shrink": (lambda: idle().shrink(33), SchedulerError, "cannot shrink to 33 blocks"),
    "shrink all": (lambda: idle().shrink(0), SchedulerError, "request 1 may need 3"),
    "reset": (lambda: idle().reset_prefix_cache(), SchedulerError, "1 requests are running"),
    "needed": (lambda: idle().num_blocks_needed(1, -1), SchedulerError, "max_tokens must be in"),
}


@pytest.mark.parametrize(("call", "error_class", "message"), CALLS.values(), ids=CALLS)
def test_misuse_is_refused(call: Callable[[], Any], error_class: type[Exception], message: str):
    with pytest.raises(SchedulerError, match=message) as raised:
        call()
    assert type(raised.value) is error_class
