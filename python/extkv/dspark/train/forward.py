"""Teacher-forced forward pass over many blocks of many texts at once.

The same numbers as `extkv.models.dspark.teacher_forced`, which takes one text, but batched, and
without logits: those are made a chunk at a time by the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from extkv.dspark.train.block_attention import block_attention
from extkv.models.dspark import heads
from extkv.models.dspark.blocks import block_positions, block_token_ids
from extkv.models.dspark.teacher_forcing import rms_norm, rotate

if TYPE_CHECKING:
    from extkv.dspark.train.batches import Batch
    from extkv.dspark.train.block_attention import BlockAttention
    from extkv.models.config import ModelConfig
    from extkv.models.dspark import DSparkConfig, DSparkWeights
    from extkv.models.weights import LayerWeights


class BlockOutput(NamedTuple):
    """What a drafter makes of blocks, before the vocabulary.

    Attributes:
        hidden (compute dtype, [num_texts, num_anchors, num_drafts, hidden_size]): Hidden states of
            the slots that predict.
        codes (compute dtype, [num_texts, num_anchors, num_drafts, markov_rank]): What `markov_w2`
            multiplies; None without a Markov head.
        confidence_logits (float32 or float64, [num_texts, num_anchors, num_drafts]): None without
            such a head.
    """

    hidden: torch.Tensor
    codes: torch.Tensor | None
    confidence_logits: torch.Tensor | None


def forward_blocks(
    config: DSparkConfig,
    weights: DSparkWeights,
    rotations: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    taps: torch.Tensor,
) -> BlockOutput:
    """Run all blocks of a batch.

    Args:
        config: The drafter.
        weights: Its weights; they may ask for gradients. All are of the compute dtype but
            `markov_w1`, which may be wider.
        rotations (float32, [num_positions, head_dim / 2] each): Cosine and sine.
        batch: Texts and anchors, on the weights' device.
        taps (compute dtype, [num_texts * num_tokens, num_taps * hidden_size]): The target's taps of
            every token, in the drafter's order.
    """
    num_texts, num_tokens = batch.token_ids.shape
    num_anchors = batch.anchors.shape[1]
    eps = config.backbone.rms_norm_eps
    context = rms_norm(functional.linear(taps, weights.fc), weights.hidden_norm, eps)
    context = context.view(num_texts, num_tokens, -1)
    at_anchors = batch.token_ids.gather(1, batch.anchors).flatten()
    slots = block_token_ids(config, at_anchors).view(num_texts, -1)
    stream = functional.embedding(slots, weights.backbone.embedding)
    block_at = block_positions(config, batch.anchors.flatten(), rotations[0].shape[0])
    of_context = [table[:num_tokens, None] for table in rotations]
    of_slots = [table[block_at].view(num_texts, -1, 1, table.shape[1]) for table in rotations]
    attention = block_attention(config, batch, stream.dtype)
    for layer in weights.backbone.layers:
        attended = _attention(
            config.backbone, layer, (context, stream), (of_context, of_slots), attention
        )
        stream = stream + attended
        normed = rms_norm(stream, layer.post_attention_norm, eps)
        gate, up = functional.linear(normed, layer.gate_up_proj).chunk(2, dim=-1)
        stream = stream + functional.linear(functional.silu(gate) * up, layer.down_proj)
    hidden = rms_norm(stream, weights.backbone.final_norm, eps)
    blocks = hidden.view(num_texts, num_anchors, config.block_size, -1)
    hidden = blocks[:, :, config.first_draft_slot :]
    return _heads(config, weights, hidden, batch.previous_ids(config.num_drafts))


def _heads(
    config: DSparkConfig, weights: DSparkWeights, hidden: torch.Tensor, previous: torch.Tensor
) -> BlockOutput:
    embedded = codes = confidence = None
    if config.markov_rank:
        # Looked up before it is rounded, so that gradients of a token add up unrounded.
        embedded = heads.markov_embedding(weights, previous).to(hidden.dtype)
        if config.markov_head_type == "rnn":
            codes = _unrolled(weights, embedded, hidden)
        else:
            codes, _ = heads.markov_codes(weights, embedded, hidden, None)
    if config.has_confidence_head:
        read = embedded if config.confidence_reads_markov else None
        confidence = heads.confidence_logits(weights, hidden, read)
    return BlockOutput(hidden, codes, confidence)


def _unrolled(weights: DSparkWeights, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the codes of a head with a state, draft by draft."""
    state: torch.Tensor | None = embedded.new_zeros(embedded[:, :, 0].shape)
    codes = []
    for step in range(hidden.shape[2]):
        code, state = heads.markov_codes(weights, embedded[:, :, step], hidden[:, :, step], state)
        codes.append(code)
    return torch.stack(codes, dim=2)


def _attention(
    config: ModelConfig,
    layer: LayerWeights,
    sources: tuple[torch.Tensor, torch.Tensor],
    rotations: tuple[list[torch.Tensor], list[torch.Tensor]],
    attention: BlockAttention,
) -> torch.Tensor:
    """Return what the attention of a layer adds to the stream.

    Args:
        config: The backbone.
        layer: The layer.
        sources: Normalised features of the context (compute dtype, [num_texts, num_tokens,
            hidden_size]), and the stream ([num_texts, num_slots, hidden_size]).
        rotations: Cosine and sine of the context's positions, and of the slots'.
        attention: Of the slots of the batch.
    """
    context, stream = sources
    of_context, of_slots = rotations
    eps = config.rms_norm_eps
    normed = rms_norm(stream, layer.input_norm, eps)
    num_queries = config.num_heads * config.head_dim
    past_bias = None if layer.qkv_bias is None else layer.qkv_bias[num_queries:]
    fused = _by_head(functional.linear(normed, layer.qkv_proj, layer.qkv_bias), config.head_dim)
    past = functional.linear(context, layer.qkv_proj[num_queries:], past_bias)
    past_key, past_value = _by_head(past, config.head_dim).chunk(2, dim=2)
    query = fused[:, :, : config.num_heads]
    key, value = fused[:, :, config.num_heads :].chunk(2, dim=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        query = rms_norm(query, layer.q_norm, eps)
        key, past_key = rms_norm(key, layer.k_norm, eps), rms_norm(past_key, layer.k_norm, eps)
    query, key = rotate(query, of_slots), rotate(key, of_slots)
    attended = attention.attend(query, (rotate(past_key, of_context), past_value), (key, value))
    return functional.linear(attended, layer.o_proj, layer.o_bias)


def _by_head(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rows.view(*rows.shape[:-1], -1, head_dim)
