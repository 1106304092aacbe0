"""Reading a model's configuration from the `config.json` of a Hugging Face directory.

Missing keys take the values that transformers (5.17) gives them. A key that would change the result
and that the decoder does not know is refused instead of ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.config import ModelConfig, divide_heads
from extkv.models.hf_rope import read_rope
from extkv.models.json_file import read_json
from extkv.models.known_families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from extkv.models.family import Family
    from extkv.models.json_file import JsonObject

CONFIG_FILE = "config.json"
BIAS_KEYS = ("attention_bias", "mlp_bias")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def read_hf_config(directory: Path) -> ModelConfig:
    """Read the `config.json` of a directory.

    Raises:
        ModelFileError: If the file is missing or no JSON object, the architecture is not known, a
            key is missing or of the wrong type, a value is out of range, or a key asks for
            something the forward pass does not do.
    """
    values = read_json(directory / CONFIG_FILE)
    return parse_hf_config(values, _find_family(values))


def parse_hf_config(values: JsonObject, family: Family) -> ModelConfig:
    """Read the keys of a `config.json` as those of a family, whatever architecture it names.

    Raises:
        ModelFileError: As `read_hf_config`.
    """
    _refuse_unsupported(values, family)
    try:
        return _read_config(values, family)
    except ModelFileError:
        raise
    except InvalidArgumentError as error:
        msg = f"model file {values.path}: {error}"
        raise ModelFileError(msg) from error


def _find_family(values: JsonObject) -> Family:
    """Return the family that `architectures` names, or `model_type` where there are none."""
    architectures = values.find_list("architectures", str)
    model_type = values.find("model_type", str)
    for family in FAMILIES:
        is_named = family.architecture in architectures if architectures else False
        if is_named or (not architectures and model_type == family.model_type):
            return family
    found = ", ".join(architectures) if architectures else f"model type {model_type}"
    known = ", ".join(family.architecture for family in FAMILIES)
    msg = f"model file {values.path}: architecture is {found}, known: {known}"
    raise ModelFileError(msg)


def _read_config(values: JsonObject, family: Family) -> ModelConfig:
    num_heads = values.require("num_attention_heads", int)
    hidden_size = values.require("hidden_size", int)
    rms_norm_eps = values.find("rms_norm_eps", float)
    max_positions = values.require("max_position_embeddings", int)
    rope = read_rope(values, max_positions)
    num_layers = values.require("num_hidden_layers", int)
    sliding_window, full_layers = _read_windows(values, family, num_layers)
    return ModelConfig(
        vocab_size=values.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=values.require("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_read_num_kv_heads(values, family, num_heads),
        head_dim=_read_head_dim(values, family, hidden_size, num_heads),
        context_length=rope.context_length,
        rms_norm_eps=1e-6 if rms_norm_eps is None else rms_norm_eps,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        architecture=family.architecture,
        tie_word_embeddings=values.find("tie_word_embeddings", bool) or False,
        qk_norm=family.qk_norm,
        attention_bias=values.find("attention_bias", bool) or False,
        mlp_bias=values.find("mlp_bias", bool) or False,
        sliding_window=sliding_window,
        full_attention_layer_ids=full_layers,
    )


def _read_num_kv_heads(values: JsonObject, family: Family, num_heads: int) -> int:
    """Return the number of key heads; null means one per query head, absent the default."""
    default = family.default_num_kv_heads
    if "num_key_value_heads" not in values.values and default is not None:
        return default
    num_kv_heads = values.find("num_key_value_heads", int)
    return num_heads if num_kv_heads is None else num_kv_heads


def _read_head_dim(values: JsonObject, family: Family, hidden_size: int, num_heads: int) -> int:
    head_dim = values.find("head_dim", int)
    if head_dim is None:
        head_dim = family.default_head_dim
    return divide_heads(hidden_size, num_heads) if head_dim is None else head_dim


def _read_windows(
    values: JsonObject, family: Family, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """Return the sliding window and the layers that do not slide.

    A window of 0 is refused always: nothing says whether it means none or an empty one.
    """
    window = values.find("sliding_window", int)
    if "sliding_window" not in values.values:
        window = family.default_window
    if window is not None and window < 1:
        raise values.error("sliding_window", f"is {window}", "a positive number or null")
    layer_types = values.find_list("layer_types", str)
    is_off = family.window == "flag" and not values.find("use_sliding_window", bool)
    if window is None or is_off:
        if layer_types is not None and set(layer_types) != {FULL_ATTENTION}:
            raise values.error(
                "layer_types", f"has {SLIDING_ATTENTION}", "none without a sliding window"
            )
        return None, frozenset()
    if family.window == "never":
        raise values.error("sliding_window", f"is {window}", f"null for {family.architecture}")
    if family.window == "always":
        return window, frozenset()
    return window, _full_layers(values, layer_types, num_layers)


def _full_layers(
    values: JsonObject, layer_types: list[str] | None, num_layers: int
) -> frozenset[int]:
    if layer_types is None:
        # Absent means 28 to transformers; a file that slides and does not say where is refused.
        first_sliding = values.require("max_window_layers", int)
        return frozenset(range(min(first_sliding, num_layers)))
    if len(layer_types) != num_layers:
        raise values.error(
            "layer_types", f"has {len(layer_types)} entries", f"num_hidden_layers {num_layers}"
        )
    for layer_type in layer_types:
        if layer_type not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise values.error(
                "layer_types", f"has {layer_type!r:.80}", f"{FULL_ATTENTION} or {SLIDING_ATTENTION}"
            )
    return frozenset(
        layer_id for layer_id, kind in enumerate(layer_types) if kind == FULL_ATTENTION
    )


def _refuse_unsupported(values: JsonObject, family: Family) -> None:
    activation = values.find("hidden_act", str)
    if activation not in (None, "silu"):
        raise values.error("hidden_act", f"is {activation!r}", "'silu'")
    quantization = values.find_object("quantization_config")
    if quantization is not None:
        method = quantization.find("quant_method", str)
        raise values.error("quantization_config", f"asks for {method}", "no quantization")
    for key in BIAS_KEYS:
        if values.find(key, bool) and key not in family.biases:
            raise values.error(key, "is true", f"false for {family.architecture}")
