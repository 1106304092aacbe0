"""Drafting on a CUDA device: the text is the one that the host gives without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, kernel_ops, random_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from support.letter_tokenizer import LetterTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB_SIZE = 300
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=256,
    qk_norm=True,
)
NUM_DRAFTS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def bigram_model(device: str, dtype: torch.dtype):
    """The same target on any device: it looks mostly at its last token."""
    made = random_model(CONFIG, seed=3)
    for layer in made.weights.layers:
        layer.o_proj.mul_(0.005)
        layer.down_proj.mul_(0.005)
    made.weights.lm_head.mul_(3)
    if device == "cpu":
        return made
    placed = random_model(CONFIG, dtype=dtype, device=device, ops=kernel_ops())
    for source, target in zip(made.weights.tensors(), placed.weights.tensors(), strict=True):
        target.copy_(source)
    return placed


def knowing_drafter(target, head: str = "vanilla"):
    """A drafter that knows the target's bigram, by its Markov head alone."""
    config = drafter_config(
        CONFIG,
        num_layers=2,
        block_size=NUM_DRAFTS,
        markov_rank=CONFIG.hidden_size,
        markov_head_type=head,
    )
    options = {"dtype": target.dtype, "device": target.device, "seed": 1, "ops": target.ops}
    drafter = random_drafter(config, target, **options)
    if head == "vanilla":
        weights, norm = drafter.weights, target.weights.final_norm
        weights.backbone.final_norm.zero_()
        rows = torch.nn.functional.rms_norm(target.weights.embedding, norm.shape, norm, 1e-5)
        weights.markov_w1.copy_(rows)
        weights.markov_w2.copy_(target.weights.lm_head)
    return drafter


def engine(device: str, dtype=torch.float32, *, head=None, speculative=None, **options) -> LLM:
    torch.backends.cuda.matmul.allow_tf32 = False
    target = bigram_model(device, dtype)
    tokenizer = LetterTokenizer(VOCAB_SIZE)
    loaded = LoadedModel(Path("tiny"), target, tokenizer, None, GenerationDefaults())
    drafter = None if head is None else knowing_drafter(target, head)
    if drafter is not None:
        options["speculative_config"] = speculative or {"method": "dspark"}
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
    return LLM(loaded, drafter, device=device, **options)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 16, 17, 40, 100, 150, 33, 64, 7, 9]
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(engine("cpu"))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 50}],
    ids=["graphs", "eager", "preemption"],
)
def test_fp32_text_with_drafts_is_that_of_the_host_without(expected, head, options):
    llm = engine("cuda", head=head, **options)
    found = tokens(llm)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert num_equal >= len(expected) - 1, f"{num_equal} of {len(expected)} equal"
    if head == "vanilla":
        assert llm.draft_counts.accepted_length > 2
    llm.engine.scheduler.check_integrity()
    llm.close()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_graphs_change_no_token_in_bfloat16(method):
    speculative = {"rejection_sample_method": method}
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    found = []
    for eager in (True, False):
        llm = engine(
            "cuda", torch.bfloat16, head="vanilla", speculative=speculative, enforce_eager=eager
        )
        found.append((tokens(llm), tokens(llm, sampled)))
        assert llm.draft_counts.accepted_length > 1.5
        llm.close()
    assert found[0] == found[1]


def test_drafts_without_the_extensible_cache(expected):
    llm = engine(
        "cuda", head="vanilla", enable_extensible_kv_cache=False, kv_cache_memory_bytes=1 << 28
    )
    num_equal = sum(a == b for a, b in zip(tokens(llm), expected, strict=True))
    assert num_equal >= len(expected) - 1
    llm.close()
