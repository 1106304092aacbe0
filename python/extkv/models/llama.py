"""Llama forward pass over packed tokens.

The model has no batch dimension and no cache of its own: tokens of any number of sequences lie one
after the other, and the cache object decides which keys each of them sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from extkv.models.config import LlamaConfig


class AttentionCache(Protocol):
    """Store keys and values, and attend over them."""

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the keys and values of the new tokens, and return their attention output.

        Args:
            layer_id: Layer, counted from 0.
            query (model dtype, [num_tokens, num_heads, head_dim]): Rotated queries.
            key (model dtype, [num_tokens, num_kv_heads, head_dim]): Rotated keys.
            value (model dtype, [num_tokens, num_kv_heads, head_dim]): Values.

        Returns:
            Tensor (model dtype, [num_tokens, num_heads, head_dim]): each token attends to its own
            sequence up to and including itself.
        """
        ...


@dataclass(frozen=True)
class LlamaLayerWeights:
    """Hold the weights of one layer; projections are [out_features, in_features].

    Attributes:
        input_norm: [hidden_size].
        q_proj: [num_heads * head_dim, hidden_size].
        k_proj: [num_kv_heads * head_dim, hidden_size].
        v_proj: [num_kv_heads * head_dim, hidden_size].
        o_proj: [hidden_size, num_heads * head_dim].
        post_attention_norm: [hidden_size].
        gate_proj: [intermediate_size, hidden_size].
        up_proj: [intermediate_size, hidden_size].
        down_proj: [hidden_size, intermediate_size].
    """

    input_norm: torch.Tensor
    q_proj: torch.Tensor
    k_proj: torch.Tensor
    v_proj: torch.Tensor
    o_proj: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_proj: torch.Tensor
    up_proj: torch.Tensor
    down_proj: torch.Tensor


@dataclass(frozen=True)
class LlamaWeights:
    """Hold the weights of a model, all of one dtype on one device.

    Attributes:
        embedding: [vocab_size, hidden_size].
        layers: One entry per layer.
        final_norm: [hidden_size].
        lm_head: [vocab_size, hidden_size]; the embedding itself where the two are tied.
    """

    embedding: torch.Tensor
    layers: tuple[LlamaLayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor


class LlamaModel:
    """Run a llama model.

    RoPE rotates the two halves of a head against each other (Hugging Face order), so weights stored
    in interleaved order must be un-permuted before.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        """Take weights that match the configuration; the loader checks them."""
        self.config = config
        self.weights = weights
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inverse = 1.0 / config.rope_theta**exponents
        self._inverse_frequencies = inverse.to(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations, keys and values."""
        return self.weights.embedding.dtype

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: AttentionCache
    ) -> torch.Tensor:
        """Return the normalised hidden states of the new tokens and add them to the cache.

        Args:
            token_ids (int64, [num_tokens]): New tokens, in range of the vocabulary.
            positions (int64, [num_tokens]): Position of each token in its own sequence.
            cache: Receives keys and values of every layer once, layer 0 first.

        Returns:
            Tensor (model dtype, [num_tokens, hidden_size]).
        """
        eps = self.config.rms_norm_eps
        rotation = self._rotation(positions)
        hidden = functional.embedding(token_ids, self.weights.embedding)
        for layer_id, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attention(layer_id, normed, rotation, cache)
            normed = rms_norm(hidden, layer.post_attention_norm, eps)
            hidden = hidden + gated_mlp(normed, layer)
        return rms_norm(hidden, self.weights.final_norm, eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states that `forward` returned.

        Args:
            hidden (model dtype, [num_tokens, hidden_size]): Normalised hidden states.

        Returns:
            Tensor (model dtype, [num_tokens, vocab_size]).
        """
        return functional.linear(hidden, self.weights.lm_head)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each [num_tokens, 1, head_dim], of angles computed in float32."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _attention(
        self,
        layer_id: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: AttentionCache,
    ) -> torch.Tensor:
        layer = self.weights.layers[layer_id]
        per_head = (hidden.shape[0], -1, self.config.head_dim)
        query = rotate(functional.linear(hidden, layer.q_proj).view(per_head), rotation)
        key = rotate(functional.linear(hidden, layer.k_proj).view(per_head), rotation)
        value = functional.linear(hidden, layer.v_proj).view(per_head)
        attended = cache.attend(layer_id, query, key, value)
        return functional.linear(attended.flatten(1), layer.o_proj)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square, computed in float32, and scale it."""
    wide = hidden.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply RoPE to `heads` [num_tokens, num_heads, head_dim]."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def gated_mlp(hidden: torch.Tensor, layer: LlamaLayerWeights) -> torch.Tensor:
    """Return `down(silu(gate(x)) * up(x))`."""
    gate = functional.silu(functional.linear(hidden, layer.gate_proj))
    return functional.linear(gate * functional.linear(hidden, layer.up_proj), layer.down_proj)
