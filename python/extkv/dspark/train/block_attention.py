"""Attention of draft blocks over many texts at once, with a gradient.

A slot sees the context before its anchor and all slots of its own block. CUDA has kernels that take
a mask over everything; the host multiplies each block by itself, as most of that mask is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from extkv.dspark.train.batches import Batch
    from extkv.models.dspark import DSparkConfig

# Masked attention with a gradient; cuDNN would plan anew for every length.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class BlockAttention(Protocol):
    """Attention of the slots of one batch."""

    def attend(
        self,
        query: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend.

        Args:
            query (compute dtype, [num_texts, num_slots, num_heads, head_dim]): Of all slots.
            context: Keys and values of the texts (compute dtype, [num_texts, num_tokens,
                num_kv_heads, head_dim] each).
            slots: Keys and values of the slots ([num_texts, num_slots, num_kv_heads, head_dim]).

        Returns:
            Tensor (compute dtype, [num_texts, num_slots, num_heads * head_dim]).
        """
        ...


def block_attention(config: DSparkConfig, batch: Batch, dtype: torch.dtype) -> BlockAttention:
    """Return what attends on the batch's device."""
    if batch.anchors.device.type == "cuda":
        return MaskedAttention(config, batch, dtype)
    return SplitAttention(config, batch)


class MaskedAttention:
    """One attention over context and all slots, with a mask."""

    def __init__(self, config: DSparkConfig, batch: Batch, dtype: torch.dtype) -> None:
        """Make the mask."""
        self._bias = attention_bias(config, batch, dtype)

    def attend(
        self,
        query: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See `BlockAttention.attend`."""
        group = query.shape[2] // slots[0].shape[2]
        # Grouped heads have no kernel that takes a mask.
        keys, values = (
            torch.cat(pair, dim=1).transpose(1, 2).repeat_interleave(group, 1)
            for pair in zip(context, slots, strict=True)
        )
        with sdpa_kernel(BACKENDS):
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, attn_mask=self._bias
            )
        return attended.transpose(1, 2).flatten(2)


class SplitAttention:
    """Scores of the context and of each slot's own block, under one softmax."""

    def __init__(self, config: DSparkConfig, batch: Batch) -> None:
        """Note what is hidden."""
        self._size = config.block_size
        places = torch.arange(batch.token_ids.shape[1], device=batch.anchors.device)
        # By text, head, anchor, slot and token.
        self._is_hidden = (places >= batch.anchors[..., None])[:, None, :, None]

    def attend(
        self,
        query: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See `BlockAttention.attend`."""
        num_texts, num_slots, num_heads, head_dim = query.shape
        num_kv_heads, num_tokens = slots[0].shape[2], context[0].shape[1]
        group, size = num_heads // num_kv_heads, self._size
        num_blocks = num_slots // size
        # Query heads of one key head together: [num_texts, num_kv_heads, group, num_slots, ...].
        scaled = query * head_dim**-0.5
        grouped = scaled.view(num_texts, num_slots, num_kv_heads, group, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4)
        past_keys, past_values = (part.transpose(1, 2) for part in context)
        flat = grouped.reshape(num_texts, num_kv_heads, -1, head_dim)
        past = (flat @ past_keys.transpose(2, 3)).view(num_texts, -1, num_blocks, size, num_tokens)
        past = past.masked_fill(self._is_hidden, -torch.inf)
        # Slots of one block together: [num_texts, num_kv_heads, num_blocks, size, ...].
        keys, values = (
            part.transpose(1, 2).reshape(num_texts, num_kv_heads, 1, num_blocks, size, head_dim)
            for part in slots
        )
        blocks = grouped.reshape(num_texts, num_kv_heads, group, num_blocks, size, head_dim)
        own = blocks @ keys.transpose(-1, -2)
        weights = torch.cat((past, own.flatten(1, 2)), dim=-1).softmax(dim=-1)
        of_past = weights[..., :num_tokens].reshape(num_texts, num_kv_heads, -1, num_tokens)
        of_own = weights[..., num_tokens:].reshape(own.shape)
        attended = (of_past @ past_values).view(blocks.shape) + of_own @ values
        attended = attended.view(num_texts, num_heads, num_slots, head_dim)
        return attended.transpose(1, 2).flatten(2)


def attention_bias(config: DSparkConfig, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the scores: 0 where a slot sees a key, minus infinity elsewhere.

    A slot sees the context before its anchor and all slots of its block. Padding blocks see their
    own slots only.

    Returns:
        Tensor (`dtype`, [num_texts, 1, num_slots, num_tokens + num_slots]), slots of all blocks.
    """
    num_texts, num_tokens = batch.token_ids.shape
    num_anchors, size = batch.anchors.shape[1], config.block_size
    device = batch.anchors.device
    places = torch.arange(num_tokens, device=device)
    # Padding blocks have their anchor at 0, before which there is nothing.
    before = places < batch.anchors[..., None]  # [num_texts, num_anchors, num_tokens]
    own = torch.eye(num_anchors, dtype=torch.bool, device=device)
    visible = torch.cat((before, own.expand(num_texts, -1, -1).repeat_interleave(size, 2)), dim=2)
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~visible, -torch.inf).repeat_interleave(size, 1)[:, None]
