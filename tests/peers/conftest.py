"""What a front end reads of a model, made from the packaged SmolLM2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from extkv.models import find_default_model, load_model
from extkv.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what a front end reads of a model: configuration and tokenizer."""
    directory = tmp_path_factory.mktemp("smollm2")
    path = find_default_model()
    loaded = load_model(path, dtype=torch.float32)
    config = loaded.config
    encoder = loaded.tokenizer._encoder
    eos = sorted(loaded.tokenizer.stop_token_ids)
    metadata = GGUFFile(path).metadata
    encoder.save(str(directory / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "max_position_embeddings": config.context_length,
            "eos_token_id": eos[0],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": encoder.id_to_token(eos[0]),
            "chat_template": metadata.require("tokenizer.chat_template", str),
        },
        "generation_config.json": {"eos_token_id": eos},
    }
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents))
    return directory
