"""From a model's shape to the layers of its cache: pools, block sizes, ranks."""

from __future__ import annotations

from pathlib import Path

import extkv
import pytest
from extkv.kv import FullAttentionSpec, Layer, MambaSpec, MLASpec, SlidingWindowSpec, plan_cache
from extkv.kv.model import ConfigFile, DecoderLayer, ModelShape, read_config_file, read_model_shape
from extkv.kv.model.attention import GroupedAttention
from extkv.kv.model.recurrent import GatedDeltaNet, Mamba1
from extkv.kv.model_layers import CacheKind, CacheSettings, cache_kinds, cache_layers

CONFIGS = Path(__file__).parent / "data/configs"
FULL = GroupedAttention(64, 4, 2, 16)  # 2 x 2 x 16 x 2 = 128 bytes per token
WINDOW = GroupedAttention(64, 4, 2, 16, window=128)
NET = GatedDeltaNet(64, 2, 4, 16, 16, 4)  # 3 x 128 x 2 + 4 x 16 x 16 x 2 = 2,816 bytes


def shape_of(*layers: DecoderLayer) -> ModelShape:
    return ModelShape("Test", 320, 64, layers, tie_word_embeddings=True)


def settings(**values) -> CacheSettings:
    return CacheSettings(**{"dtype": "bfloat16", "max_model_len": 4096, **values})


def layers_of(name: str, **values) -> list[Layer]:
    return cache_layers(read_model_shape(read_config_file(CONFIGS / name)), settings(**values))


def pools(layers: list[Layer]) -> list[list[str]]:
    return [names for names, _, _ in plan_cache(layers, max_blocks=2).buffers()]


def test_layers_of_one_kind_have_a_buffer_each():
    layers = layers_of("qwen3-8b")
    assert [layer.name for layer in layers] == [f"layers.{i}.attention" for i in range(36)]
    assert {layer.spec for layer in layers} == {FullAttentionSpec(16, 8, 128, "bfloat16")}
    assert pools(layers) == [[layer.name] for layer in layers]
    assert cache_kinds(layers) == (CacheKind("full attention", 36, 65_536, 65_536),)


def test_ranks_divide_heads_but_not_latents():
    assert layers_of("qwen3-8b", tensor_parallel_size=4)[0].spec.num_kv_heads == 2
    assert layers_of("qwen3-8b", tensor_parallel_size=16)[0].spec.num_kv_heads == 1
    latent = layers_of("deepseek-v3", tensor_parallel_size=8)
    assert {layer.spec for layer in latent} == {MLASpec(64)}
    assert cache_kinds(latent)[0].kind == "latent attention"
    packed = layers_of("deepseek-v3", kv_cache_dtype="fp8_ds_mla", block_size=32)
    assert packed[0].spec == MLASpec.fp8_ds_mla(32)


def test_a_hybrid_has_pools_of_one_attention_layer_and_the_layers_around_it():
    layers = layers_of("hybrid", max_model_len=262_144)
    assert len(pools(layers)) == 12
    assert sorted(map(len, pools(layers))) == [4] * 12
    full, recurrent = sorted(cache_kinds(layers), key=lambda kind: kind.kind)
    # vLLM says of this model: "Setting attention block size to 544 tokens".
    assert full == CacheKind("full attention", 12, 544 * 2048, 544 * 2048)
    assert recurrent == CacheKind("recurrent state", 36, 544 * 2048, 1_097_728)


def test_an_attention_block_beside_states_is_as_long_as_a_state_needs():
    shape = shape_of(DecoderLayer(FULL), DecoderLayer(recurrent=NET))
    # 2,816 bytes / 128 per token = 22 tokens, in steps of 16.
    assert {layer.spec.block_size for layer in cache_layers(shape, settings())} == {32, 4096}
    longer = cache_layers(shape, settings(block_size=48))
    assert longer[0].spec.bytes_per_block == longer[1].spec.bytes_per_block == 48 * 128
    wide = cache_layers(shape, settings(state_dtype="float32"))
    assert wide[0].spec.block_size == 48
    assert [layer.spec.padded_bytes for layer in wide if isinstance(layer.spec, MambaSpec)] == [
        48 * 128
    ]


