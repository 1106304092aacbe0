"""A tiny target over single characters, a drafter that knows it, and requests with constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, kernel_ops, random_model
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from extkv.structured_outputs.params import StructuredOutputsParams
from support.drafters import know_bigrams, scramble
from support.letter_tokenizer import LetterTokenizer
from support.tiny_bigrams import NUM_DRAFTS


def tiny_loaded(vocab_size: int, *, seed: int = 3, device: str = "cpu") -> LoadedModel:
    """A target that looks mostly at its last token; its last token ends a text."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        # Kernels want heads of 64.
        hidden_size=32 if device == "cpu" else 256,
        intermediate_size=48 if device == "cpu" else 512,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8 if device == "cpu" else 64,
        context_length=128,
        qk_norm=True,
    )
    ops = None if device == "cpu" else kernel_ops()
    model = random_model(config, seed=seed, device=device, ops=ops)
    for layer in model.weights.layers:
        layer.o_proj.mul_(0.05)
        layer.down_proj.mul_(0.05)
    model.weights.lm_head.mul_(3)
    tokenizer = LetterTokenizer(vocab_size, frozenset({vocab_size - 1}))
    return LoadedModel(Path("tiny"), model, tokenizer, None, GenerationDefaults())  # type: ignore[arg-type]


def knowing_drafter(loaded: LoadedModel):
    """A drafter whose Markov head is the target's bigram, and whose backbone says nothing."""
    target: Any = loaded.model
    config = drafter_config(
        target.config, num_layers=2, block_size=NUM_DRAFTS, markov_rank=target.config.hidden_size
    )
    drafter = random_drafter(
        config, target, seed=1, dtype=target.dtype, device=target.device, ops=target.ops
    )
    if target.device.type == "cpu":
        scramble(drafter, seed=2)
    know_bigrams(drafter, target)
    return drafter


def constrained(constraint: dict[str, Any] | None, **fields: Any) -> SamplingParams:
    """Return parameters of a request, greedy unless said otherwise."""
    structured = None if constraint is None else StructuredOutputsParams(**constraint)
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 24, **fields}, structured_outputs=structured
    )
