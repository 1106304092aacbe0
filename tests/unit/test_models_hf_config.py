"""`config.json`: each setting is read as transformers does, or refused by name."""

import pytest
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models import QWEN3_8B, ModelConfig
from extkv.models.hf_config import read_hf_config
from support.published_configs import ABSENT, LLAMA, MISTRAL, QWEN3, write_config

TEN = pytest.mark.parametrize("value", ["10", 10.5, True, [10], 2**63])


@pytest.fixture
def read(tmp_path):
    def read_changed(base, **changes):
        write_config(tmp_path, base, **changes)
        return read_hf_config(tmp_path)

    return read_changed


def test_qwen3_8b_is_read_as_published(read):
    assert read(QWEN3) == QWEN3_8B


def test_llama_is_read_with_its_defaults(read):
    config = read(LLAMA, num_key_value_heads=ABSENT, rope_theta=ABSENT, rms_norm_eps=ABSENT)
    assert (config.num_kv_heads, config.head_dim) == (32, 128)
    assert (config.rope_theta, config.rms_norm_eps) == (10_000.0, 1e-6)
    assert not config.qk_norm


def test_defaults_of_a_family_are_those_of_transformers(read):
    assert read(QWEN3, head_dim=ABSENT, num_attention_heads=64).head_dim == 128
    assert read(QWEN3, num_key_value_heads=ABSENT, num_attention_heads=64).num_kv_heads == 32
    assert read(QWEN3, num_key_value_heads=None).num_kv_heads == 32
    assert read(MISTRAL, num_key_value_heads=ABSENT).num_kv_heads == 8


def test_head_dim_is_independent_of_the_hidden_size(read):
    config = read(QWEN3, hidden_size=1000)
    assert (config.hidden_size, config.head_dim) == (1000, 128)


def test_biases_are_read(read):
    config = read(LLAMA, attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.mlp_bias) == (True, True)


@pytest.mark.parametrize("architectures", [ABSENT, None, []])
def test_model_type_serves_where_there_are_no_architectures(read, architectures):
    assert read(QWEN3, architectures=architectures).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["Qwen3Model", "X"]}, "Qwen3Model, X"),
        ({"architectures": None, "model_type": "gpt2"}, "model type gpt2"),
        ({"architectures": None, "model_type": None}, "model type None"),
    ],
)
def test_rejects_an_unknown_architecture_and_says_which_are_known(read, changes, found):
    message = (
        f"architecture is {found}, known: LlamaForCausalLM, Qwen3ForCausalLM, MistralForCausalLM"
    )
    with pytest.raises(ModelFileError, match=message):
        read(QWEN3, **changes)


@pytest.mark.parametrize("value", [ABSENT, None])
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_rejects_a_missing_size(read, key, value):
    with pytest.raises(ModelFileError, match=f"config.json: key {key} is missing, expected int"):
        read(QWEN3, **{key: value})


@TEN
def test_rejects_a_size_of_another_type(read, value):
    with pytest.raises(ModelFileError, match=r"key hidden_size is .*, expected int"):
        read(QWEN3, hidden_size=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_layers is 0, expected a positive number"),
        ({"num_attention_heads": 12}, "num_heads 12 is not a multiple of num_kv_heads 8"),
        ({"head_dim": 5}, "head_dim is 5, expected an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1}, "rope_theta is -1.0"),
        ({"max_position_embeddings": 2**40}, "context_length is 1099511627776, supported"),
        ({"hidden_act": "gelu"}, "key hidden_act is 'gelu', expected 'silu'"),
        ({"mlp_bias": True}, "key mlp_bias is true, expected false for Qwen3ForCausalLM"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "key quantization_config asks for fp8, expected no quantization",
        ),
        ({"partial_rotary_factor": 0.5}, "key partial_rotary_factor is 0.5, expected 1.0"),
        ({"architectures": "Qwen3ForCausalLM"}, "key architectures is .*, expected an array of"),
    ],
)
def test_rejects_what_the_forward_pass_does_not_do(read, changes, message):
    with pytest.raises(ModelFileError, match=message):
        read(QWEN3, **changes)


