"""Models of a given shape with random weights, for benches and tests.

They cost what a real model costs and say nothing sensible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from extkv.models.config import ModelConfig
from extkv.models.decoder import DecoderModel, num_positions
from extkv.models.loader import check_device, check_dtype
from extkv.models.weights import allocate_weights, slot_view, weight_slots

if TYPE_CHECKING:
    from extkv.models.ops import DecoderOps

# Qwen/Qwen3-8B, 8,190,735,360 parameters.
QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_length=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    max_model_len: int | None = None,
    ops: DecoderOps | None = None,
) -> DecoderModel:
    """Make a model whose weights are drawn on the device itself.

    Projections have a standard deviation of `in_features ** -0.5`, so that activations keep their
    size through any number of layers; norms are 1, biases 0. The same seed gives the same weights
    on the same kind of device.

    Args:
        config: Shape of the model.
        dtype: Dtype of weights and activations.
        device: Where the weights are.
        seed: Seed of the weights.
        max_model_len: Bounds the positions that may occur; the model's context length by default.
        ops: Kernels that the forward pass uses instead of plain PyTorch.

    Raises:
        InvalidArgumentError: If `dtype`, `device` or `max_model_len` is not possible.
        DriverUnavailableError: If the device is a CUDA device and there is none.
        OutOfMemoryError: If the weights do not fit on the device.
    """
    check_dtype(dtype)
    target = check_device(device)
    num_positions(config, max_model_len)
    weights = allocate_weights(config, dtype, target)
    generator = torch.Generator(target).manual_seed(seed)
    for slot in weight_slots(config):
        destination = slot_view(weights, slot)
        if slot.kind == "matrix":
            destination.normal_(std=slot.shape[-1] ** -0.5, generator=generator)
        else:
            destination.fill_(1.0 if slot.kind == "norm" else 0.0)
    return DecoderModel(config, weights, ops=ops, max_model_len=max_model_len)