def test_a_model_without_attention_keeps_its_states_as_they_are():
    layers = cache_layers(shape_of(DecoderLayer(recurrent=NET)), settings())
    assert layers[0].spec.bytes_per_block == 2_816
    assert layers[0].spec.block_size == 4096


def test_a_layer_with_both_is_two_layers_of_one_pool():
    layers = cache_layers(shape_of(*[DecoderLayer(FULL, NET)] * 3), settings())
    assert pools(layers) == [[f"layers.{i}.attention", f"layers.{i}.recurrent"] for i in range(3)]


def test_sliding_layers_take_turns_in_the_pools_of_full_ones():
    shape = shape_of(*[*[DecoderLayer(WINDOW)] * 5, DecoderLayer(FULL)] * 2)
    layers = cache_layers(shape, settings())
    # As in vLLM: two pools; five groups of two sliding layers and one of two full ones.
    assert sorted(map(len, pools(layers))) == [6, 6]
    assert all(layer.layouts[0].num_segments == 2 for layer in layers)
    assert isinstance(layers[0].spec, SlidingWindowSpec)
    assert {kind.kind for kind in cache_kinds(layers)} == {
        "attention over 128 tokens",
        "full attention",
    }


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "expected"),
    [(2, 3, [3, 2]), (13, 12, [2] * 12 + [1]), (2, 2, [2, 2]), (1, 4, [5]), (4, 7, [3, 3, 3, 2])],
)
def test_groups_have_the_size_of_the_smallest_kind(num_full, num_sliding, expected):
    shape = shape_of(*[DecoderLayer(FULL)] * num_full, *[DecoderLayer(WINDOW)] * num_sliding)
    found = pools(cache_layers(shape, settings()))
    assert sorted(map(len, found), reverse=True) == expected
    assert sum(map(len, found)) == num_full + num_sliding


def test_facts_of_a_hybrid_count_every_group_of_a_pool():
    layers = layers_of("hybrid", max_model_len=32_768)
    facts = plan_cache(layers, max_blocks=1).facts_json(32_768, 8192)
    assert '"num_block_tables":1' in facts
    assert '"fixed_blocks_per_request":3' in facts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size must be at least 1, got -1"),
        ({"kv_cache_dtype": "int4"}, "must be one of auto, fp8, fp8_ds_mla, got 'int4'"),
    ],
)
def test_refuses_settings_that_cannot_be(values, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        settings(**values)


@pytest.mark.parametrize(
    ("layer", "values", "message"),
    [
        (DecoderLayer(FULL), {"tensor_parallel_size": 3}, "4 attention heads"),
        (DecoderLayer(recurrent=NET), {"tensor_parallel_size": 4}, "2 key heads"),
        (DecoderLayer(FULL), {"kv_cache_dtype": "fp8_ds_mla"}, "MLA"),
    ],
)
def test_refuses_settings_that_do_not_suit_the_model(layer, values, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        cache_layers(shape_of(layer), settings(**values))


def test_kinds_of_attention_with_other_blocks_cannot_share_a_pool():
    other = GroupedAttention(64, 4, 4, 16)
    shape = shape_of(DecoderLayer(FULL), DecoderLayer(other))
    with pytest.raises(extkv.LayoutError, match="cannot share a pool"):
        plan_cache(cache_layers(shape, settings()), max_blocks=1)


def test_jamba_states_are_padded_to_its_attention():
    jamba = Mamba1(64, 128, 16, 4, 4)
    layers = cache_layers(shape_of(DecoderLayer(FULL), DecoderLayer(recurrent=jamba)), settings())
    # 3 x 128 x 2 + 128 x 16 x 2 = 4,864 bytes need 38 tokens of 128 bytes: 48.
    assert [layer.spec.bytes_per_block for layer in layers] == [6_144, 6_144]


def test_gemma_windows_reach_the_cache():
    values = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 1024,
    }
    shape = read_model_shape(ConfigFile(Path("config.json"), values))
    layers = cache_layers(shape, settings())
    assert sorted(map(len, pools(layers))) == [6, 6]
    facts = plan_cache(layers, max_blocks=1).facts_json(4096, 512)
    # Each of five groups holds (1,023 + 512) / 16 rounded up, and one more.
    assert '"fixed_blocks_per_request":485' in facts
