"""GGUF metadata: what the forward pass cannot do is refused, with what was found."""

from pathlib import Path

import pytest
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.config import ModelConfig
from extkv.models.gguf_config import read_gguf_config
from extkv.models.gguf_metadata import GGUFMetadata

VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 40,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 500.0,
    "llama.vocab_size": 11,
}


def read(*, tensor_names=("output.weight",), **changes):
    values = VALUES | {key.replace("__", "."): value for key, value in changes.items()}
    present = {key: value for key, value in values.items() if value is not None}
    return read_gguf_config(GGUFMetadata(Path("tiny.gguf"), present), tensor_names)


def test_reads_all_fields():
    assert read() == ModelConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        context_length=128,
        rms_norm_eps=1e-6,
        rope_theta=500.0,
    )


def test_the_embedding_is_the_output_head_where_the_file_has_none():
    assert read(tensor_names=("token_embd.weight",)).tie_word_embeddings
    assert not read().tie_word_embeddings


def test_reads_a_qwen3_file():
    values = {key.replace("llama.", "qwen3."): value for key, value in VALUES.items()}
    values |= {"general.architecture": "qwen3", "qwen3.attention.key_length": 16}
    config = read_gguf_config(GGUFMetadata(Path("tiny.gguf"), values), ())
    assert (config.architecture, config.qk_norm) == ("Qwen3ForCausalLM", True)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 2, 500.0)


def test_rejects_rope_scaling_of_a_qwen3_file():
    values = {key.replace("llama.", "qwen3."): value for key, value in VALUES.items()}
    values |= {"general.architecture": "qwen3", "qwen3.rope.scaling.type": "yarn"}
    with pytest.raises(ModelFileError, match=r"qwen3.rope.scaling.type is 'yarn', supported"):
        read_gguf_config(GGUFMetadata(Path("tiny.gguf"), values), ())


def test_missing_optional_keys_take_the_defaults_of_gguf():
    config = read(
        llama__attention__head_count_kv=None,
        llama__rope__freq_base=None,
        llama__vocab_size=None,
        tokenizer__ggml__tokens=["a", "b", "c"],
    )
    assert (config.num_kv_heads, config.rope_theta, config.vocab_size) == (6, 10_000.0, 3)


def test_key_length_sets_head_dim():
    assert read(llama__attention__key_length=8).head_dim == 8


@pytest.mark.parametrize("key", [key for key in VALUES if key.endswith(("count", "length"))])
def test_rejects_a_missing_key(key):
    with pytest.raises(ModelFileError, match=f"tiny.gguf: metadata key {key} is missing, expected"):
        read(**{key: None})


def test_rejects_an_unknown_architecture():
    with pytest.raises(ModelFileError, match="architecture is 'mamba', known: llama, qwen3"):
        read(general__architecture="mamba")


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, 2]])
def test_rejects_a_key_of_another_type(value):
    with pytest.raises(ModelFileError, match=r"llama.block_count is .*, expected int"):
        read(llama__block_count=value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type is 'yarn', supported: 'none'"),
        ("llama.rope.scaling.factor", 8.0, "llama.rope.scaling.factor is 8.0, supported: 1.0"),
        ("llama.rope.scale_linear", 2.0, "llama.rope.scale_linear is 2.0, supported: 1.0"),
        ("llama.expert_count", 8, "llama.expert_count is 8, supported: 0"),
        ("llama.attention.sliding_window", 64, "sliding_window is 64, supported: 0"),
        ("llama.rope.dimension_count", 2, "dimension_count is 2, expected head_dim 4"),
        ("llama.attention.value_length", 8, "value_length is 8, expected head_dim 4"),
    ],
)
def test_rejects_what_the_forward_pass_does_not_do(key, value, message):
    with pytest.raises(ModelFileError, match=message):
        read(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 0, "num_layers is 0, expected a positive number"),
        ("llama.rope.freq_base", float("nan"), "rope_theta is nan"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf"), "rms_norm_eps is inf"),
        ("llama.attention.head_count_kv", 4, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ("llama.attention.head_count", 5, "hidden_size 24 is not a multiple of num_heads 5"),
        ("llama.attention.head_count", 0, "hidden_size 24 is not a multiple of num_heads 0"),
        ("llama.attention.key_length", 5, "head_dim is 5, expected an even number"),
        ("llama.context_length", 2**24 + 1, "context_length is 16777217, supported: 16777216"),
    ],
)
def test_rejects_values_out_of_range(key, value, message):
    with pytest.raises(ModelFileError, match=message):
        read(**{key: value})


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(InvalidArgumentError, match="head_dim is 3"):
        ModelConfig(
            vocab_size=1,
            hidden_size=3,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=3,
            context_length=1,
        )
