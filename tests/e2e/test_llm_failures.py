"""A device that fails in a step: the engine says so, keeps nothing, and works again if it can."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.errors import DeviceLostError, FreedError
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.sampling_params import SamplingParams
from support.engines import assert_idle, tokens_of

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=128,
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [[1, 2, 3], list(range(30)), [7] * 17, [4]]
# What the device raises, and what the caller sees.
ERRORS = [
    (torch.AcceleratorError, DeviceLostError),
    (RuntimeError, RuntimeError),
    (MemoryError, MemoryError),
]
BOTH_ERRORS = pytest.mark.parametrize(
    ("error", "seen"), ERRORS, ids=[error.__name__ for error, _ in ERRORS]
)


class NoTokenizer:
    """Tokens have no text."""

    vocab_size = 50
    stop_token_ids = frozenset({0})


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(
        Path("tiny"), random_model(CONFIG, seed=3), NoTokenizer(), None, GenerationDefaults()
    )


@pytest.fixture
def llm(loaded):
    return LLM(loaded, device="cpu", max_num_seqs=4, max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def expected(loaded):
    engine = LLM(loaded, device="cpu", max_num_seqs=4, max_num_batched_tokens=24)
    return [tokens_of(engine.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


class Device:
    """Fails in the middle of the forward pass of some steps."""

    def __init__(self, llm, error, fails):
        self.error, self.fails, self.num_steps = error, fails, 0
        self.paged = llm.engine.runner._paged
        self.attend = self.paged.attend
        self.paged.attend = self

    def __call__(self, layer_id, *tensors):
        self.num_steps += layer_id == 0
        if layer_id == 1 and self.fails(self.num_steps):
            raise self.error("the device is lost")
        return self.attend(layer_id, *tensors)

    def repair(self):
        self.paged.attend = self.attend


@BOTH_ERRORS
@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_one_failing_step_ends_the_call_with_its_error_and_nothing_else(
    llm, expected, error, seen, step
):
    device = Device(llm, error, lambda number: number == step)
    with pytest.raises(seen, match="the device is lost"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert device.num_steps == step
    assert_idle(llm)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert_idle(llm)


@BOTH_ERRORS
def test_a_device_that_stays_lost_fails_every_call_alike(llm, expected, error, seen):
    device = Device(llm, error, lambda number: number >= 4)
    for _ in range(3):
        with pytest.raises(seen, match="the device is lost"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_idle(llm)
    # What needs no device works.
    llm.engine.resize_cache(llm.kv_cache.num_blocks - 1)
    device.repair()
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_a_failing_step_holds_no_lock(llm):
    Device(llm, RuntimeError, lambda _number: True)
    with pytest.raises(RuntimeError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    finished = threading.Event()

    def ask():
        llm.engine.scheduler.stats()
        llm.engine.scheduler.check_integrity()
        llm.kv_cache.stats()
        finished.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert finished.is_set()


def test_a_failing_stream_ends_its_request_and_no_other(llm, expected):
    """The step of two requests fails once: the one that asked for it ends, the other goes on."""
    other = llm.stream(PROMPTS[1], GREEDY)
    next(other)
    device = Device(llm, RuntimeError, lambda number: number == 3)
    failing = llm.stream(PROMPTS[2], GREEDY)
    with pytest.raises(RuntimeError, match="the device is lost"):
        list(failing)
    device.repair()
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.stats().num_running == 1
    assert list(list(other)[-1].outputs[0].token_ids) == expected[1]
    assert_idle(llm)


def test_a_failing_sampler_gives_the_step_up(llm, expected, monkeypatch):
    sample, calls = llm.engine.sampler.sample, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no answer from the device")
        return sample(*arguments, **options)

    monkeypatch.setattr(llm.engine.sampler, "sample", failing)
    with pytest.raises(RuntimeError, match="no answer"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_closing_after_a_lost_device_gives_the_memory_back(llm):
    Device(llm, RuntimeError, lambda _number: True)
    with pytest.raises(RuntimeError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    cache = llm.kv_cache
    llm.close()
    gc.collect()
    assert cache.stats().committed_bytes == 0


def test_a_closed_engine_says_so_and_queues_nothing(llm):
    llm.close()
    for _ in range(2):
        with pytest.raises(FreedError, match="closed"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_idle(llm)
    llm.close()
