"""The batching engine's greedy tokens of SmolLM2 are those of transformers, for ten prompts.

`data/make_smollm2_greedy.py` made the expected tokens with transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extkv.engine.llm import LLM
from extkv.models import load_model
from extkv.sampling_params import SamplingParams
from support.engines import assert_idle, resizing, tokens_of

CASES = json.loads((Path(__file__).parent / "data/smollm2_greedy.json").read_text())["cases"]
PROMPTS = [case["prompt_token_ids"] for case in CASES]
EXPECTED = [case["token_ids"] for case in CASES]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def short_model(model_path):
    """Sequences of 512 tokens at most, so that a tiny cache can hold one."""
    return load_model(model_path, max_model_len=512)


@pytest.fixture(scope="module")
def llm(short_model):
    return LLM(short_model, device="cpu", max_num_seqs=10)


def check(llm, *, count=10):
    outputs = llm.generate(PROMPTS[:count], GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == EXPECTED[:count]
    assert_idle(llm)
    return outputs


def test_the_data_are_ten_prompts_of_64_tokens_or_a_stop():
    assert len({case["name"] for case in CASES}) == 10
    assert all(len(tokens) == 64 or tokens[-1] == 2 for tokens in EXPECTED)


def test_a_prompt_alone(llm):
    llm.engine.scheduler.reset_prefix_cache()
    (output,) = check(llm, count=1)
    assert output.num_cached_tokens == 0


def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache(llm):
    check(llm)
    outputs = check(llm)
    for output in outputs:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16


def test_a_tiny_cache_that_grows_and_shrinks(llm):
    before = llm.engine.scheduler.stats().num_preemptions
    with resizing(llm, {2: 45, 30: 60, 60: 36, 90: 100}):
        check(llm)
    assert llm.engine.scheduler.stats().num_preemptions > before


def test_chunks_of_odd_sizes_in_a_cache_of_fixed_size(short_model):
    llm = LLM(
        short_model,
        device="cpu",
        max_num_seqs=7,
        max_num_batched_tokens=61,
        enable_extensible_kv_cache=False,
        kv_cache_memory_bytes=40 * 16 * 2 * 4 * 30 * 3 * 64,
    )
    assert llm.kv_cache.num_blocks == 40
    check(llm)
    assert llm.engine.scheduler.stats().num_preemptions > 0
