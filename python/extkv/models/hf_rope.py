"""Reading RoPE settings of a `config.json`: `rope_parameters`, or the older `rope_scaling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.models.json_file import JsonObject
from extkv.models.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_THETA = 10_000.0

# Bounds a product of two numbers from the file; ModelConfig refuses far less.
MAX_STRETCHED = 2.0**53

# Keys that change the rotation and that the decoder does not know.
UNSUPPORTED_KEYS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeSettings:
    """Hold what a `config.json` says about positions.

    Attributes:
        theta: Base of the frequencies.
        scaling: How they are stretched, or None.
        context_length: Largest number of tokens of one sequence. With YaRN it is
            `factor * original_max_position_embeddings` where that is more than
            `max_position_embeddings`, as in vLLM: model cards turn YaRN on by that key alone.
    """

    theta: float
    scaling: RopeScaling | None
    context_length: int


def read_rope(config: JsonObject, max_positions: int) -> RopeSettings:
    """Read the settings; `rope_scaling` wins where a file has both, as in transformers.

    Raises:
        ModelFileError: If the kind of scaling is not known, a number is missing, or a key asks for
            another rotation.
        InvalidArgumentError: If a number is out of range.
    """
    rope = _find_settings(config)
    theta = rope.find("rope_theta", float)
    if theta is None:
        theta = config.find("rope_theta", float)
    kind = rope.find("rope_type", str) or rope.find("type", str) or "default"
    reader = READERS.get(kind)
    if reader is None:
        raise rope.error("rope_type", f"is {kind!r:.80}", f"one of {', '.join(READERS)}")
    _refuse_unsupported(config, rope)
    scaling = reader(rope, config, max_positions)
    context_length = max_positions
    if isinstance(scaling, YarnScaling):
        stretched = min(scaling.factor * scaling.original_context_length, MAX_STRETCHED)
        context_length = max(max_positions, int(stretched))
    return RopeSettings(DEFAULT_THETA if theta is None else theta, scaling, context_length)


def _find_settings(config: JsonObject) -> JsonObject:
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.find_object(key)
        if rope is not None and rope.values:
            return rope
    return JsonObject(config.path, {}, "rope_parameters.")


def _refuse_unsupported(config: JsonObject, rope: JsonObject) -> None:
    for source in (config, rope):
        part = source.find("partial_rotary_factor", float)
        if part not in (None, 1.0):
            raise source.error("partial_rotary_factor", f"is {part}", "1.0")
    for key in UNSUPPORTED_KEYS:
        if key in rope.values:
            raise rope.error(key, "is given", "no such key")
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(key, "is an object", "one setting for all layers")


def _read_none(_rope: JsonObject, _config: JsonObject, _max_positions: int) -> None:
    return None


def _read_linear(rope: JsonObject, _config: JsonObject, _max_positions: int) -> LinearScaling:
    return LinearScaling(rope.require("factor", float))


def _read_llama3(rope: JsonObject, config: JsonObject, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.require("factor", float),
        low_freq_factor=rope.require("low_freq_factor", float),
        high_freq_factor=rope.require("high_freq_factor", float),
        original_context_length=_original_length(rope, config, max_positions),
    )


def _read_yarn(rope: JsonObject, config: JsonObject, max_positions: int) -> YarnScaling:
    original = _original_length(rope, config, max_positions)
    factor = rope.find("factor", float)
    if factor is None:
        factor = max_positions / original
    attention_factor = rope.find("attention_factor", float)
    if attention_factor is None:
        mscales = (rope.find("mscale", float), rope.find("mscale_all_dim", float))
        attention_factor = yarn_attention_factor(factor, *mscales)
    truncate = rope.find("truncate", bool)
    return YarnScaling(
        factor=factor,
        original_context_length=original,
        attention_factor=attention_factor,
        # Zero means the default, as in transformers.
        beta_fast=rope.find("beta_fast", float) or 32.0,
        beta_slow=rope.find("beta_slow", float) or 1.0,
        truncate=True if truncate is None else truncate,
    )


def _original_length(rope: JsonObject, config: JsonObject, max_positions: int) -> float:
    """Return the first context length; a key outside the rope settings wins, as in transformers."""
    key = "original_max_position_embeddings"
    length = config.find(key, float) or rope.find(key, float) or float(max_positions)
    if length <= 0:
        raise rope.error(key, f"is {length}", "a positive number")
    return length


READERS: dict[str, Callable[[JsonObject, JsonObject, int], RopeScaling | None]] = {
    "default": _read_none,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
