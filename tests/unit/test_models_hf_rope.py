"""RoPE settings of a `config.json`, older and newer: read, or refused by name."""

import json

import pytest
import torch
from extkv.errors import ModelFileError
from extkv.models import ModelConfig
from extkv.models.hf_config import read_hf_config
from extkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, rope_tables

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40_960,
}


@pytest.fixture
def read(tmp_path):
    def read_changed(**changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return read_hf_config(tmp_path)

    return read_changed


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (None, None),
        ({}, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, LinearScaling(2.0)),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            Llama3Scaling(8.0, 1.0, 4.0, 40_960),
        ),
        (YARN | {"attention_factor": 0.5, "beta_fast": 0}, YarnScaling(4.0, 32_768, 0.5)),
        (
            YARN | {"truncate": False, "attention_factor": 1},
            YarnScaling(4.0, 32_768, 1.0, 32, 1, False),
        ),
    ],
)
def test_rope_scaling_is_read(read, key, rope, scaling):
    assert read(**{key: rope}).rope_scaling == scaling


def test_empty_older_settings_leave_the_newer_ones(read):
    rope = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_scaling={}, rope_parameters=rope).rope_scaling == LinearScaling(2.0)


def test_theta_inside_the_rope_settings_wins(read):
    assert read(rope_parameters={"rope_theta": 7.0}).rope_theta == 7.0


def test_the_first_context_length_outside_the_rope_settings_wins(read):
    config = read(rope_scaling=YARN, original_max_position_embeddings=1024)
    assert config.rope_scaling.original_context_length == 1024


@pytest.mark.parametrize(
    ("rope", "length"), [(YARN, 131_072), (YARN | {"factor": 1.1}, 40_960), (None, 40_960)]
)
def test_yarn_lengthens_the_context(read, rope, length):
    assert read(rope_scaling=rope).context_length == length


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type is 'dynamic', expected one of default",
        ),
        ({"type": "longrope", "short_factor": [1]}, "rope_type is 'longrope', expected one of"),
        ({"rope_type": "su"}, "rope_type is 'su', expected one of default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "key rope_scaling.factor is missing, expected float"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor is '2', expected float"),
        ({"rope_type": "linear", "factor": 0}, "rope scaling: factor is 0.0, expected a positive"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4.0, expected more than low_freq_factor 4.0",
        ),
        (YARN | {"factor": 1e300, "original_max_position_embeddings": 1e18}, "context_length is"),
        (
            YARN | {"original_max_position_embeddings": -1},
            "embeddings is -1.0, expected a positive",
        ),
        (YARN | {"rope_theta": 1.0}, "rope_theta is 1.0, yarn needs more than 1"),
        ({"rope_type": "default", "mrope_section": [1]}, "mrope_section is given, expected no"),
        ({"partial_rotary_factor": 0.25}, "rope_scaling.partial_rotary_factor is 0.25"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is an object, expected one"),
        ("yarn", "key rope_scaling is 'yarn', expected an object"),
    ],
)
def test_rejects_rope_settings_that_are_not_known(read, rope, message):
    with pytest.raises(ModelFileError, match=message):
        read(rope_scaling=rope)


def test_rope_tables_are_float32_and_hold_every_position():
    config = ModelConfig(8, 8, 8, 1, 1, 1, 6, 100, rope_theta=100.0)
    cosine, sine = rope_tables(config, 40, torch.device("cpu"))
    assert cosine.shape == sine.shape == (40, 3)
    angles = torch.arange(40.0)[:, None] / 100.0 ** (torch.arange(3.0) / 3)
    torch.testing.assert_close(cosine, angles.cos())
    torch.testing.assert_close(sine, angles.sin())
