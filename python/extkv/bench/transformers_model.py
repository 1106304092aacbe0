"""A transformers model over the weights of a model that extkv has loaded; nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from extkv.errors import MissingPackageError
from extkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from extkv.models.weights import slot_view, weight_slots

if TYPE_CHECKING:
    from extkv.models import DecoderModel, ModelConfig


def require_transformers() -> Any:  # noqa: ANN401, a module
    """Return the package.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "the bench compares with transformers, which is not installed: "
            "run `pip install transformers`"
        ) from error
    return transformers


def transformers_model(model: DecoderModel) -> Any:  # noqa: ANN401, transformers is optional
    """Return a transformers model of the same weights, in evaluation mode, without stop tokens.

    Raises:
        MissingPackageError: If transformers is not installed.
    """
    transformers = require_transformers()
    kind = getattr(transformers, model.config.architecture)
    config = kind.config_class(**config_values(model.config), dtype=model.dtype)
    with torch.device("meta"):
        peer = kind(config)
    weights = {slot.name: slot_view(model.weights, slot) for slot in weight_slots(model.config)}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    peer.load_state_dict(weights, assign=True)
    # Its frequencies are in no checkpoint: they are computed where the weights are.
    with model.device:
        peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.eval().requires_grad_(requires_grad=False)


def config_values(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration as the `config.json` of transformers has it."""
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_values(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.qk_norm:
        full = config.full_attention_layer_ids
        values["use_sliding_window"] = config.sliding_window is not None
        values["layer_types"] = [
            "full_attention"
            if config.sliding_window is None or layer_id in full
            else "sliding_attention"
            for layer_id in range(config.num_layers)
        ]
    return values


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if isinstance(scaling, LinearScaling):
        values |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        values |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": int(scaling.original_context_length),
        }
    elif isinstance(scaling, YarnScaling):
        values |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": int(scaling.original_context_length),
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    return values
