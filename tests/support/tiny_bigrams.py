"""A tiny target that looks mostly at its last token, a drafter that knows it, and their engine."""

from __future__ import annotations

from pathlib import Path

import torch
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from support.drafters import know_bigrams, scramble
from support.letter_tokenizer import LetterTokenizer

VOCAB_SIZE = 13
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=96,
    qk_norm=True,
)
NUM_DRAFTS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 40}


def bigram_target(seed: int = 3):
    """A target that looks mostly at its last token, so that a Markov head can know it."""
    model = random_model(CONFIG, seed=seed)
    for layer in model.weights.layers:
        layer.o_proj.mul_(0.05)
        layer.down_proj.mul_(0.05)
    model.weights.lm_head.mul_(3)
    return model


def load() -> LoadedModel:
    tokenizer = LetterTokenizer(VOCAB_SIZE)
    return LoadedModel(Path("tiny"), bigram_target(), tokenizer, None, GenerationDefaults())


def knowing_drafter(loaded: LoadedModel, head: str = "vanilla"):
    """A drafter whose Markov head is the target's bigram, and whose backbone says nothing."""
    target = loaded.model
    config = drafter_config(
        CONFIG,
        num_layers=2,
        block_size=NUM_DRAFTS,
        markov_rank=CONFIG.hidden_size,
        markov_head_type=head,
    )
    drafter = random_drafter(config, target, seed=1)
    scramble(drafter, seed=2)
    if head == "vanilla":
        know_bigrams(drafter, target)
    return drafter


def engine(loaded: LoadedModel, drafter=None, *, speculative=None, **options) -> LLM:
    if drafter is not None:
        options["speculative_config"] = speculative or {"method": "dspark"}
    return LLM(loaded, drafter, **{**OPTIONS, **options})


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 7, 15, 16, 17, 30, 33]
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def tokens(llm: LLM, params=GREEDY) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    stats = llm.engine.scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
