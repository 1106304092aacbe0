"""Tiny targets and drafters with weights that leave nothing at 0 or 1."""

from __future__ import annotations

import dataclasses

import torch
from extkv.models import DecoderModel, ModelConfig, random_model
from extkv.models.dspark import DSparkConfig, DSparkModel, drafter_config, random_drafter
from extkv.models.dspark.weights import drafter_slot_view, drafter_slots

TARGET = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    context_length=64,
    rms_norm_eps=1e-6,
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
)
HEADS = ("none", "vanilla", "gated", "rnn")


def tiny_config(target: ModelConfig = TARGET, **changes) -> DSparkConfig:
    """A drafter of three layers with four heads over two, unlike the target."""
    config = drafter_config(
        target, **({"num_layers": 3, "block_size": 4, "markov_rank": 6} | changes)
    )
    backbone = dataclasses.replace(config.backbone, num_heads=4, num_kv_heads=2)
    return dataclasses.replace(config, backbone=backbone)


def config_with_head(head: str, **changes) -> DSparkConfig:
    if head == "none":
        return tiny_config(**({"markov_rank": 0, "confidence_reads_markov": False} | changes))
    return tiny_config(**({"markov_head_type": head} | changes))


def tiny_target(*, seed: int = 0, **changes) -> DecoderModel:
    return random_model(dataclasses.replace(TARGET, **changes), seed=seed)


def tiny_drafter(
    config: DSparkConfig, target: DecoderModel | None = None, *, seed: int = 1, **options
) -> DSparkModel:
    """A drafter whose norms and biases are random too."""
    model = random_drafter(config, target, seed=seed, **options)
    scramble(model, seed=seed)
    return model


def scramble(model: DSparkModel, *, seed: int) -> None:
    """Redraw every weight that is not the target's."""
    generator = torch.Generator().manual_seed(seed)
    for slot in drafter_slots(model.config):
        if slot.name not in model.weights.shared:
            values = torch.randn(slot.shape, generator=generator)
            scale = 0.3 if slot.kind == "matrix" else 0.2
            place = drafter_slot_view(model.weights, slot)
            place.copy_(values * scale + (1.0 if slot.kind == "norm" else 0.0))
    model.refresh()


def know_bigrams(drafter: DSparkModel, target: DecoderModel) -> None:
    """Make the Markov head the target's bigram, and let the backbone say nothing."""
    weights, norm = drafter.weights, target.weights.final_norm
    weights.backbone.final_norm.zero_()
    rows = torch.nn.functional.rms_norm(target.weights.embedding, norm.shape, norm, 1e-5)
    weights.markov_w1.copy_(rows)
    weights.markov_w2.copy_(target.weights.lm_head)


def in_float64(model: DSparkModel) -> DSparkModel:
    """The same drafter with float64 weights."""
    weights = _doubled(model.weights)
    layers = tuple(_doubled(layer) for layer in model.weights.backbone.layers)
    backbone = dataclasses.replace(_doubled(model.weights.backbone), layers=layers)
    return DSparkModel(model.config, dataclasses.replace(weights, backbone=backbone))


def _doubled(owner):
    changes = {
        name: value.double()
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return dataclasses.replace(owner, **changes)


def random_taps(config: DSparkConfig, num_tokens: int, *, seed: int = 2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (config.num_taps, num_tokens, config.backbone.hidden_size)
    return torch.randn(shape, generator=generator).to(dtype)


def random_tokens(num_tokens: int, *, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TARGET.vocab_size, (num_tokens,), generator=generator)
