"""Drafters of a given shape with random weights, for benches and tests.

They cost what a real drafter costs, and their drafts say nothing about the target.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from extkv.models.decoder import EMBEDDING_TAP, num_positions
from extkv.models.dspark.config import DSparkConfig, check_pair
from extkv.models.dspark.model import DSparkModel
from extkv.models.dspark.weights import (
    EMBEDDING,
    LM_HEAD,
    allocate_drafter_weights,
    drafter_slot_view,
    drafter_slots,
)
from extkv.models.loader import check_device, check_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.models.config import ModelConfig
    from extkv.models.decoder import DecoderModel
    from extkv.models.ops import DecoderOps

NUM_LAYERS = 5
NUM_TAPS = 5
BLOCK_SIZE = 7
MARKOV_RANK = 256
QWEN3_MASK_TOKEN_ID = 151_669


def drafter_config(target: ModelConfig, **changes: Any) -> DSparkConfig:  # noqa: ANN401, any field
    """Return the shape of a drafter as published for Qwen3 targets, fitted to a target.

    Args:
        target: The target; the drafter takes its widths, RoPE and vocabulary.
        **changes: Fields of `DSparkConfig` that shall differ; `num_layers` sets the depth.

    Raises:
        InvalidArgumentError: If the fields contradict.
        DrafterMismatchError: If the target has a single layer, so that nothing can be tapped but
            the embedding output, and no other taps are given.
    """
    num_layers = changes.pop("num_layers", NUM_LAYERS)
    backbone = dataclasses.replace(
        target,
        architecture="Qwen3ForCausalLM",
        num_layers=num_layers,
        qk_norm=True,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        sliding_window=None,
        full_attention_layer_ids=frozenset(),
    )
    fields: dict[str, Any] = {
        "backbone": backbone,
        "tap_layer_ids": default_tap_layer_ids(target.num_layers),
        "mask_token_id": min(QWEN3_MASK_TOKEN_ID, target.vocab_size - 1),
        "block_size": BLOCK_SIZE,
        "markov_rank": MARKOV_RANK,
        "has_confidence_head": True,
        "confidence_reads_markov": True,
        "num_target_layers": target.num_layers,
    }
    return DSparkConfig(**(fields | changes))


def default_tap_layer_ids(num_target_layers: int, num_taps: int = NUM_TAPS) -> tuple[int, ...]:
    """Return evenly spread target layers, from the second to the last but two.

    They are 1, 9, 17, 25, 33 of 36 layers and 1, 10, 19, 28, 37 of 40. Targets of few layers give
    fewer taps, and of one layer the embedding output.
    """
    first, last = 1, num_target_layers - 3
    if last <= first:
        return (max(num_target_layers - 2, EMBEDDING_TAP),)
    num_taps = min(num_taps, last - first + 1)
    step = (last - first) / max(num_taps - 1, 1)
    return tuple(round(first + index * step) for index in range(num_taps))


def random_drafter(
    config: DSparkConfig,
    target: DecoderModel | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    target_token_ids: Sequence[int] | None = None,
    max_model_len: int | None = None,
    ops: DecoderOps | None = None,
) -> DSparkModel:
    """Make a drafter whose weights are drawn on the device itself.

    Projections have a standard deviation of `in_features ** -0.5`; norms are 1, biases 0. The same
    seed gives the same weights on the same kind of device.

    Args:
        config: Shape of the drafter.
        target: Target whose embedding and head the drafter shares, where their sizes are equal; it
            sets dtype and device too. Without one the drafter has random ones of its own.
        dtype: Dtype of weights and activations.
        device: Where the weights are.
        seed: Seed of the weights.
        target_token_ids: Target token of each draft token, ascending, for a reduced vocabulary; by
            default the first ones.
        max_model_len: Positions that may occur; by default the drafter's context length, or the
            target's positions where they are fewer.
        ops: Kernels that the forward pass uses; by default those of the target.

    Raises:
        InvalidArgumentError: If `dtype`, `device` or `max_model_len` is not possible.
        DrafterMismatchError: If the drafter cannot draft for the target.
        DriverUnavailableError: If the device is a CUDA device and there is none.
        OutOfMemoryError: If the weights do not fit on the device.
    """
    vocab_size = config.backbone.vocab_size
    shared = {}
    if target is not None:
        check_pair(config, target.config)
        dtype, device = target.dtype, target.device
        vocab_size = target.config.vocab_size
        max_model_len = target.num_positions if max_model_len is None else max_model_len
        max_model_len = min(max_model_len, config.backbone.context_length)
        ops = target.ops if ops is None else ops
        shared = _target_tensors(config, target)
    check_dtype(dtype)
    place = check_device(device)
    num_positions(config.backbone, max_model_len)
    weights = allocate_drafter_weights(
        config, dtype, place, shared=shared, target_ids=_target_ids(config, vocab_size, place)
    )
    if target_token_ids is not None:
        target_ids = torch.tensor(target_token_ids, dtype=torch.int64, device=place)
        weights = dataclasses.replace(weights, target_ids=target_ids)
    generator = torch.Generator(place).manual_seed(seed)
    for slot in drafter_slots(config):
        if slot.name in shared:
            continue
        destination = drafter_slot_view(weights, slot)
        if slot.kind == "matrix":
            destination.normal_(std=slot.shape[-1] ** -0.5, generator=generator)
        else:
            destination.fill_(1.0 if slot.kind == "norm" else 0.0)
    return DSparkModel(config, weights, vocab_size=vocab_size, ops=ops, max_model_len=max_model_len)


def _target_tensors(config: DSparkConfig, target: DecoderModel) -> dict[str, torch.Tensor]:
    shared = {}
    if config.backbone.vocab_size == target.config.vocab_size:
        shared[EMBEDDING] = target.weights.embedding
        if config.num_draft_tokens == target.config.vocab_size:
            shared[LM_HEAD] = target.weights.lm_head
    return shared


def _target_ids(config: DSparkConfig, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    if config.num_draft_tokens >= vocab_size:
        return None
    return torch.arange(config.num_draft_tokens, device=device)
