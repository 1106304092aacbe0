"""What is known of a model before any weight is read: its shape and its size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.errors import ModelFileError
from extkv.models.checkpoint import INDEX_FILE, LM_HEAD, is_derived, read_weight_map
from extkv.models.hf_config import CONFIG_FILE
from extkv.models.json_file import read_json
from extkv.models.model_source import read_model_config
from extkv.models.weights import count_parameters, weight_slots

if TYPE_CHECKING:
    import os

    import torch

    from extkv.models.config import ModelConfig

STORED_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_ITEM_BYTES = 8


@dataclass(frozen=True)
class ModelFacts:
    """Describe a model.

    Attributes:
        architecture: Name of the architecture.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads.
        head_dim: Width of one head.
        hidden_size: Width of the residual stream.
        vocab_size: Number of token ids.
        max_position_embeddings: Largest number of tokens of one sequence.
        num_parameters: Number of weights; a tied head counts once.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the weights in a dtype."""
        return self.num_parameters * dtype.itemsize


def model_facts(path: str | os.PathLike[str]) -> ModelFacts:
    """Read the facts of a model from its header alone.

    Args:
        path: A GGUF file, or a directory with a `config.json`; weights need not be there. Where
            there is a `model.safetensors.index.json`, its `total_size` is compared.

    Raises:
        ModelFileError: If the header is missing, damaged, or of a kind that is not known, or the
            index has another size than the model.
    """
    source = Path(path)
    config = read_model_config(source)
    if (source / INDEX_FILE).is_file():
        _check_total_size(source, config)
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context_length,
        num_parameters=count_parameters(config),
    )


def _check_total_size(directory: Path, config: ModelConfig) -> None:
    """Compare the size that an index states with that of the weights in the stored dtype.

    Norms and biases may be stored wider, and tensors that are never read may be there.
    """
    index = read_json(directory / INDEX_FILE)
    metadata = index.find_object("metadata")
    total_bytes = None if metadata is None else metadata.find("total_size", float)
    values = read_json(directory / CONFIG_FILE)
    stored = values.find("dtype", str) or values.find("torch_dtype", str)
    item_bytes = STORED_ITEM_BYTES.get(stored or "")
    if total_bytes is None or item_bytes is None:
        return
    least = count_parameters(config) * item_bytes
    most = least + _most_extra_bytes(config, read_weight_map(index))
    if not least <= total_bytes <= most:
        msg = (
            f"model file {index.path}: total_size is {int(total_bytes)}, a model of this "
            f"configuration has {least} bytes in {stored}"
        )
        raise ModelFileError(msg)


def _most_extra_bytes(config: ModelConfig, shards: dict[str, str]) -> int:
    num_narrow = sum(slot.num_elements for slot in weight_slots(config) if slot.kind != "matrix")
    num_derived = sum(map(is_derived, shards)) * config.head_dim
    num_head = 0
    if config.tie_word_embeddings and LM_HEAD in shards:
        num_head = config.vocab_size * config.hidden_size
    return (num_narrow + num_derived + num_head) * MAX_ITEM_BYTES
