"""What a model file offers once it is opened, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.errors import ModelFileError
from extkv.models.chat_template import ChatTemplate
from extkv.models.checkpoint import Checkpoint
from extkv.models.generation import GenerationDefaults, read_generation_defaults
from extkv.models.gguf_config import find_gguf_family, read_gguf_config
from extkv.models.gguf_source import GGUFWeights
from extkv.models.gguf_tokenizer import read_gguf_generation_defaults, read_gguf_tokenizer
from extkv.models.hf_config import CONFIG_FILE, read_hf_config
from extkv.models.hf_tokenizer import (
    read_hf_chat_template,
    read_hf_tokenizer,
    read_tokenizer_config,
)
from extkv.models.json_file import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from extkv.models.config import ModelConfig
    from extkv.models.gguf_file import GGUFFile
    from extkv.models.tokenizer import Tokenizer
    from extkv.models.weight_loading import WeightSource


@dataclass(frozen=True)
class ModelSource:
    """Hold what was read from a model file, and the way to its weights.

    Attributes:
        path: The file or directory.
        config: Configuration of the model.
        tokenizer: Text to token ids and back.
        chat_template: The template of the file, or None.
        generation: Special tokens and sampling defaults.
        weights: Reads the tensors.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    weights: WeightSource


def open_model(path: Path) -> ModelSource:
    """Open a GGUF file or a Hugging Face directory and check all of it but the weights' values.

    Raises:
        ModelFileError: If something is missing, damaged, or of a kind that is not known.
    """
    return _open_hf_directory(path) if path.is_dir() else _open_gguf_file(path)


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a GGUF file, or of a directory with a `config.json`.

    Raises:
        ModelFileError: If it is missing, damaged, or of a kind that is not known.
    """
    if path.is_dir():
        return read_hf_config(path)
    file = _open_gguf(path)
    return read_gguf_config(file.metadata, file.tensor_names)


def _open_gguf(path: Path) -> GGUFFile:
    # Imported late: only GGUF files need the gguf library.
    from extkv.models.gguf_file import GGUFFile

    return GGUFFile(path)


def _open_gguf_file(path: Path) -> ModelSource:
    file = _open_gguf(path)
    config = read_gguf_config(file.metadata, file.tensor_names)
    tokenizer = read_gguf_tokenizer(file.metadata)
    if tokenizer.vocab_size != config.vocab_size:
        msg = (
            f"model file {path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model {config.vocab_size}"
        )
        raise ModelFileError(msg)
    return ModelSource(
        path,
        config,
        tokenizer,
        ChatTemplate.from_metadata(file.metadata),
        read_gguf_generation_defaults(file.metadata),
        GGUFWeights(file, find_gguf_family(file.metadata), config.head_dim),
    )


def _open_hf_directory(path: Path) -> ModelSource:
    config = read_hf_config(path)
    generation = read_generation_defaults(path, read_json(path / CONFIG_FILE), config.vocab_size)
    tokenizer_config = read_tokenizer_config(path)
    tokenizer = read_hf_tokenizer(
        path,
        tokenizer_config,
        vocab_size=config.vocab_size,
        eos_token_ids=generation.eos_token_ids,
    )
    chat_template = read_hf_chat_template(path, tokenizer_config)
    return ModelSource(path, config, tokenizer, chat_template, generation, Checkpoint(path))
