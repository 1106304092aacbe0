"""A Hugging Face directory: good ones load, and each defect is named by its error."""

import json
import shutil

import pytest
import torch
from extkv.errors import DriverUnavailableError, InvalidArgumentError, ModelFileError
from extkv.models import load_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LAYER_SHAPES = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (300, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (300, 8),
    }
    for layer_id in range(2):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer_id}.{name}.weight"] = shape
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_tokenizer(directory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    encoder = Tokenizer(models.BPE(vocabulary, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.save(str(directory / "tokenizer.json"))


def write_json(directory, name, values):
    (directory / name).write_text(json.dumps(values))


def write_model(directory, tensors):
    write_json(directory, "config.json", CONFIG)
    write_tokenizer(directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory, tensors):
    """Writes the tensors in turn into two shards and returns the index."""
    weight_map = {}
    for number in (1, 2):
        names = list(tensors)[number - 1 :: 2]
        file_name = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    write_json(directory, "model.safetensors.index.json", index)
    (directory / "model.safetensors").unlink()
    return index


@pytest.fixture
def tensors():
    return make_tensors()


@pytest.fixture
def directory(tmp_path, tensors):
    return write_model(tmp_path, tensors)


def test_weights_lie_fused_in_place(directory, tensors):
    weights = load_model(directory).model.weights
    for layer_id, layer in enumerate(weights.layers):
        parts = {name: tensors[f"model.layers.{layer_id}.{name}.weight"] for name in LAYER_SHAPES}
        qkv = torch.cat([parts[f"self_attn.{name}_proj"] for name in "qkv"])
        assert torch.equal(layer.qkv_proj, qkv)
        assert torch.equal(
            layer.gate_up_proj, torch.cat((parts["mlp.gate_proj"], parts["mlp.up_proj"]))
        )
        assert torch.equal(layer.o_proj, parts["self_attn.o_proj"])
        assert torch.equal(layer.down_proj, parts["mlp.down_proj"])
        assert torch.equal(layer.input_norm, parts["input_layernorm"])
        assert torch.equal(layer.post_attention_norm, parts["post_attention_layernorm"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"])


def test_shards_give_the_same_weights(directory, tensors):
    whole = load_model(directory).model.weights
    write_shards(directory, tensors)
    sharded = load_model(directory).model.weights
    assert torch.equal(sharded.layers[1].qkv_proj, whole.layers[1].qkv_proj)
    assert torch.equal(sharded.lm_head, whole.lm_head)


def test_weights_do_not_need_the_files(directory, tensors):
    weights = load_model(directory).model.weights
    shutil.rmtree(directory)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])


def test_a_tied_head_may_be_stored_again_and_is_the_embedding(directory):
    write_json(directory, "config.json", CONFIG | {"tie_word_embeddings": True})
    weights = load_model(directory).model.weights
    assert weights.lm_head is weights.embedding


def test_stored_rotary_frequencies_are_left_alone(tmp_path, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    load_model(write_model(tmp_path, tensors))


def test_reports_progress_after_each_tensor(directory):
    calls = []
    load_model(directory, on_progress=lambda *counts: calls.append(counts))
    assert calls == [(done, 21) for done in range(1, 22)]


def test_max_model_len_bounds_the_positions(directory):
    assert load_model(directory, max_model_len=10).model.num_positions == 10
    assert load_model(directory).model.num_positions == 64


def test_rejects_a_missing_tensor(tmp_path, tensors):
    del tensors[Q_PROJ]
    message = rf"tensor {Q_PROJ} is missing, expected shape \[8, 8\]"
    with pytest.raises(ModelFileError, match=message):
        load_model(write_model(tmp_path, tensors))


def test_rejects_a_missing_head_where_it_is_not_tied(tmp_path, tensors):
    del tensors["lm_head.weight"]
    with pytest.raises(ModelFileError, match=r"tensor lm_head.weight is missing"):
        load_model(write_model(tmp_path, tensors))


def test_rejects_a_tensor_of_another_shape(tmp_path, tensors):
    tensors[Q_PROJ] = torch.zeros(8, 4)
    message = rf"model.safetensors: tensor {Q_PROJ} has shape \[8, 4\], expected \[8, 8\]"
    with pytest.raises(ModelFileError, match=message):
        load_model(write_model(tmp_path, tensors))


def test_rejects_a_tensor_of_another_dtype(tmp_path, tensors):
    tensors[Q_PROJ] = torch.zeros(8, 8, dtype=torch.int8)
    with pytest.raises(ModelFileError, match=f"tensor {Q_PROJ} has dtype I8, expected one of F64"):
        load_model(write_model(tmp_path, tensors))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.x"])
def test_rejects_a_tensor_it_would_not_use(tmp_path, tensors, name):
    tensors[name] = torch.ones(8)
    with pytest.raises(ModelFileError, match=f"1 tensors have no use in .* first: {name}"):
        load_model(write_model(tmp_path, tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rejects_a_weight_that_is_not_finite(tmp_path, tensors, value):
    tensors[Q_PROJ][3, 3] = value
    with pytest.raises(ModelFileError, match=f"tensor {Q_PROJ} holds values that are not finite"):
        load_model(write_model(tmp_path, tensors))


def test_rejects_a_weight_that_float16_cannot_hold(tmp_path, tensors):
    tensors[Q_PROJ][3, 3] = 1e5
    path = write_model(tmp_path, tensors)
    load_model(path, dtype=torch.bfloat16)
    with pytest.raises(ModelFileError, match=f"tensor {Q_PROJ} holds .* finite in torch.float16"):
        load_model(path, dtype=torch.float16)


def test_rejects_a_dtype_it_does_not_run(directory):
    with pytest.raises(InvalidArgumentError, match=r"dtype is torch.float64, supported: torch.fl"):
        load_model(directory, dtype=torch.float64)


def test_rejects_a_device_that_torch_does_not_know(directory):
    with pytest.raises(InvalidArgumentError, match="device is 'tpu9', torch knows no such device"):
        load_model(directory, device="tpu9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")
def test_rejects_a_cuda_device_where_there_is_none(directory):
    with pytest.raises(DriverUnavailableError, match="device is cuda:0, torch finds no CUDA"):
        load_model(directory, device="cuda:0")


@pytest.mark.parametrize("length", [0, 65])
def test_rejects_max_model_len_out_of_range(directory, length):
    with pytest.raises(InvalidArgumentError, match=f"max_model_len is {length}, expected 1 to 64"):
        load_model(directory, max_model_len=length)


def test_tensors_are_checked_before_memory_is_taken(directory):
    write_json(directory, "config.json", CONFIG | {"num_hidden_layers": 2**40})
    with pytest.raises(ModelFileError, match=r"tensor model.layers.2.input_layernorm.weight is mi"):
        load_model(directory)


def test_rejects_a_directory_without_weights(directory):
    (directory / "model.safetensors").unlink()
    message = f"{directory}: has neither model.safetensors nor model.safetensors.index.json"
    with pytest.raises(ModelFileError, match=message):
        load_model(directory)


def test_rejects_an_empty_directory(tmp_path):
    with pytest.raises(ModelFileError, match=r"config.json: cannot be opened: No such file"):
        load_model(tmp_path)


def test_rejects_a_missing_shard(directory, tensors):
    write_shards(directory, tensors)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(ModelFileError, match=f"{shard}: cannot be opened: No such file"):
        load_model(directory)


def test_rejects_an_index_that_names_another_shard(directory, tensors):
    index = write_shards(directory, tensors)
    index["weight_map"][Q_PROJ] = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    write_json(directory, "model.safetensors.index.json", index)
    message = r"tensor \S+ is missing, model.safetensors.index.json says it is here"
    with pytest.raises(ModelFileError, match=message):
        load_model(directory)


def test_rejects_an_index_that_leaves_a_tensor_out(directory, tensors):
    index = write_shards(directory, tensors)
    del index["weight_map"][Q_PROJ]
    write_json(directory, "model.safetensors.index.json", index)
    with pytest.raises(ModelFileError, match=f"tensor {Q_PROJ} is missing, expected shape"):
        load_model(directory)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/b", "", ".."])
def test_rejects_an_index_that_leaves_the_directory(directory, tensors, shard):
    index = write_shards(directory, tensors)
    index["weight_map"][Q_PROJ] = shard
    write_json(directory, "model.safetensors.index.json", index)
    with pytest.raises(ModelFileError, match=f"key weight_map.{Q_PROJ} is '{shard}', expected"):
        load_model(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "key weight_map is missing, expected an object"),
        ('{"weight_map": {"x": 1}}', "key weight_map.x is 1, expected str"),
    ],
)
def test_rejects_a_broken_index(directory, index, message):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=f"index.json: {message}"):
        load_model(directory)
