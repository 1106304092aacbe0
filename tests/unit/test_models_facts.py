"""Facts of a model come from its header alone, and agree with what was published."""

import json

import pytest
import torch
from extkv.errors import ModelFileError
from extkv.models import find_default_model, model_facts
from support.published_configs import ABSENT, LLAMA, MISTRAL, QWEN3, write_config


def write_index(directory, **values):
    (directory / "model.safetensors.index.json").write_text(json.dumps(values))


def test_facts_of_qwen3_8b(tmp_path):
    write_config(tmp_path, QWEN3)
    facts = model_facts(tmp_path)
    assert facts.num_parameters == 8_190_735_360
    assert facts.weight_bytes(torch.bfloat16) == 16_381_470_720
    assert (facts.architecture, facts.num_layers) == ("Qwen3ForCausalLM", 36)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (32, 8, 128)
    assert (facts.hidden_size, facts.vocab_size) == (4096, 151_936)
    assert facts.max_position_embeddings == 40_960


@pytest.mark.parametrize(
    ("base", "changes", "num_parameters"),
    [
        (LLAMA, {}, 8_030_261_248),
        # Llama-3.2-1B: tied.
        (
            LLAMA,
            {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
            1_235_814_400,
        ),
        # Qwen3-0.6B: tied, heads wider than the hidden size.
        (
            QWEN3,
            {
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "tie_word_embeddings": True,
            },
            596_049_920,
        ),
        # Mistral-7B-v0.3.
        (MISTRAL, {"vocab_size": 32_768, "sliding_window": None}, 7_248_023_552),
    ],
    ids=["llama-3-8b", "llama-3.2-1b", "qwen3-0.6b", "mistral-7b"],
)
def test_parameters_are_counted_as_published(tmp_path, base, changes, num_parameters):
    write_config(tmp_path, base, **changes)
    assert model_facts(tmp_path).num_parameters == num_parameters


def test_facts_of_a_gguf_file_come_from_its_header():
    facts = model_facts(find_default_model())
    assert facts.num_parameters == 134_515_008
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim) == (30, 3, 64)


def test_facts_of_a_missing_path_name_it(tmp_path):
    with pytest.raises(ModelFileError, match="none: cannot be opened: No such file"):
        model_facts(tmp_path / "none")


@pytest.mark.parametrize("total_size", [16_381_470_720, 16_381_470_720 + 36 * 4096 * 2])
def test_facts_agree_with_the_index(tmp_path, total_size):
    write_config(tmp_path, QWEN3)
    write_index(tmp_path, metadata={"total_size": total_size}, weight_map={})
    assert model_facts(tmp_path).num_parameters == 8_190_735_360


def test_stored_frequencies_of_an_old_checkpoint_are_not_counted(tmp_path):
    # Llama-2-7b as published.
    shape = {"vocab_size": 32_000, "intermediate_size": 11_008, "num_key_value_heads": 32}
    write_config(tmp_path, LLAMA, **shape, torch_dtype="float16")
    names = [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(32)]
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    write_index(tmp_path, metadata={"total_size": 13_476_835_328}, weight_map=weight_map)
    assert model_facts(tmp_path).num_parameters == 6_738_415_616


@pytest.mark.parametrize("total_size", [16_381_470_718, 17_000_000_000, 0])
def test_facts_that_contradict_the_index_are_refused(tmp_path, total_size):
    write_config(tmp_path, QWEN3)
    write_index(tmp_path, metadata={"total_size": total_size}, weight_map={})
    message = f"total_size is {total_size}, a model of this configuration has 16381470720 bytes"
    with pytest.raises(ModelFileError, match=message):
        model_facts(tmp_path)


@pytest.mark.parametrize("changes", [{"torch_dtype": ABSENT}, {"torch_dtype": "float8"}])
def test_an_index_of_an_unknown_stored_dtype_is_not_compared(tmp_path, changes):
    write_config(tmp_path, QWEN3, **changes)
    write_index(tmp_path, metadata={"total_size": 1}, weight_map={})
    assert model_facts(tmp_path).num_layers == 36
