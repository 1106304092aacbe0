"""Shape and constants of a llama-architecture model, read from GGUF metadata.

Only the plain architecture is accepted. A key that would change the result (RoPE scaling, experts,
a sliding window) is refused instead of ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError, ModelFileError

if TYPE_CHECKING:
    from extkv.models.gguf_metadata import GGUFMetadata

KNOWN_ARCHITECTURES = ("llama",)

# Optional keys with the only value under which the plain forward pass is right.
NEUTRAL_VALUES: dict[str, object] = {
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scale_linear": 1.0,
    "llama.expert_count": 0,
    "llama.attention.sliding_window": 0,
    "llama.attention.causal": True,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Describe a llama model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Width of one head; even, because RoPE rotates pairs.
        context_length: Largest number of tokens the model was trained for.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the rotary frequencies.

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

    def __post_init__(self) -> None:
        """Check every field once, so that the model need not."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                msg = f"{field.name} is {value}, expected a positive number"
                raise InvalidArgumentError(msg)
        if self.num_heads % self.num_kv_heads != 0:
            msg = (
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
            raise InvalidArgumentError(msg)
        if self.head_dim % 2 != 0:
            msg = f"head_dim is {self.head_dim}, expected an even number"
            raise InvalidArgumentError(msg)

    @classmethod
    def from_metadata(cls, metadata: GGUFMetadata) -> LlamaConfig:
        """Read the configuration of a GGUF file.

        Raises:
            ModelFileError: If the architecture is not known, a key is missing or of the wrong type,
                a value is out of range, or a key asks for something the forward pass does not do.
        """
        architecture = metadata.require("general.architecture", str)
        if architecture not in KNOWN_ARCHITECTURES:
            msg = (
                f"model file {metadata.path}: architecture is {architecture!r}, "
                f"known: {', '.join(KNOWN_ARCHITECTURES)}"
            )
            raise ModelFileError(msg)
        _refuse_unsupported_keys(metadata)
        try:
            return _read_config(metadata)
        except InvalidArgumentError as error:
            msg = f"model file {metadata.path}: {error}"
            raise ModelFileError(msg) from error


def _read_config(metadata: GGUFMetadata) -> LlamaConfig:
    num_heads = metadata.require("llama.attention.head_count", int)
    hidden_size = metadata.require("llama.embedding_length", int)
    num_kv_heads = metadata.find("llama.attention.head_count_kv", int)
    vocab_size = metadata.find("llama.vocab_size", int)
    rope_theta = metadata.find("llama.rope.freq_base", float)
    return LlamaConfig(
        vocab_size=(
            len(metadata.require_list("tokenizer.ggml.tokens", str))
            if vocab_size is None
            else vocab_size
        ),
        hidden_size=hidden_size,
        intermediate_size=metadata.require("llama.feed_forward_length", int),
        num_layers=metadata.require("llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=_read_head_dim(metadata, hidden_size, num_heads),
        context_length=metadata.require("llama.context_length", int),
        rms_norm_eps=metadata.require("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=10_000.0 if rope_theta is None else rope_theta,
    )


def _read_head_dim(metadata: GGUFMetadata, hidden_size: int, num_heads: int) -> int:
    """Return the head width; keys, values and the rotated part must all have it."""
    head_dim = metadata.find("llama.attention.key_length", int)
    if head_dim is None:
        if num_heads <= 0 or hidden_size % num_heads != 0:
            msg = f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}"
            raise InvalidArgumentError(msg)
        head_dim = hidden_size // num_heads
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        found = metadata.find(key, int)
        if found not in (None, head_dim):
            msg = f"metadata key {key} is {found}, expected head_dim {head_dim}"
            raise InvalidArgumentError(msg)
    return head_dim


def _refuse_unsupported_keys(metadata: GGUFMetadata) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        value = metadata.values.get(key, neutral)
        if value != neutral:
            msg = f"model file {metadata.path}: {key} is {value!r:.80}, supported: {neutral!r}"
            raise ModelFileError(msg)
