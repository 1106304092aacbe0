"""A target that looks mostly at its last token, and a drafter that knows what follows what."""

from __future__ import annotations

from pathlib import Path

import torch
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, kernel_ops, random_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from support.drafters import know_bigrams
from support.letter_tokenizer import LetterTokenizer

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
    """The same target on any device."""
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
        know_bigrams(drafter, target)
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
