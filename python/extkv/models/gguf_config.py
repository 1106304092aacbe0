"""Reading a model's configuration from GGUF metadata.

A key that would change the result (RoPE scaling, experts, a sliding window) is refused instead of
ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.config import ModelConfig, divide_heads
from extkv.models.known_families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Collection

    from extkv.models.family import Family
    from extkv.models.gguf_metadata import GGUFMetadata

GGUF_FAMILIES = {
    family.gguf_architecture: family for family in FAMILIES if family.gguf_architecture
}

# Optional keys with the only value under which the plain forward pass is right.
NEUTRAL_VALUES: dict[str, object] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
}

LM_HEAD = "output.weight"


def find_gguf_family(metadata: GGUFMetadata) -> Family:
    """Return the family of a GGUF file.

    Raises:
        ModelFileError: If the architecture is not known.
    """
    architecture = metadata.require("general.architecture", str)
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        msg = (
            f"model file {metadata.path}: architecture is {architecture!r}, "
            f"known: {', '.join(GGUF_FAMILIES)}"
        )
        raise ModelFileError(msg)
    return family


def read_gguf_config(metadata: GGUFMetadata, tensor_names: Collection[str]) -> ModelConfig:
    """Read the configuration of a GGUF file.

    Args:
        metadata: The key-value part of the file.
        tensor_names: Names of its tensors; without an output head, the embedding serves as one.

    Raises:
        ModelFileError: If the architecture is not known, a key is missing or of the wrong type, a
            value is out of range, or a key asks for something the forward pass does not do.
    """
    family = find_gguf_family(metadata)
    _refuse_unsupported_keys(metadata, f"{family.gguf_architecture}.")
    try:
        return _read_config(metadata, family, is_tied=LM_HEAD not in tensor_names)
    except InvalidArgumentError as error:
        msg = f"model file {metadata.path}: {error}"
        raise ModelFileError(msg) from error


def _read_config(metadata: GGUFMetadata, family: Family, *, is_tied: bool) -> ModelConfig:
    prefix = family.gguf_architecture
    num_heads = metadata.require(f"{prefix}.attention.head_count", int)
    hidden_size = metadata.require(f"{prefix}.embedding_length", int)
    num_kv_heads = metadata.find(f"{prefix}.attention.head_count_kv", int)
    vocab_size = metadata.find(f"{prefix}.vocab_size", int)
    rope_theta = metadata.find(f"{prefix}.rope.freq_base", float)
    return ModelConfig(
        vocab_size=(
            len(metadata.require_list("tokenizer.ggml.tokens", str))
            if vocab_size is None
            else vocab_size
        ),
        hidden_size=hidden_size,
        intermediate_size=metadata.require(f"{prefix}.feed_forward_length", int),
        num_layers=metadata.require(f"{prefix}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=_read_head_dim(metadata, f"{prefix}.", hidden_size, num_heads),
        context_length=metadata.require(f"{prefix}.context_length", int),
        rms_norm_eps=metadata.require(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope_theta=10_000.0 if rope_theta is None else rope_theta,
        architecture=family.architecture,
        tie_word_embeddings=is_tied,
        qk_norm=family.qk_norm,
    )


def _read_head_dim(metadata: GGUFMetadata, prefix: str, hidden_size: int, num_heads: int) -> int:
    """Return the head width; keys, values and the rotated part must all have it."""
    head_dim = metadata.find(f"{prefix}attention.key_length", int)
    if head_dim is None:
        head_dim = divide_heads(hidden_size, num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = metadata.find(prefix + key, int)
        if found not in (None, head_dim):
            msg = f"metadata key {prefix}{key} is {found}, expected head_dim {head_dim}"
            raise InvalidArgumentError(msg)
    return head_dim


def _refuse_unsupported_keys(metadata: GGUFMetadata, prefix: str) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        value = metadata.values.get(prefix + key, neutral)
        if value != neutral:
            msg = (
                f"model file {metadata.path}: {prefix}{key} is {value!r:.80}, "
                f"supported: {neutral!r}"
            )
            raise ModelFileError(msg)
