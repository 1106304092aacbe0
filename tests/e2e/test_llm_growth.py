"""On the host the engine's cache begins small and grows, in place, as its texts need blocks."""

from __future__ import annotations

from pathlib import Path

import extkv
import pytest
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.sampling_params import SamplingParams
from support.letter_tokenizer import LetterTokenizer
from support.plain_cache import greedy_tokens

# 16 tokens of one segment fill one 64 KiB granule, so every block is seen in the committed bytes.
CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    context_length=256,
)
BLOCK_BYTES = 4 * 65536  # keys and values of two layers
NUM_WARMUP_BLOCKS = 2
PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = random_model(CONFIG, seed=3)
    return LoadedModel(Path("tiny"), model, LetterTokenizer(97), None, GenerationDefaults())


def engine(loaded: LoadedModel, **options: object) -> LLM:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    return LLM(loaded, device="cpu", **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def generated(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_it_reserves_for_all_sequences_and_commits_two_blocks(loaded):
    llm = engine(loaded)
    stats = llm.kv_cache.stats()
    assert stats.committed_bytes == NUM_WARMUP_BLOCKS * BLOCK_BYTES
    assert stats.capacity_blocks == llm.sizing_plan.num_blocks == 4 * (256 // 16 + 1)
    assert stats.reserved_bytes == stats.capacity_blocks * BLOCK_BYTES


@pytest.mark.parametrize("max_model_len", [1, 16, 100])
def test_max_model_len_bounds_what_is_reserved(max_model_len):
    model = random_model(CONFIG, seed=3, max_model_len=max_model_len)
    loaded = LoadedModel(Path("tiny"), model, LetterTokenizer(97), None, GenerationDefaults())
    most = 4 * (-(-max_model_len // 16) + 1)
    assert engine(loaded).kv_cache.capacity_blocks == most


def test_it_grows_only_when_a_block_is_full(loaded):
    llm = engine(loaded)
    committed = []
    for output in llm.stream(PROMPT, greedy(90)):
        num_cached = len(PROMPT) + len(output.outputs[0].token_ids) - 1
        committed.append(llm.kv_cache.stats().committed_bytes // BLOCK_BYTES)
        assert committed[-1] == -(-num_cached // 16)
    assert len(committed) == 90


def test_max_tokens_commits_nothing_that_the_text_does_not_use(loaded):
    llm = engine(loaded)
    expected = greedy_tokens(loaded.model, PROMPT, 12)
    params = SamplingParams(temperature=0, max_tokens=200, stop_token_ids=[expected[11]])
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    num_tokens = len(PROMPT) + len(output.outputs[0].token_ids)
    assert num_tokens <= 52
    assert llm.kv_cache.num_blocks <= 4


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_growth_keeps_pointers_and_values(loaded, async_scheduling):
    llm = engine(loaded, async_scheduling=async_scheduling)
    before = {name: tensor.data_ptr() for name, tensor in llm.kv_cache.tensors().items()}
    assert generated(llm, [PROMPT], 90) == [greedy_tokens(loaded.model, PROMPT, 90)]
    assert llm.kv_cache.num_blocks == 9
    after = {name: tensor.data_ptr() for name, tensor in llm.kv_cache.tensors().items()}
    assert after == before


def test_a_later_text_reuses_no_cached_block_while_the_cache_can_grow(loaded):
    llm = engine(loaded)
    generated(llm, [PROMPT], 20)
    generated(llm, [PROMPT[::-1]], 20)
    (output,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == 32


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_without_memory_to_grow_requests_wait_for_each_other(loaded, host_budget, async_scheduling):
    llm = engine(loaded, async_scheduling=async_scheduling)
    prompts = [[start + n for n in range(20)] for start in range(1, 5)]
    host_budget(5 * BLOCK_BYTES)
    # Each needs three blocks, the four together twelve.
    expected = [greedy_tokens(loaded.model, prompt, 28) for prompt in prompts]
    assert generated(llm, prompts, 28) == expected
    assert llm.engine.scheduler.num_blocks == llm.kv_cache.num_blocks == 5
    assert llm.engine.scheduler.stats().num_preemptions > 0
    llm.engine.scheduler.check_integrity()


def test_without_memory_for_one_request_the_error_is_typed_and_the_engine_stays_usable(
    loaded, host_budget
):
    llm = engine(loaded)
    host_budget(4 * BLOCK_BYTES)
    with pytest.raises(extkv.OutOfMemoryError) as caught:
        generated(llm, [PROMPT], 60)
    assert caught.value.requested > caught.value.available
    assert not llm.engine.has_unfinished
    assert generated(llm, [PROMPT], 20) == [greedy_tokens(loaded.model, PROMPT, 20)]
    host_budget(1 << 30)
    llm.engine.resize_cache(8)
    assert generated(llm, [PROMPT], 60) == [greedy_tokens(loaded.model, PROMPT, 60)]


def test_an_explicit_size_is_committed_at_once(loaded):
    llm = engine(loaded)
    llm.engine.resize_cache(9)
    assert (llm.engine.scheduler.num_blocks, llm.kv_cache.num_blocks) == (9, 2)
    llm.engine.resize_cache(20)
    assert (llm.engine.scheduler.num_blocks, llm.kv_cache.num_blocks) == (20, 20)
    assert generated(llm, [PROMPT], 60) == [greedy_tokens(loaded.model, PROMPT, 60)]
    llm.engine.resize_cache(17)
    assert (llm.engine.scheduler.num_blocks, llm.kv_cache.num_blocks) == (17, 17)


def test_a_fixed_cache_is_committed_at_once(loaded):
    llm = engine(loaded, enable_extensible_kv_cache=False, kv_cache_memory_bytes=20 * BLOCK_BYTES)
    assert llm.kv_cache.num_blocks == 20
    assert generated(llm, [PROMPT], 30) == [greedy_tokens(loaded.model, PROMPT, 30)]


def test_closing_gives_the_memory_back(loaded):
    llm = engine(loaded)
    generated(llm, [PROMPT], 30)
    llm.close()
    assert llm.kv_cache.closed
    assert llm.kv_cache.num_blocks == 0
