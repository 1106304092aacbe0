"""Writing a drafter in the format of DeepSpec or of speculators, as the loader reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError
from extkv.models.checkpoint import INDEX_FILE, SHARD_SUFFIX, SINGLE_FILE
from extkv.models.dspark.config_file import LAYER_CONFIG, NON_CAUSAL_WINDOW
from extkv.models.dspark.recognition import (
    GENERIC_ARCHITECTURE,
    METHOD,
    NATIVE_ARCHITECTURE,
    SPECULATORS_KEY,
)
from extkv.models.dspark.vocabulary import (
    DRAFT_TO_TARGET,
    TARGET_TO_DRAFT,
    flags_of,
    offsets_of,
)
from extkv.models.dspark.weights import SHAREABLE, drafter_slot_view, drafter_slots
from extkv.models.hf_config import CONFIG_FILE, FULL_ATTENTION, SLIDING_ATTENTION
from extkv.models.qwen3 import QWEN3
from extkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from extkv.models.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    import os

    import torch

    from extkv.models.config import ModelConfig
    from extkv.models.dspark.config import DSparkConfig
    from extkv.models.dspark.model import DSparkModel
    from extkv.models.dspark.weights import DSparkWeights
    from extkv.models.rope import RopeScaling

ROPE_TYPES = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}
# Fields of a scaling that a file calls otherwise.
ROPE_KEYS = {"original_context_length": "original_max_position_embeddings"}


def save_native(
    model: DSparkModel,
    directory: str | os.PathLike[str],
    *,
    has_shared: bool = True,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a drafter as DeepSpec does: `config.json` and `model.safetensors`.

    Args:
        model: The drafter.
        directory: Where the files go; made if it is missing, files in it replaced.
        has_shared: Whether embedding and head are written too where they are the target's, as
            DeepSpec does; extkv's loader needs neither.
        max_shard_bytes: Most bytes of tensors in a file; more than fit go to numbered shards with
            an index. None for one file.

    Raises:
        InvalidArgumentError: If one tensor is larger than a shard.
        OSError: If a file cannot be written.
    """
    tensors = _published(model.config, model.weights, has_shared=has_shared)
    _write(Path(directory), native_config(model.config, model.dtype), tensors, max_shard_bytes)


def save_speculators(
    model: DSparkModel,
    directory: str | os.PathLike[str],
    *,
    verifier: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a drafter as speculators does: `config.json` and `model.safetensors`.

    An embedding and a head that are the target's are left out.

    Args:
        model: The drafter.
        directory: Where the files go; made if it is missing, files in it replaced.
        verifier: Name or path of the target.
        max_shard_bytes: As in `save_native`.

    Raises:
        InvalidArgumentError: If one tensor is larger than a shard.
        OSError: If a file cannot be written.
    """
    tensors = _published(model.config, model.weights, has_shared=False)
    values = speculators_config(model.config, model.dtype, verifier=verifier)
    _write(Path(directory), values, tensors, max_shard_bytes)


def native_config(config: DSparkConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return a drafter's `config.json` in the format of DeepSpec."""
    values = {
        **_heads_config(config),
        **_backbone_config(config.backbone, dtype),
        "architectures": [NATIVE_ARCHITECTURE],
        "target_layer_ids": list(config.tap_layer_ids),
    }
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    return values


def speculators_config(
    config: DSparkConfig, dtype: torch.dtype, *, verifier: str | None = None
) -> dict[str, object]:
    """Return a drafter's `config.json` in the format of speculators."""
    values = {
        **_heads_config(config),
        SPECULATORS_KEY: METHOD,
        "architectures": [GENERIC_ARCHITECTURE],
        "dtype": _dtype_name(dtype),
        "draft_vocab_size": config.num_draft_tokens,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layer_ids],
        "target_hidden_size": config.backbone.hidden_size,
        NON_CAUSAL_WINDOW: config.backbone.sliding_window is not None,
        LAYER_CONFIG: _backbone_config(config.backbone, dtype),
        "speculators_config": {
            "algorithm": METHOD,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
            ],
            "verifier": {"name_or_path": verifier},
        },
    }
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    return values


