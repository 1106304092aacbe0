"""Drafters written to both formats come back equal, and other readers can open the files."""

import dataclasses
import json

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.models import random_model
from extkv.models.dspark import load_drafter, save_native, save_speculators
from extkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from extkv.models.safetensors_file import SafetensorsFile
from extkv.models.safetensors_writer import write_safetensors
from safetensors.torch import load_file
from support.drafters import HEADS, TARGET, config_with_head, tiny_config, tiny_drafter, tiny_target

SAVERS = pytest.mark.parametrize("save", [save_native, save_speculators], ids=["native", "specul"])


def assert_equal(found, expected):
    # A speculators file always states the size of the draft vocabulary.
    config = dataclasses.replace(found.config, draft_vocab_size=expected.config.draft_vocab_size)
    assert config == expected.config
    assert found.config.num_draft_tokens == expected.config.num_draft_tokens
    assert found.weights.shared == expected.weights.shared
    pairs = zip(found.weights.tensors(), expected.weights.tensors(), strict=True)
    for (name, tensor), (expected_name, expected_tensor) in pairs:
        assert name == expected_name
        assert tensor.dtype == expected_tensor.dtype
        assert torch.equal(tensor, expected_tensor), name


@SAVERS
@pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
@pytest.mark.parametrize("head", HEADS)
def test_round_trip_of_each_head(tmp_path, save, head, samples_from_anchor):
    target = tiny_target()
    config = config_with_head(head, samples_from_anchor=samples_from_anchor)
    model = tiny_drafter(config, target)
    save(model, tmp_path)
    assert_equal(load_drafter(tmp_path, target), model)


@SAVERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_of_each_dtype(tmp_path, save, dtype):
    target = random_model(TARGET, dtype=dtype)
    model = tiny_drafter(tiny_config(), target)
    save(model, tmp_path)
    found = load_drafter(tmp_path, target)
    assert found.dtype == dtype
    assert_equal(found, model)


SHAPES = {
    "no-bias": {"confidence_has_bias": False},
    "hidden-only": {"confidence_reads_markov": False},
    "no-confidence": {"has_confidence_head": False},
    "embedding-tap": {"tap_layer_ids": (-1, 0, 4)},
    "reduced": {"draft_vocab_size": 7},
    "unknown-depth": {"num_target_layers": None, "num_anchors": 9},
}


@SAVERS
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_round_trip_of_each_option(tmp_path, save, changes):
    target = tiny_target()
    ids = {"target_token_ids": [0, 2, 3, 9, 11, 27, 28]} if "draft_vocab_size" in changes else {}
    model = tiny_drafter(tiny_config(**changes), target, **ids)
    save(model, tmp_path)
    assert_equal(load_drafter(tmp_path, target), model)


SCALINGS = {
    "linear": LinearScaling(2.0),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 32.0),
    "yarn": YarnScaling(2.0, 32.0, 1.1, 16.0, 2.0, truncate=False),
}
BACKBONES = {
    "bias": {"attention_bias": True},
    **{name: {"rope_scaling": scaling} for name, scaling in SCALINGS.items()},
}


@SAVERS
@pytest.mark.parametrize("changes", BACKBONES.values(), ids=BACKBONES)
def test_round_trip_of_each_backbone(tmp_path, save, changes):
    target = tiny_target()
    config = tiny_config()
    backbone = dataclasses.replace(config.backbone, **changes)
    model = tiny_drafter(dataclasses.replace(config, backbone=backbone), target)
    save(model, tmp_path)
    assert_equal(load_drafter(tmp_path, target), model)


def test_round_trip_of_windows(tmp_path):
    target = tiny_target()
    config = tiny_config()
    backbone = dataclasses.replace(
        config.backbone, sliding_window=8, full_attention_layer_ids=frozenset({1})
    )
    model = tiny_drafter(dataclasses.replace(config, backbone=backbone), target)
    save_speculators(model, tmp_path)
    found = load_drafter(tmp_path, target)
    assert_equal(found, model)
    assert [found.config.backbone.layer_window(layer_id) for layer_id in range(3)] == [8, None, 8]


@SAVERS
def test_round_trip_of_a_drafter_with_a_vocabulary_of_its_own(tmp_path, save):
    model = tiny_drafter(tiny_config())
    save(model, tmp_path)
    assert_equal(load_drafter(tmp_path, tiny_target()), model)


@SAVERS
def test_round_trip_of_a_tied_drafter(tmp_path, save):
    config = tiny_config()
    tied = dataclasses.replace(config.backbone, tie_word_embeddings=True)
    model = tiny_drafter(dataclasses.replace(config, backbone=tied))
    model.weights.backbone.lm_head.copy_(model.weights.backbone.embedding)
    save(model, tmp_path)
    found = load_drafter(tmp_path, tiny_target())
    assert found.weights.backbone.lm_head is found.weights.backbone.embedding
    assert_equal(found, model)


@SAVERS
def test_round_trip_of_a_padded_drafter_with_the_target_s_head(tmp_path, save):
    target = tiny_target(vocab_size=27)
    save_speculators(tiny_drafter(tiny_config()), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    model = load_drafter(tmp_path, target)
    save(model, tmp_path / "again")
    assert_equal(load_drafter(tmp_path / "again", target), model)


def test_native_files_hold_the_vocabulary_and_speculators_files_do_not(tmp_path):
    model = tiny_drafter(tiny_config(), tiny_target())
    save_native(model, tmp_path / "native")
    save_speculators(model, tmp_path / "speculators", verifier="Qwen/Qwen3-8B")
    native = load_file(tmp_path / "native/model.safetensors")
    other = load_file(tmp_path / "speculators/model.safetensors")
    assert native.keys() - other.keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(native["lm_head.weight"], model.weights.backbone.lm_head)
    values = json.loads((tmp_path / "speculators/config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    assert values["aux_hidden_state_layer_ids"] == [tap + 1 for tap in model.config.tap_layer_ids]


def test_native_config_has_every_key_that_deepspec_asserts(tmp_path):
    save_native(tiny_drafter(tiny_config()), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    required = {
        *("target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head"),
        *("markov_rank", "markov_head_type", "confidence_head_with_markov", "block_size"),
    }
    assert required <= values.keys()
    assert values["architectures"] == ["Qwen3DSparkModel"]
    assert values["layer_types"] == ["full_attention"] * 3


def test_reduced_tables_are_stored_as_offsets_and_flags(tmp_path):
    ids = [0, 2, 3, 9, 11, 27, 28]
    model = tiny_drafter(tiny_config(draft_vocab_size=7), tiny_target(), target_token_ids=ids)
    save_speculators(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [0, 1, 1, 6, 7, 22, 22]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids
    assert tensors["t2d"].dtype == torch.bool


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool],
    ids=str,
)
def test_other_readers_open_the_file(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "a": torch.randint(2, (3, 5), generator=generator).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "strided": torch.randint(2, (5, 4), generator=generator).to(dtype).T,
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    assert SafetensorsFile(tmp_path / "x.safetensors").entries.keys() == tensors.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_dtype_that_a_file_cannot_hold_is_refused(tmp_path):
    with pytest.raises(
        InvalidArgumentError, match=r"tensor x has dtype torch.complex64, a file ca"
    ):
        write_safetensors(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())
