"""Forward pass of training: many blocks of one sequence at once, with the true tokens before each.

It is written apart from `DSparkModel`, in operations that autograd can differentiate and without
the copies and kernels of inference; on the same prefix both give the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from extkv.errors import InvalidArgumentError
from extkv.models.dspark import heads
from extkv.models.dspark.blocks import (
    block_positions,
    block_token_ids,
    draft_rows,
    predicted_positions,
)

if TYPE_CHECKING:
    from extkv.models.config import ModelConfig
    from extkv.models.dspark.config import DSparkConfig
    from extkv.models.dspark.model import DSparkModel
    from extkv.models.weights import LayerWeights


@dataclass(frozen=True)
class Reading:
    """Say what no file of a drafter says; the defaults are what DSpark does.

    Only `check_draft` asks for others, to find out what a drafter was trained with.

    Attributes:
        position_offset: Added to the positions of all slots.
        context_norm: Where `hidden_norm` stands: after `fc`, before it (on each tap), or nowhere.
    """

    position_offset: int = 0
    context_norm: Literal["after", "before", "none"] = "after"


AS_PUBLISHED = Reading()


@dataclass(frozen=True)
class TeacherForced:
    """Hold what a drafter says about the tokens after each anchor.

    Attributes:
        hidden (model dtype, [num_blocks, num_drafts, hidden_size]): Hidden states of the slots
            that predict.
        logits (model dtype, [num_blocks, num_drafts, num_draft_tokens]): Logits with the Markov
            bias of the true token before.
        confidence_logits (float32 or float64, [num_blocks, num_drafts]): None without such a head.
        label_positions (int64, [num_blocks, num_drafts]): Position that each row predicts; it may
            lie past the sequence.
        previous_token_ids (int64, [num_blocks, num_drafts]): The true token before that position;
            the sequence's last one where that lies past it.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor | None
    label_positions: torch.Tensor
    previous_token_ids: torch.Tensor


def teacher_forced(
    model: DSparkModel,
    taps: torch.Tensor,
    token_ids: torch.Tensor,
    anchors: torch.Tensor,
    *,
    is_real: torch.Tensor | None = None,
    reading: Reading = AS_PUBLISHED,
) -> TeacherForced:
    """Run blocks of one sequence that begins at position 0.

    Args:
        model: The drafter; its weights may ask for gradients.
        taps (model dtype, [num_taps, num_tokens, hidden_size]): Taps of every token.
        token_ids (int64, [num_tokens]): The sequence, target tokens.
        anchors (int64, [num_blocks]): Position of each block's anchor. A block sees the context
            before its anchor and all of its own slots, and nothing of other blocks.
        is_real (bool, [num_blocks]): Blocks that are more than padding; the others see their own
            slots only. All by default.
        reading: What the weights were trained with.

    Returns:
        What the drafter says. Rows of padding blocks and rows whose label lies past the sequence
        hold finite numbers that mean nothing.

    Raises:
        InvalidArgumentError: If `taps` and `token_ids` differ in length, or the sequence has more
            tokens than positions exist.
    """
    num_tokens = token_ids.shape[0]
    if taps.shape[1] != num_tokens or num_tokens > model.num_positions:
        msg = (
            f"taps are of {taps.shape[1]} tokens, token_ids has {num_tokens}, "
            f"expected the same, at most {model.num_positions}"
        )
        raise InvalidArgumentError(msg)
    config, weights = model.config, model.weights
    eps = config.backbone.rms_norm_eps
    context = _context(model, taps, reading)
    slots = block_token_ids(config, token_ids[anchors])
    stream = functional.embedding(slots, weights.backbone.embedding)
    block_at = block_positions(config, anchors + reading.position_offset, model.num_positions)
    block_at = block_at.clamp(min=0)
    positions = torch.cat((torch.arange(num_tokens, device=anchors.device), block_at))
    rotation = [table[positions][:, None] for table in model.decoder.rotations]
    for layer_id, layer in enumerate(weights.backbone.layers):
        window = config.backbone.layer_window(layer_id)
        mask = _visible(config, num_tokens, anchors, is_real, window)
        stream = stream + _attention(config.backbone, layer, (context, stream), rotation, mask)
        normed = rms_norm(stream, layer.post_attention_norm, eps)
        gate, up = functional.linear(normed, layer.gate_up_proj).chunk(2, dim=-1)
        stream = stream + functional.linear(functional.silu(gate) * up, layer.down_proj)
    hidden = draft_rows(config, rms_norm(stream, weights.backbone.final_norm, eps))
    labels = predicted_positions(config, anchors)
    previous = token_ids[(labels - 1).clamp(max=num_tokens - 1)]
    return _apply_heads(model, hidden, labels, previous)


