"""The batching engine's greedy tokens are those of transformers, on tiny random models."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.engine.llm import LLM
from extkv.models import load_model
from extkv.sampling_params import SamplingParams
from support.engines import assert_idle, resizing, tokens_of
from support.hf_reference import make_reference, write_tokenizer

NUM_TOKENS = 128
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
LENGTHS = (1, 5, 16, 17, 33, 64, 90)
MODELS = {
    "llama": (
        "Llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10},
    ),
    "qwen3": (
        "Qwen3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
}


class Case:
    """A model as extkv loaded it, prompts, and what transformers continues them with."""

    def __init__(self, family, options, directory):
        reference = make_reference(family, **options)
        reference.save_pretrained(directory)
        write_tokenizer(directory)
        self.loaded = load_model(directory)
        generator = torch.Generator().manual_seed(6)
        self.prompts = [torch.randint(300, (n,), generator=generator).tolist() for n in LENGTHS]
        self.expected = [self._continued(reference, prompt) for prompt in self.prompts]

    def _continued(self, reference, prompt):
        token_ids = torch.tensor([prompt])
        output = reference.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    def engine(self, **options):
        return LLM(self.loaded, device="cpu", **{"max_num_seqs": 8} | options)

    def run(self, llm):
        outputs = llm.generate(self.prompts, GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == self.expected
        assert_idle(llm)
        return outputs


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    return Case(*MODELS[request.param], tmp_path_factory.mktemp(request.param))


def fixed(num_blocks, case, block_size=16):
    """Options of a cache that is as large as this from the start."""
    config = case.loaded.config
    token_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    return {
        "enable_extensible_kv_cache": False,
        "kv_cache_memory_bytes": num_blocks * block_size * token_bytes,
        "block_size": block_size,
    }


@pytest.mark.parametrize("is_extensible", [True, False], ids=["extensible", "fixed"])
def test_each_prompt_alone_and_all_in_one_batch_and_again_from_the_prefix_cache(
    case, is_extensible
):
    llm = case.engine(**({} if is_extensible else fixed(120, case)))
    for prompt, expected in zip(case.prompts[-3:], case.expected[-3:], strict=True):
        assert tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False)) == [expected]
    case.run(llm)
    again = case.run(llm)
    assert [output.num_cached_tokens for output in again] == [0, 0, 0, 16, 32, 48, 80]


@pytest.mark.parametrize("is_extensible", [True, False], ids=["extensible", "fixed"])
@pytest.mark.parametrize(
    ("budget", "num_seqs", "block_size"), [(5, 3, 16), (13, 7, 32), (67, 8, 8)], ids=str
)
def test_prompts_in_chunks_of_odd_sizes_beside_running_sequences(
    case, budget, num_seqs, block_size, is_extensible
):
    options = {"block_size": block_size}
    if not is_extensible:
        options = fixed(240 * 8 // block_size, case, block_size)
    llm = case.engine(max_num_batched_tokens=budget, max_num_seqs=num_seqs, **options)
    case.run(llm)


@pytest.mark.parametrize("has_prefix_cache", [True, False], ids=["prefix-cache", "no-prefix-cache"])
@pytest.mark.parametrize("is_extensible", [True, False], ids=["extensible", "fixed"])
def test_sequences_that_a_tiny_cache_preempts(case, is_extensible, has_prefix_cache):
    options = {"num_gpu_blocks_override": 20} if is_extensible else fixed(20, case)
    llm = case.engine(enable_prefix_caching=has_prefix_cache, **options)
    assert llm.engine.scheduler.num_blocks == 20
    case.run(llm)
    assert llm.engine.scheduler.stats().num_preemptions > 0


def test_a_cache_that_grows_and_shrinks_under_the_sequences(case):
    llm = case.engine(num_gpu_blocks_override=24, max_num_batched_tokens=37)
    with resizing(llm, {3: 60, 20: 30, 21: 17, 60: 90, 100: 40, 150: 41}):
        case.run(llm)
    case.run(llm)