def test_rejects_heads_that_do_not_divide_the_hidden_size(read):
    with pytest.raises(ModelFileError, match="hidden_size 4096 is not a multiple of num_heads 24"):
        read(LLAMA, num_attention_heads=24)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{'a': 1}", "not valid JSON: Expecting property name"),
        (b'{"a": ', "not valid JSON"),
        (b"[" * 10_000, "not valid JSON"),
        (b"[]", r"holds \[\], expected a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at 7"),
    ],
)
def test_rejects_malformed_json(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=f"config.json: {message}"):
        read_hf_config(tmp_path)


def test_rejects_a_directory_without_a_config(tmp_path):
    with pytest.raises(ModelFileError, match=r"config.json: cannot be opened: No such file"):
        read_hf_config(tmp_path)


# A Qwen3 file turns windows on by a key of its own; without it the width counts for nothing.
@pytest.mark.parametrize(
    ("base", "changes", "window"),
    [
        (QWEN3, {"sliding_window": ABSENT}, None),
        (QWEN3, {"sliding_window": None}, None),
        (QWEN3, {"sliding_window": 128}, None),
        (QWEN3, {"sliding_window": 128, "use_sliding_window": ABSENT}, None),
        (QWEN3, {"sliding_window": None, "use_sliding_window": True}, None),
        (QWEN3, {"sliding_window": 128, "use_sliding_window": True}, 128),
        (QWEN3, {"sliding_window": ABSENT, "use_sliding_window": True}, 4096),
        (MISTRAL, {"sliding_window": ABSENT}, 4096),
        (MISTRAL, {"sliding_window": None}, None),
        (MISTRAL, {"sliding_window": 128}, 128),
        (LLAMA, {"sliding_window": ABSENT}, None),
        (LLAMA, {"sliding_window": None}, None),
    ],
)
def test_sliding_window_is_read_as_transformers_does(read, base, changes, window):
    assert read(base, **changes).sliding_window == window


@pytest.mark.parametrize("base", [QWEN3, QWEN3 | {"use_sliding_window": True}, MISTRAL, LLAMA])
@pytest.mark.parametrize("window", [0, -1])
def test_rejects_a_sliding_window_of_no_tokens(read, base, window):
    message = f"key sliding_window is {window}, expected a positive number or null"
    with pytest.raises(ModelFileError, match=message):
        read(base, sliding_window=window)


def test_rejects_a_sliding_window_where_the_family_has_none(read):
    with pytest.raises(ModelFileError, match="sliding_window is 128, expected null for Llama"):
        read(LLAMA, sliding_window=128)


def test_layers_below_max_window_layers_see_everything(read):
    config = read(QWEN3, sliding_window=128, use_sliding_window=True, max_window_layers=30)
    windows = [config.layer_window(layer_id) for layer_id in range(36)]
    assert windows == [None] * 30 + [128] * 6


def test_a_window_as_long_as_the_context_is_none_in_every_layer(read):
    config = read(MISTRAL, sliding_window=8192)
    assert (config.sliding_window, config.layer_window(0)) == (8192, None)


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention"], "layer_types has 1 entries, expected num_hidden_layers 36"),
        (["chunked"] * 36, "layer_types has 'chunked', expected full_attention or sliding"),
    ],
)
def test_rejects_layer_types_that_do_not_fit(read, layer_types, message):
    with pytest.raises(ModelFileError, match=message):
        read(QWEN3, sliding_window=128, use_sliding_window=True, layer_types=layer_types)


def test_rejects_sliding_layers_without_a_window(read):
    with pytest.raises(ModelFileError, match="layer_types has sliding_attention, expected none"):
        read(QWEN3, layer_types=["sliding_attention"] * 36)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(InvalidArgumentError, match="sliding_window is 0"):
        ModelConfig(8, 8, 8, 1, 1, 1, 6, 100, sliding_window=0)