def _context(model: DSparkModel, taps: torch.Tensor, reading: Reading) -> torch.Tensor:
    """Return the features of the context (model dtype, [num_tokens, hidden_size])."""
    weights, eps = model.weights, model.config.backbone.rms_norm_eps
    if reading.context_norm == "before":
        taps = rms_norm(taps, weights.hidden_norm, eps)
    features = functional.linear(taps.transpose(0, 1).flatten(1), weights.fc)
    if reading.context_norm == "after":
        features = rms_norm(features, weights.hidden_norm, eps)
    return features


def _apply_heads(
    model: DSparkModel, hidden: torch.Tensor, labels: torch.Tensor, previous: torch.Tensor
) -> TeacherForced:
    config, weights = model.config, model.weights
    logits = functional.linear(hidden, model.lm_head)
    embedded = None
    if model.markov_weight is not None:
        embedded = heads.markov_embedding(weights, previous)
        state = heads.initial_state(weights, hidden.shape[0])
        codes = []
        for step in range(config.num_drafts):
            code, state = heads.markov_codes(weights, embedded[:, step], hidden[:, step], state)
            codes.append(code)
        logits = logits + functional.linear(torch.stack(codes, dim=1), model.markov_weight)
    confidence = None
    if config.has_confidence_head:
        read = embedded if config.confidence_reads_markov else None
        confidence = heads.confidence_logits(weights, hidden, read)
    return TeacherForced(hidden, logits, confidence, labels, previous)


def _attention(
    config: ModelConfig,
    layer: LayerWeights,
    sources: tuple[torch.Tensor, torch.Tensor],
    rotation: list[torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return what the attention of a layer adds to the stream.

    Args:
        config: The backbone.
        layer: The layer.
        sources (model dtype, [num_tokens, hidden_size] and [num_slots, hidden_size]): Normalised
            features of the context, and the residual stream of all blocks.
        rotation (float32, [num_tokens + num_slots, 1, head_dim / 2]): Cosine and sine.
        mask (bool, [num_slots, num_tokens + num_slots]): Which keys a slot sees.
    """
    context, stream = sources
    eps = config.rms_norm_eps
    normed = rms_norm(stream, layer.input_norm, eps)
    num_queries = config.num_heads * config.head_dim
    query = functional.linear(normed, layer.qkv_proj[:num_queries])
    fused = functional.linear(torch.cat((context, normed)), layer.qkv_proj[num_queries:])
    if layer.qkv_bias is not None:
        query = query + layer.qkv_bias[:num_queries]
        fused = fused + layer.qkv_bias[num_queries:]
    query, key, value = (
        rows.view(rows.shape[0], -1, config.head_dim) for rows in (query, *fused.chunk(2, dim=-1))
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        query, key = rms_norm(query, layer.q_norm, eps), rms_norm(key, layer.k_norm, eps)
    of_slots = [table[context.shape[0] :] for table in rotation]
    query, key = rotate(query, of_slots), rotate(key, rotation)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return functional.linear(attended[0].transpose(0, 1).flatten(1), layer.o_proj, layer.o_bias)


def _visible(
    config: DSparkConfig,
    num_tokens: int,
    anchors: torch.Tensor,
    is_real: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Return which keys each slot sees (bool, [num_slots, num_tokens + num_slots])."""
    token_ids = torch.arange(num_tokens, device=anchors.device)
    before = token_ids < anchors[:, None]  # [num_blocks, num_tokens]
    if window is not None:
        before &= token_ids >= anchors[:, None] - window
    if is_real is not None:
        before &= is_real[:, None]
    own = torch.eye(anchors.shape[0], dtype=torch.bool, device=anchors.device)
    size = config.block_size
    in_block = own.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return torch.cat((before.repeat_interleave(size, 0), in_block), dim=1)


def rotate(heads_of: torch.Tensor, rotation: list[torch.Tensor]) -> torch.Tensor:
    """Return heads turned by their positions (as `heads_of`), for a pass with a gradient.

    Args:
        heads_of (float, [..., num_heads, head_dim]): Queries or keys.
        rotation: Cosine and sine of each, which broadcast against half a head.
    """
    cosine, sine = rotation
    first, second = heads_of.chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).to(heads_of.dtype)


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of the last dimension (as `values`), for a pass with a gradient."""
    return functional.rms_norm(values, weight.shape, weight, eps)
