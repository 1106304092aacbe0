"""Drafters from synthesised checkpoints: every tensor lands in place, every defect is named."""

import dataclasses
import json

import pytest
import torch
from extkv.errors import DrafterMismatchError, InvalidArgumentError, ModelFileError
from extkv.models import DecoderOps, chunk_buffers, random_model
from extkv.models.dspark import ReferenceSpeculator, load_drafter, random_drafter
from extkv.models.dspark.saving import native_config, speculators_config
from safetensors.torch import save_file
from support.drafters import (
    HEADS,
    TARGET,
    config_with_head,
    random_taps,
    tiny_config,
    tiny_target,
)

Q_PROJ = "layers.1.self_attn.q_proj.weight"
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
HEAD_SHAPES = {
    "none": {},
    "vanilla": {"markov_w1.weight": (29, 6), "markov_w2.weight": (29, 6)},
}
HEAD_SHAPES["gated"] = HEAD_SHAPES["vanilla"] | {
    "gate_proj.weight": (6, 22),
    "gate_proj.bias": (6,),
}
HEAD_SHAPES["rnn"] = HEAD_SHAPES["vanilla"] | {
    "joint_proj.weight": (18, 28),
    "joint_proj.bias": (18,),
}
LAYER_SHAPES = {
    "input_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "post_attention_layernorm.weight": (16,),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}


def make_tensors(head="vanilla", *, confidence="bias"):
    """Every tensor of the fact sheet, by its published name, with other values each."""
    shapes = {
        EMBEDDING: (29, 16),
        LM_HEAD: (29, 16),
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
    }
    for layer_id in range(3):
        shapes |= {f"layers.{layer_id}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    shapes |= {f"markov_head.{name}": shape for name, shape in HEAD_SHAPES[head].items()}
    if confidence != "none":
        shapes["confidence_head.proj.weight"] = (1, 16 if head == "none" else 22)
    if confidence == "bias":
        shapes["confidence_head.proj.bias"] = (1,)
    generator = torch.Generator().manual_seed(6)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def write(directory, tensors, values):
    (directory / "config.json").write_text(json.dumps(values))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def write_native(directory, tensors, config=None):
    return write(directory, tensors, native_config(config or tiny_config(), torch.float32))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def tensors():
    return make_tensors()


@pytest.mark.parametrize("confidence", ["none", "no-bias", "bias"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("file_format", ["native", "speculators"])
def test_every_tensor_lands_in_its_place(tmp_path, target, head, confidence, file_format):
    tensors = make_tensors(head, confidence=confidence)
    config = config_with_head(head, has_confidence_head=confidence != "none")
    make_values = native_config if file_format == "native" else speculators_config
    model = load_drafter(write(tmp_path, tensors, make_values(config, torch.float32)), target)
    has_bias = confidence != "no-bias"
    assert model.config == dataclasses.replace(
        config,
        confidence_has_bias=has_bias,
        draft_vocab_size=None if file_format == "native" else 29,
    )
    weights = model.weights
    found = {
        EMBEDDING: weights.backbone.embedding,
        LM_HEAD: weights.backbone.lm_head,
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.backbone.final_norm,
        "markov_head.markov_w1.weight": weights.markov_w1,
        "markov_head.markov_w2.weight": weights.markov_w2,
        "markov_head.gate_proj.weight": weights.gate_proj,
        "markov_head.gate_proj.bias": weights.gate_bias,
        "markov_head.joint_proj.weight": weights.joint_proj,
        "markov_head.joint_proj.bias": weights.joint_bias,
        "confidence_head.proj.weight": weights.confidence_proj,
        "confidence_head.proj.bias": weights.confidence_bias,
    }
    for layer_id, layer in enumerate(weights.backbone.layers):
        prefix = f"layers.{layer_id}."
        q_proj, k_proj, v_proj = layer.qkv_proj.split([32, 16, 16])
        gate, up = layer.gate_up_proj.chunk(2)
        found |= {
            f"{prefix}input_layernorm.weight": layer.input_norm,
            f"{prefix}self_attn.q_proj.weight": q_proj,
            f"{prefix}self_attn.k_proj.weight": k_proj,
            f"{prefix}self_attn.v_proj.weight": v_proj,
            f"{prefix}self_attn.o_proj.weight": layer.o_proj,
            f"{prefix}self_attn.q_norm.weight": layer.q_norm,
            f"{prefix}self_attn.k_norm.weight": layer.k_norm,
            f"{prefix}post_attention_layernorm.weight": layer.post_attention_norm,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layer.down_proj,
        }
    present = {name: tensor for name, tensor in found.items() if tensor is not None}
    assert present.keys() == tensors.keys()
    for name, tensor in present.items():
        assert torch.equal(tensor, tensors[name]), name


def test_shards_give_the_same_weights(tmp_path, target, tensors):
    whole = load_drafter(write_native(tmp_path, tensors), target)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        names = list(tensors)[number - 1 :: 2]
        file_name = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, tmp_path / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_drafter(tmp_path, target)
    for (name, tensor), (_, expected) in zip(
        sharded.weights.tensors(), whole.weights.tensors(), strict=True
    ):
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("name", [*make_tensors("gated")])
def test_each_missing_tensor_is_named(tmp_path, target, name):
    tensors = make_tensors("gated")
    shape = list(tensors.pop(name).shape)
    path = write_native(tmp_path, tensors, config_with_head("gated"))
    if name in (EMBEDDING, LM_HEAD, "confidence_head.proj.bias"):
        load_drafter(path, target)
        return
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing, expected shape") as caught:
        load_drafter(path, target)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("name", [*make_tensors("rnn")])
def test_each_tensor_of_another_shape_is_named(tmp_path, target, name):
    tensors = make_tensors("rnn")
    tensors[name] = torch.zeros(3, 5)
    path = write_native(tmp_path, tensors, config_with_head("rnn"))
    with pytest.raises(ModelFileError, match=rf"tensor {name} has shape \[3, 5\], expected \["):
        load_drafter(path, target)


@pytest.mark.parametrize(
    "name",
    ["layers.3.input_layernorm.weight", "markov_head.gate_proj.weight", "model.norm.weight", "x"],
)
def test_each_tensor_without_a_use_is_named(tmp_path, target, tensors, name):
    tensors[name] = torch.zeros(3)
    with pytest.raises(ModelFileError, match=f"1 tensors have no use in .* first: {name}"):
        load_drafter(write_native(tmp_path, tensors), target)


def test_a_confidence_head_that_the_config_denies_is_refused(tmp_path, target, tensors):
    config = tiny_config(has_confidence_head=False)
    with pytest.raises(ModelFileError, match=r"2 tensors have no use .* confidence_head.proj.bias"):
        load_drafter(write_native(tmp_path, tensors, config), target)


def test_tensors_of_trainers_are_left_alone(tmp_path, target, tensors):
    for name in ("mask_embedding", "verifier_norm.weight", "verifier_lm_head.weight"):
        tensors[name] = torch.zeros(2)
    load_drafter(write_native(tmp_path, tensors), target)


@pytest.mark.parametrize("name", [Q_PROJ, LM_HEAD, "markov_head.markov_w2.weight"])
def test_a_weight_that_is_not_finite_is_named(tmp_path, target, tensors, name):
    tensors[name][3, 3] = float("nan")
    with pytest.raises(ModelFileError, match=f"tensor {name} holds values that are not finite"):
        load_drafter(write_native(tmp_path, tensors), target)


def pointers(model):
    backbone = model.weights.backbone
    return backbone.embedding.data_ptr(), backbone.lm_head.data_ptr()


@pytest.mark.parametrize("is_stored", [False, True], ids=["absent", "equal"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_vocabulary_matrices_are_the_target_s(tmp_path, tensors, is_stored, is_tied):
    target = tiny_target(tie_word_embeddings=is_tied)
    own_bytes = sum(tensors[name].nbytes for name in tensors if name not in (EMBEDDING, LM_HEAD))
    for name, tensor in ((EMBEDDING, target.weights.embedding), (LM_HEAD, target.weights.lm_head)):
        tensors.pop(name)
        if is_stored:
            tensors[name] = tensor.clone()
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert pointers(model) == (
        target.weights.embedding.data_ptr(),
        target.weights.lm_head.data_ptr(),
    )
    assert model.weights.shared == {EMBEDDING, LM_HEAD}
    assert model.weights.num_bytes == own_bytes
    # Keys and values of the context exist twice.
    assert model.num_bytes == own_bytes + 3 * 32 * 16 * 4


def test_vocabulary_matrices_are_compared_in_the_dtype_of_the_model(tmp_path, tensors):
    target = tiny_target()
    rounded = {
        EMBEDDING: target.weights.embedding.bfloat16(),
        LM_HEAD: target.weights.lm_head.bfloat16(),
    }
    path = write_native(tmp_path, tensors | rounded)
    assert load_drafter(path, target).weights.shared == frozenset()
    for name, values in rounded.items():
        owner = "embedding" if name == EMBEDDING else "lm_head"
        getattr(target.weights, owner).copy_(values)
    assert load_drafter(path, target).weights.shared == {EMBEDDING, LM_HEAD}


@pytest.mark.parametrize("changed", [EMBEDDING, LM_HEAD])
def test_a_matrix_that_differs_in_one_value_is_the_drafter_s_own(
    tmp_path, target, tensors, changed, monkeypatch
):
    # Several pieces, of which the last one differs.
    monkeypatch.setattr(chunk_buffers, "CHUNK_BYTES", 400)
    tensors[EMBEDDING] = target.weights.embedding.clone()
    tensors[LM_HEAD] = target.weights.lm_head.clone()
    tensors[changed][28, 15] += 1
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert model.weights.shared == {EMBEDDING, LM_HEAD} - {changed}
    own = {EMBEDDING: model.weights.backbone.embedding, LM_HEAD: model.weights.backbone.lm_head}
    assert torch.equal(own[changed], tensors[changed])
    # Comparing changes nothing.
    assert torch.equal(target.weights.lm_head, tiny_target().weights.lm_head)


def test_a_head_stored_as_a_copy_of_the_embedding_is_the_embedding(tmp_path, target, tensors):
    tensors[LM_HEAD] = tensors[EMBEDDING].clone()
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert model.weights.backbone.lm_head is model.weights.backbone.embedding
    tensors[EMBEDDING] = target.weights.embedding.clone()
    tensors[LM_HEAD] = target.weights.embedding.clone()
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert pointers(model) == (target.weights.embedding.data_ptr(),) * 2


@pytest.mark.parametrize("is_target_s", [False, True], ids=["own", "target"])
def test_a_tied_head_is_the_embedding(tmp_path, target, tensors, is_target_s):
    del tensors[LM_HEAD]
    if is_target_s:
        tensors[EMBEDDING] = target.weights.embedding.clone()
    config = tiny_config()
    tied = dataclasses.replace(config.backbone, tie_word_embeddings=True)
    config = dataclasses.replace(config, backbone=tied)
    model = load_drafter(write_native(tmp_path, tensors, config), target)
    assert pointers(model)[0] == pointers(model)[1]
    assert torch.equal(model.weights.backbone.lm_head, tensors[EMBEDDING])


TARGET_IDS = torch.tensor([0, 3, 4, 11, 28])


def reduced_tensors():
    tensors = make_tensors()
    tensors[LM_HEAD] = tensors[LM_HEAD][:5]
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:5]
    tensors["d2t"] = TARGET_IDS - torch.arange(5)
    tensors["t2d"] = torch.zeros(29, dtype=torch.bool)
    tensors["t2d"][TARGET_IDS] = True
    return tensors


REDUCED = tiny_config(draft_vocab_size=5)


def write_reduced(directory, tensors):
    return write(directory, tensors, speculators_config(REDUCED, torch.float32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_reduced_vocabulary(tmp_path, target, dtype):
    tensors = reduced_tensors()
    tensors["d2t"] = tensors["d2t"].to(dtype)
    model = load_drafter(write_reduced(tmp_path, tensors), target)
    assert model.target_ids.tolist() == TARGET_IDS.tolist()
    assert model.target_ids.dtype == torch.int64
    assert model.base_logits(torch.zeros(2, 16)).shape == (2, 5)
    assert model.markov_weight.shape == (5, 6)
    # Previous tokens are target tokens.
    assert model.weights.markov_w1.shape == (29, 6)
    assert model.to_target_ids(torch.tensor([[4, 0]])).tolist() == [[28, 0]]


# Bug case B56 (a).
def test_offsets_are_added_to_draft_ids(tmp_path, target):
    tensors = reduced_tensors()
    tensors["d2t"] = torch.tensor([0, 5, 9, 9, 9])
    del tensors["t2d"]
    model = load_drafter(write_reduced(tmp_path, tensors), target)
    assert model.to_target_ids(torch.arange(3)).tolist() == [0, 6, 11]


def test_a_reduced_head_that_is_absent_is_rows_of_the_target_s(tmp_path, target):
    tensors = reduced_tensors()
    del tensors[LM_HEAD]
    model = load_drafter(write_reduced(tmp_path, tensors), target)
    assert torch.equal(model.lm_head, target.weights.lm_head[TARGET_IDS])
    assert LM_HEAD not in model.weights.shared


def test_tables_that_change_nothing_are_dropped(tmp_path, target, tensors):
    tensors["d2t"] = torch.zeros(29, dtype=torch.int64)
    tensors["t2d"] = torch.ones(29, dtype=torch.bool)
    assert load_drafter(write_native(tmp_path, tensors), target).target_ids is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", None, "tensor d2t is missing: draft_vocab_size is 5, vocab_size of the target 29"),
        ("d2t", torch.zeros(4, dtype=torch.int64), r"tensor d2t has shape \[4\], expected \[5\]"),
        ("d2t", torch.zeros(5), "tensor d2t has dtype F32, expected one of I64, I32, BOOL, U8"),
        ("d2t", torch.tensor([0, 0, 0, 0, 25]), "draft token 4 is target token 29, out of range"),
        ("d2t", torch.tensor([-1, 0, 0, 0, 0]), "draft token 0 is target token -1, out of range"),
        ("d2t", torch.tensor([3, 2, 5, 6, 7]), "token 1 is target token 3, expected more than 3"),
        ("t2d", torch.zeros(5, dtype=torch.bool), r"tensor t2d has shape \[5\], expected \[29\]"),
        (
            "t2d",
            torch.ones(29, dtype=torch.bool),
            "t2d says True for target token 1, d2t says False",
        ),
        ("t2d", torch.zeros(29, dtype=torch.bool), "t2d says False for target token 0, d2t says T"),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path, target, name, value, message):
    tensors = reduced_tensors()
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    with pytest.raises(ModelFileError, match=message):
        load_drafter(write_reduced(tmp_path, tensors), target)


def test_a_table_shorter_than_its_shape_is_refused(tmp_path, target):
    path = write_reduced(tmp_path, reduced_tensors())
    file = path / "model.safetensors"
    data = file.read_bytes()
    # The type of the shape's neighbour: 5 values of 4 bytes where there are 40 bytes.
    assert data.count(b'"dtype":"I64"') == 1
    file.write_bytes(data.replace(b'"dtype":"I64"', b'"dtype":"I32"'))
    with pytest.raises(ModelFileError, match=r"d2t has 40 bytes, I32 of shape \[5\] needs 20"):
        load_drafter(path, target)


# Bug case B56 (b).
def test_a_padded_vocabulary_drafts_the_target_s_tokens_only(tmp_path):
    target = tiny_target(vocab_size=27)
    tensors = make_tensors()
    tensors[LM_HEAD][27:] = 1e6
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert model.target_ids is None
    assert model.base_logits(torch.ones(1, 16)).shape == (1, 27)
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 4))
    assert int(speculator.draft(3).token_ids.max()) < 27


def test_a_padded_vocabulary_can_use_the_target_s_head_but_not_its_embedding(tmp_path, tensors):
    target = tiny_target(vocab_size=27)
    del tensors[LM_HEAD]
    model = load_drafter(write_native(tmp_path, tensors), target)
    assert model.lm_head.data_ptr() == target.weights.lm_head.data_ptr()
    assert model.markov_weight.shape == (27, 6)
    del tensors[EMBEDDING]
    message = r"embed_tokens.weight is missing, expected shape \[29, 16\]: the target's has 27 rows"
    with pytest.raises(ModelFileError, match=message):
        load_drafter(write_native(tmp_path, tensors), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size of the drafter is 16, of the target 32"),
        ({"vocab_size": 40}, "vocab_size of the drafter is 29, of the target 40"),
        ({"num_layers": 5}, "num_target_layers of the drafter is 6, the target has 5"),
    ],
)
def test_a_target_of_another_shape_is_refused_before_weights(tmp_path, tensors, changes, message):
    path = write_native(tmp_path, tensors)
    (path / "model.safetensors").unlink()
    with pytest.raises(DrafterMismatchError, match=message):
        load_drafter(path, tiny_target(**changes))


def test_pipeline_parallelism_is_refused(tmp_path, target, tensors):
    path = write_native(tmp_path, tensors)
    with pytest.raises(DrafterMismatchError, match="pipeline_parallel_size is 4, expected 1"):
        load_drafter(path, target, pipeline_parallel_size=4)


def test_dtype_and_kernels_are_the_target_s(tmp_path, tensors):
    target = random_model(TARGET, dtype=torch.bfloat16, ops=DecoderOps())
    path = write_native(tmp_path, tensors)
    model = load_drafter(path, target)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.weights.fc, tensors["fc.weight"].bfloat16())
    assert model.ops is target.ops
    own = DecoderOps()
    assert load_drafter(path, target, ops=own).ops is own


def test_positions_are_those_that_both_models_have(tmp_path, target, tensors):
    config = tiny_config()
    shorter = dataclasses.replace(config.backbone, context_length=40)
    path = write_native(tmp_path, tensors, dataclasses.replace(config, backbone=shorter))
    assert load_drafter(path, target).num_positions == 40
    assert load_drafter(path, target, max_model_len=24).num_positions == 24
    assert load_drafter(path, target, max_model_len=64).num_positions == 40
    with pytest.raises(InvalidArgumentError, match="max_model_len is 0, expected 1 to 40"):
        load_drafter(path, target, max_model_len=0)


def test_reports_progress_after_each_tensor_that_is_read(tmp_path, target, tensors):
    del tensors[LM_HEAD]
    calls = []
    load_drafter(
        write_native(tmp_path, tensors), target, on_progress=lambda *counts: calls.append(counts)
    )
    assert calls == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]


def test_rejects_a_directory_without_weights(tmp_path, target, tensors):
    (write_native(tmp_path, tensors) / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"has neither model.safetensors nor"):
        load_drafter(tmp_path, target)


def test_a_random_drafter_shares_what_fits_its_target(target):
    model = random_drafter(tiny_config(), target)
    assert model.weights.shared == {EMBEDDING, LM_HEAD}
    reduced = random_drafter(REDUCED, target, target_token_ids=TARGET_IDS.tolist())
    assert reduced.weights.shared == {EMBEDDING}
    assert reduced.target_ids.tolist() == TARGET_IDS.tolist()
    assert random_drafter(REDUCED, target).target_ids.tolist() == list(range(5))


def test_a_random_drafter_is_its_seed(target):
    first, second, other = (random_drafter(tiny_config(), target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.weights.fc, second.weights.fc)
    assert not torch.equal(first.weights.fc, other.weights.fc)
    assert bool((first.weights.hidden_norm == 1).all())
    assert bool((first.weights.confidence_bias == 0).all())
