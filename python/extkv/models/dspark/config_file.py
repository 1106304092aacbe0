"""Reading a drafter's `config.json`: DeepSpec's own format, and that of speculators.

A key that would change the result and that the drafter does not know is refused instead of ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.dspark.config import DEFAULT_NUM_ANCHORS, MARKOV_HEAD_TYPES, DSparkConfig
from extkv.models.dspark.layout_keys import (
    NESTED,
    read_mask_token_id,
    read_samples_from_anchor,
    read_tap_layer_ids,
)
from extkv.models.dspark.recognition import DrafterFormat, find_format
from extkv.models.hf_config import CONFIG_FILE, parse_hf_config
from extkv.models.json_file import JsonObject, read_json
from extkv.models.qwen3 import QWEN3

if TYPE_CHECKING:
    from pathlib import Path

    from extkv.models.config import ModelConfig
    from extkv.models.dspark.config import MarkovHeadType

LAYER_CONFIG = "transformer_layer_config"
NON_CAUSAL_WINDOW = "sliding_window_non_causal"

# speculators writes only what differs from these, the defaults of transformers' Qwen3Config (5.17).
QWEN3_DEFAULTS: dict[str, object] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
}

# What a key may be; anything else asks for a computation that the drafter does not do.
PLAIN_VALUES: dict[str, tuple[object, ...]] = {
    "attention_sink_bias": (None, False),
    "logit_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "rope_is_neox_style": (None, True),
    "quantization_config": (None,),
}
PLAIN_NESTED_VALUES: dict[str, tuple[object, ...]] = {
    "attention_sink_bias": (None, False),
    "causal": (None, False),
    "use_swa": (None, False),
}


def read_drafter_config(directory: Path) -> DSparkConfig:
    """Read the `config.json` of a drafter in either format.

    Whether the confidence head has a bias stands in no file of this kind; the loader sets it from
    the tensors.

    Raises:
        UnsupportedDrafterError: If it is a drafter of DeepSeek-V4 or Gemma4.
        ModelFileError: If the file is missing or damaged, is no DSpark drafter, a key is missing or
            of the wrong type, a value is out of range, or a key asks for something the drafter does
            not do.
    """
    values = read_json(directory / CONFIG_FILE)
    reader = READERS[find_format(values)]
    _refuse_unsupported(values)
    try:
        return reader(values)
    except ModelFileError:
        raise
    except InvalidArgumentError as error:
        msg = f"model file {values.path}: {error}"
        raise ModelFileError(msg) from error


def _read_native(values: JsonObject) -> DSparkConfig:
    backbone = parse_hf_config(values, QWEN3)
    if backbone.sliding_window is not None:
        raise values.error(
            "sliding_window",
            f"is {backbone.sliding_window}",
            "null: where the window of a block begins is not stated",
        )
    markov_rank = values.require("markov_rank", int)
    has_confidence_head = values.require("enable_confidence_head", bool)
    if markov_rank > 0:
        values.require("markov_head_type", str)
    if has_confidence_head:
        values.require("confidence_head_with_markov", bool)
    return _make_config(values, backbone, samples_from_anchor=True)


def _read_speculators(values: JsonObject) -> DSparkConfig:
    layer_values = values.find_object(LAYER_CONFIG)
    if layer_values is None:
        raise values.error(LAYER_CONFIG, "is missing", "an object")
    model_type = layer_values.find("model_type", str)
    if model_type not in (None, QWEN3.model_type):
        raise layer_values.error("model_type", f"is {model_type!r:.80}", repr(QWEN3.model_type))
    _refuse_unsupported(layer_values)
    filled = JsonObject(
        layer_values.path, QWEN3_DEFAULTS | dict(layer_values.values), layer_values.prefix
    )
    backbone = parse_hf_config(filled, QWEN3)
    target_hidden_size = values.find("target_hidden_size", int)
    if target_hidden_size not in (None, backbone.hidden_size):
        raise values.error(
            "target_hidden_size",
            f"is {target_hidden_size}",
            f"hidden_size {backbone.hidden_size} of the drafter",
        )
    if backbone.sliding_window is not None and not values.find(NON_CAUSAL_WINDOW, bool):
        raise values.error(
            NON_CAUSAL_WINDOW, "is not true", f"true with sliding_window {backbone.sliding_window}"
        )
    block_size = values.require("block_size", int)
    is_anchor_first = _num_proposed(values) == block_size
    return _make_config(values, backbone, samples_from_anchor=is_anchor_first)


def _num_proposed(values: JsonObject) -> int | None:
    """Return how many tokens a speculators file says it drafts, which tells the layout."""
    section = values.find_object("speculators_config")
    proposals = None if section is None else section.values.get("proposal_methods")
    if section is None or not isinstance(proposals, list) or not proposals:
        return None
    if not isinstance(proposals[0], dict):
        raise section.error("proposal_methods", f"has {proposals[0]!r:.80}", "objects")
    return JsonObject(values.path, proposals[0], "proposal_methods.").find(
        "speculative_tokens", int
    )


def _make_config(
    values: JsonObject, backbone: ModelConfig, *, samples_from_anchor: bool
) -> DSparkConfig:
    """Read the keys that both formats have.

    Args:
        values: The file.
        backbone: The drafter's decoder.
        samples_from_anchor: The layout where the file does not name it.
    """
    num_target_layers = values.find("num_target_layers", int)
    nested = values.find_object(NESTED)
    if num_target_layers is None and nested is not None:
        num_target_layers = nested.find("num_target_layers", int)
    num_anchors = values.find("num_anchors", int)
    return DSparkConfig(
        backbone=backbone,
        tap_layer_ids=read_tap_layer_ids(values),
        mask_token_id=read_mask_token_id(values),
        block_size=values.require("block_size", int),
        samples_from_anchor=read_samples_from_anchor(values, default=samples_from_anchor),
        draft_vocab_size=values.find("draft_vocab_size", int),
        markov_rank=values.find("markov_rank", int) or 0,
        markov_head_type=_read_head_type(values),
        has_confidence_head=values.find("enable_confidence_head", bool) or False,
        confidence_reads_markov=values.find("confidence_head_with_markov", bool) or False,
        num_target_layers=num_target_layers,
        num_anchors=DEFAULT_NUM_ANCHORS if num_anchors is None else num_anchors,
    )


def _read_head_type(values: JsonObject) -> MarkovHeadType:
    found = values.find("markov_head_type", str)
    for head_type in MARKOV_HEAD_TYPES:
        if found in (None, head_type):
            return head_type
    known = ", ".join(MARKOV_HEAD_TYPES)
    raise values.error("markov_head_type", f"is {found!r:.80}", f"one of {known}")


def _refuse_unsupported(values: JsonObject) -> None:
    nested = values.find_object(NESTED)
    sources = [(values, PLAIN_VALUES)]
    if nested is not None:
        sources.append((nested, PLAIN_NESTED_VALUES))
    for source, plain in sources:
        for key, allowed in plain.items():
            value = source.values.get(key)
            if value not in allowed:
                expected = " or ".join(
                    "no such key" if item is None else str(item).lower() for item in allowed[:2]
                )
                raise source.error(key, f"is {value!r:.80}", expected)


READERS = {
    DrafterFormat.NATIVE: _read_native,
    DrafterFormat.SPECULATORS: _read_speculators,
}