def _heads_config(config: DSparkConfig) -> dict[str, object]:
    """Return the keys that both formats have."""
    values: dict[str, object] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.samples_from_anchor,
        "num_anchors": config.num_anchors,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_reads_markov,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    return values


def _backbone_config(backbone: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    has_window = backbone.sliding_window is not None
    full_ids = backbone.full_attention_layer_ids
    return {
        "model_type": QWEN3.model_type,
        "vocab_size": backbone.vocab_size,
        "hidden_size": backbone.hidden_size,
        "intermediate_size": backbone.intermediate_size,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": backbone.context_length,
        "rms_norm_eps": backbone.rms_norm_eps,
        "rope_parameters": _rope_config(backbone.rope_theta, backbone.rope_scaling),
        "attention_bias": backbone.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": backbone.tie_word_embeddings,
        "use_sliding_window": has_window,
        "sliding_window": backbone.sliding_window,
        "layer_types": [
            FULL_ATTENTION if not has_window or layer_id in full_ids else SLIDING_ATTENTION
            for layer_id in range(backbone.num_layers)
        ],
        "dtype": _dtype_name(dtype),
    }


def _rope_config(theta: float, scaling: RopeScaling | None) -> dict[str, object]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    fields = dataclasses.asdict(scaling)
    keys = {ROPE_KEYS.get(name, name): value for name, value in fields.items()}
    return {"rope_type": ROPE_TYPES[type(scaling)], "rope_theta": theta, **keys}


def _published(
    config: DSparkConfig, weights: DSparkWeights, *, has_shared: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter by their published names.

    Args:
        config: The drafter.
        weights: Its weights.
        has_shared: Whether those that are the target's are among them. A head of fewer rows than
            the drafter's tables is left out all the same.
    """
    tensors = {}
    for slot in drafter_slots(config):
        if slot.name not in weights.shared:
            tensors[slot.name] = drafter_slot_view(weights, slot)
        elif has_shared:
            tensor = getattr(weights.backbone, SHAREABLE[slot.name])
            if tuple(tensor.shape) == slot.shape:
                tensors[slot.name] = tensor
    if weights.target_ids is not None:
        tensors[DRAFT_TO_TARGET] = offsets_of(weights.target_ids)
        tensors[TARGET_TO_DRAFT] = flags_of(weights.target_ids, config.backbone.vocab_size)
    return tensors


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(
    directory: Path,
    values: dict[str, object],
    tensors: dict[str, torch.Tensor],
    max_shard_bytes: int | None,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shards = [tensors] if max_shard_bytes is None else _divided(tensors, max_shard_bytes)
    # A file of an earlier save would be read before an index, or beside it.
    for name in (SINGLE_FILE, INDEX_FILE):
        (directory / name).unlink(missing_ok=True)
    if len(shards) == 1:
        write_safetensors(directory / SINGLE_FILE, shards[0])
    else:
        _write_shards(directory, shards)
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _divided(
    tensors: dict[str, torch.Tensor], max_shard_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """Divide tensors into shards, in their order.

    Raises:
        InvalidArgumentError: If one is larger than a shard.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > max_shard_bytes:
            msg = f"max_shard_bytes is {max_shard_bytes:,}, {name} has {tensor.nbytes:,} bytes"
            raise InvalidArgumentError(msg)
        num_bytes += tensor.nbytes
        if num_bytes > max_shard_bytes:
            shards.append({})
            num_bytes = tensor.nbytes
        shards[-1][name] = tensor
    return shards


def _write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}{SHARD_SUFFIX}"
        write_safetensors(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (directory / INDEX_FILE).write_text(text, encoding="utf-8")
