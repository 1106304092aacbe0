"""Shape and constants of a decoder-only model, whatever file they come from.

One class serves every architecture that the decoder runs; `family.py` says which one sets what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extkv.errors import InvalidArgumentError
from extkv.models.rope import RopeScaling, YarnScaling

POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
    "rms_norm_eps",
    "rope_theta",
)

# Positions are float32 numbers in RoPE, exact up to here.
MAX_CONTEXT_LENGTH = 2**24


@dataclass(frozen=True)
class ModelConfig:
    """Describe a model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Width of one head; even, because RoPE rotates pairs. Independent of `hidden_size`.
        context_length: Largest number of tokens of one sequence.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How the frequencies are stretched for long contexts, or None.
        architecture: Name of the architecture in a Hugging Face `config.json`.
        tie_word_embeddings: Whether the output head is the embedding itself.
        qk_norm: Whether each query and key head is normalised before RoPE.
        attention_bias: Whether the four attention projections have a bias.
        mlp_bias: Whether the three MLP projections have a bias.
        sliding_window: Number of tokens, its own included, that a token sees in a sliding layer;
            None where every layer sees all tokens.
        full_attention_layer_ids: Layers that see all tokens although `sliding_window` is set.

    Raises:
        InvalidArgumentError: If a size is not positive, the heads do not group, `head_dim` is odd,
            or a constant is not a positive finite number.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    architecture: str = "LlamaForCausalLM"
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    full_attention_layer_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check every field once, so that the model need not."""
        for name in POSITIVE_FIELDS:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                msg = f"{name} is {value}, expected a positive number"
                raise InvalidArgumentError(msg)
        if self.sliding_window is not None and self.sliding_window < 1:
            msg = f"sliding_window is {self.sliding_window}, expected a positive number or null"
            raise InvalidArgumentError(msg)
        self._check_heads()
        self._check_positions()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            msg = (
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
            raise InvalidArgumentError(msg)
        if self.head_dim % 2 != 0:
            msg = f"head_dim is {self.head_dim}, expected an even number"
            raise InvalidArgumentError(msg)

    def _check_positions(self) -> None:
        if self.context_length > MAX_CONTEXT_LENGTH:
            msg = f"context_length is {self.context_length}, supported: {MAX_CONTEXT_LENGTH}"
            raise InvalidArgumentError(msg)
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            msg = f"rope_theta is {self.rope_theta}, yarn needs more than 1"
            raise InvalidArgumentError(msg)

    def layer_window(self, layer_id: int) -> int | None:
        """Return how many tokens a token of this layer sees, None where it sees all of them."""
        window = self.sliding_window
        if window is None or window >= self.context_length:
            return None
        return None if layer_id in self.full_attention_layer_ids else window


# The name under which callers that know llama models only have it.
LlamaConfig = ModelConfig


def divide_heads(hidden_size: int, num_heads: int) -> int:
    """Return the head width of a model whose heads share the hidden size.

    Raises:
        InvalidArgumentError: If they do not divide it.
    """
    if num_heads <= 0 or hidden_size % num_heads != 0:
        msg = f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}"
        raise InvalidArgumentError(msg)
    return hidden_size // num_heads
