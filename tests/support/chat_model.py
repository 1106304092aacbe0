"""A tiny random model in a Hugging Face directory, with a byte tokenizer and a chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from extkv.models.safetensors_writer import write_safetensors
from support.hf_reference import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>"
    "{% endfor %}assistant: "
)


def write_chat_model(directory: Path, *, seed: int = 0) -> Path:
    """Write a model whose next token depends on the one before most, so that it can be drafted."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(directory)
    config = {"chat_template": TEMPLATE, "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5

    vocab, hidden, mlp = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
    tensors = {
        "model.embed_tokens.weight": draw(vocab, hidden, scale=6.0),
        "lm_head.weight": draw(vocab, hidden, scale=4.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": draw(32, hidden),
            f"{prefix}self_attn.k_proj.weight": draw(16, hidden),
            f"{prefix}self_attn.v_proj.weight": draw(16, hidden),
            f"{prefix}self_attn.o_proj.weight": draw(hidden, 32, scale=0.3),
            f"{prefix}mlp.gate_proj.weight": draw(mlp, hidden),
            f"{prefix}mlp.up_proj.weight": draw(mlp, hidden),
            f"{prefix}mlp.down_proj.weight": draw(hidden, mlp, scale=0.5),
        }
    write_safetensors(directory / "model.safetensors", tensors)
    return directory
