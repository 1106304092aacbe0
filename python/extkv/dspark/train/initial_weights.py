"""Where a drafter begins: at layers of its target, at random numbers, or as another drafter."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError
from extkv.models.dspark import load_drafter
from extkv.models.dspark.weights import EMBEDDING, LM_HEAD, allocate_drafter_weights

if TYPE_CHECKING:
    from pathlib import Path

    from extkv.dspark.train.settings import StudentSettings
    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark import DSparkConfig, DSparkModel, DSparkWeights
    from extkv.models.weights import LayerWeights

# Tensors of a drafter that are the target's, or say what its tokens are.
NOT_TRAINED = ("embedding", "lm_head", "target_ids")
# Products that end in the residual stream.
_INTO_STREAM = ("o_proj", "down_proj")
# What a drafter must have in common with the one that it begins as, besides its weights' shapes.
_COMMON_FIELDS = (
    "tap_layer_ids",
    "mask_token_id",
    "block_size",
    "samples_from_anchor",
    "markov_head_type",
    "confidence_reads_markov",
)
# Scale of logits that do not outshout bigrams at first.
QUIET = 0.3


def initial_weights(settings: StudentSettings, target: DecoderModel) -> DSparkWeights:
    """Return float32 weights on the target's device, float64 where the target is.

    Embedding and head are the target's own tensors, the head its rows of the draft tokens where
    those are fewer. Markov embeddings begin as a random projection
    of the token embeddings, so that like tokens begin alike, and their bias at 0. A drafter that
    begins as another one has all of its weights.

    Args:
        settings: The drafter; layers of the target are used where their shape is the drafter's.
        target: The target.

    Raises:
        InvalidArgumentError: If the drafter has a reduced vocabulary and its tokens are not chosen,
            or another shape than the one that it begins as.
        ModelFileError: If that one cannot be read.
        DrafterMismatchError: If that one is for another target.
    """
    first = None
    if settings.first_drafter is not None:
        first = load_drafter(settings.first_drafter, target)
        settings = _begun(settings, settings.first_drafter, first)
    config = settings.config
    dtype = torch.promote_types(target.dtype, torch.float32)
    target_ids = _target_ids(settings, target)
    lm_head = target.weights.lm_head
    if target_ids is not None:
        lm_head = lm_head.index_select(0, target_ids)
    shared = {EMBEDDING: target.weights.embedding, LM_HEAD: lm_head}
    weights = allocate_drafter_weights(
        config, dtype, target.device, shared=shared, target_ids=target_ids
    )
    if first is not None:
        _copy_drafter(weights, first.weights, settings.first_drafter)
        return weights
    generator = torch.Generator().manual_seed(settings.seed)
    for name, tensor in _own(weights).items():
        _fill(name, tensor, config, generator)
    with torch.no_grad():
        weights.backbone.final_norm.copy_(target.weights.final_norm)
        if settings.bigram_steps:
            weights.backbone.final_norm.mul_(QUIET)
        if weights.markov_w1 is not None:
            weights.markov_w1.copy_(_projected(target.weights.embedding, weights.markov_w1))
        if settings.initial == "target":
            _copy_layers(weights, target, generator)
    return weights


def _own(weights: DSparkWeights) -> dict[str, torch.Tensor]:
    """Return what is trained, by name."""
    return {name: tensor for name, tensor in weights.tensors() if name not in NOT_TRAINED}


def _begun(settings: StudentSettings, path: Path, first: DSparkModel) -> StudentSettings:
    """Return the settings with the draft tokens of the drafter that they begin as."""
    for name in _COMMON_FIELDS:
        found, expected = getattr(first.config, name), getattr(settings.config, name)
        if found != expected:
            msg = f"{name} of {path} is {found}, expected {expected} as {settings.name} has it"
            raise InvalidArgumentError(msg)
    ids = first.weights.target_ids
    tokens = None if ids is None else tuple(ids.tolist())
    return dataclasses.replace(settings, draft_token_ids=tokens)


@torch.no_grad()
def _copy_drafter(weights: DSparkWeights, source: DSparkWeights, path: Path | None) -> None:
    own, found = _own(weights), _own(source)
    for name in {**own, **found}:
        shapes = [list(of[name].shape) if name in of else None for of in (found, own)]
        if shapes[0] != shapes[1]:
            msg = f"{name} of {path} has shape {shapes[0]}, expected {shapes[1]}"
            raise InvalidArgumentError(msg)
    for name, tensor in own.items():
        tensor.copy_(found[name])


def _target_ids(settings: StudentSettings, target: DecoderModel) -> torch.Tensor | None:
    if not settings.is_reduced:
        return None
    size, chosen = settings.config.num_draft_tokens, settings.draft_token_ids
    if chosen is None or len(chosen) != size:
        found = "none" if chosen is None else len(chosen)
        msg = f"draft_vocab_size is {size}, expected as many draft_token_ids, found {found}"
        raise InvalidArgumentError(msg)
    return torch.tensor(chosen, device=target.device)


def _fill(
    name: str, tensor: torch.Tensor, config: DSparkConfig, generator: torch.Generator
) -> None:
    field = name.rsplit(".", 1)[-1]
    if field.endswith("norm"):
        tensor.fill_(1.0)
    elif field.endswith("bias") or field in {"markov_w2", "confidence_proj"}:
        tensor.zero_()
    else:
        std = tensor.shape[-1] ** -0.5
        if field in _INTO_STREAM:
            std *= (2 * config.backbone.num_layers) ** -0.5
        # Drawn on the host, so that every device begins alike.
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)


def _projected(embedding: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a random projection of token embeddings, of mean square 1."""
    rank = like.shape[1]
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn((embedding.shape[1], rank), generator=generator).to(like)
    projected = embedding.to(like.dtype) @ matrix
    norms = projected.norm(dim=1, keepdim=True)
    scaled: torch.Tensor = projected / norms.clamp(min=1e-6) * math.sqrt(rank)
    return scaled


def _copy_layers(weights: DSparkWeights, target: DecoderModel, generator: torch.Generator) -> None:
    """Copy evenly spread layers of the target, first and last among them, where shapes are equal.

    The features of the context begin as the mean of the taps.
    """
    layers, sources = weights.backbone.layers, target.weights.layers
    last = len(sources) - 1
    for index, layer in enumerate(layers):
        place = last if len(layers) == 1 else round(index * last / (len(layers) - 1))
        _copy_layer(layer, sources[place])
    hidden, num_taps = weights.fc.shape[0], weights.fc.shape[1] // weights.fc.shape[0]
    identity = torch.eye(hidden).repeat(1, num_taps) / num_taps
    noise = torch.randn(weights.fc.shape, generator=generator) * weights.fc.shape[1] ** -0.5
    weights.fc.copy_(identity + noise / 4)


def _copy_layer(layer: LayerWeights, source: LayerWeights) -> None:
    for name, tensor in vars(layer).items():
        found = getattr(source, name)
        if isinstance(found, torch.Tensor) and found.shape == getattr(tensor, "shape", None):
            tensor.copy_(found)
