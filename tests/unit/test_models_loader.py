"""Loading: a good file gives its weights, and each defect is named by its error."""

import contextlib

import gguf
import numpy as np
import pytest
import torch
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models import gguf_source, load_model
from extkv.models.gguf_file import GGUFFile
from extkv.models.loader import resolve_dtype
from extkv.models.tokenizer import byte_alphabet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HIDDEN, MLP, VOCAB, NUM_LAYERS = 8, 12, 258, 2
LAYER_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (8, HIDDEN),
    "attn_k": (4, HIDDEN),
    "attn_v": (4, HIDDEN),
    "attn_output": (HIDDEN, 8),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def tiny_tensors():
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer_id in range(NUM_LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"blk.{layer_id}.{name}.weight"] = shape
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, tensors, *, architecture="llama", num_layers=NUM_LAYERS, vocab_size=VOCAB):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", *byte_alphabet(), "th"])
    writer.add_token_types([3, *[1] * 257])
    writer.add_token_merges(["t h"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_qwen3(tensors):
    norms = {
        f"blk.{layer_id}.attn_{part}_norm.weight": np.full(4, 2.0 + layer_id, dtype=np.float32)
        for layer_id in range(NUM_LAYERS)
        for part in "qk"
    }
    return tensors | norms


@pytest.fixture
def tensors():
    return tiny_tensors()


@pytest.fixture
def model_file(tmp_path, tensors):
    return write_gguf(tmp_path / "tiny.gguf", tensors)


def test_loads_weights_with_query_and_key_rows_in_order(model_file, tensors):
    weights = load_model(model_file).model.weights
    assert torch.equal(weights.embedding, torch.from_numpy(tensors["token_embd.weight"]))
    stored = torch.from_numpy(tensors["blk.1.attn_q.weight"])
    # Two heads of width 4: rows 0, 2 of a head are its first half, rows 1, 3 its second.
    query = stored[[0, 2, 1, 3, 4, 6, 5, 7]]
    key = torch.from_numpy(tensors["blk.1.attn_k.weight"])[[0, 2, 1, 3]]
    value = torch.from_numpy(tensors["blk.1.attn_v.weight"])
    assert torch.equal(weights.layers[1].qkv_proj, torch.cat((query, key, value)))


def test_gate_rows_lie_before_up_rows(model_file, tensors):
    layer = load_model(model_file).model.weights.layers[0]
    halves = [torch.from_numpy(tensors[f"blk.0.ffn_{name}.weight"]) for name in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj, torch.cat(halves))


@pytest.mark.parametrize("chunk_elements", [1, 8, 24, 1000])
def test_reading_in_chunks_gives_the_same_weights(model_file, chunk_elements, monkeypatch):
    whole = load_model(model_file).model.weights
    monkeypatch.setattr(gguf_source, "CHUNK_ELEMENTS", chunk_elements)
    pieces = load_model(model_file).model.weights
    assert torch.equal(whole.embedding, pieces.embedding)
    assert torch.equal(whole.layers[1].qkv_proj, pieces.layers[1].qkv_proj)


def test_weights_are_copies_that_do_not_need_the_file(model_file, tensors):
    weights = load_model(model_file).model.weights
    model_file.write_bytes(b"")
    assert torch.equal(weights.embedding, torch.from_numpy(tensors["token_embd.weight"]))


def test_output_head_is_the_embedding_where_the_file_has_none(model_file):
    weights = load_model(model_file).model.weights
    assert weights.lm_head is weights.embedding


def test_output_head_is_read_where_the_file_has_one(tmp_path, tensors):
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    weights = load_model(write_gguf(tmp_path / "untied.gguf", tensors)).model.weights
    assert torch.equal(weights.lm_head, weights.embedding * 2)


def test_weights_have_the_dtype_asked_for(model_file):
    model = load_model(model_file, dtype=torch.bfloat16).model
    assert model.weights.layers[0].down_proj.dtype == model.dtype == torch.bfloat16


def test_reports_progress_after_each_tensor(model_file):
    calls = []
    load_model(model_file, on_progress=lambda *counts: calls.append(counts))
    assert calls == [(done, 20) for done in range(1, 21)]


def test_rejects_an_unsupported_dtype(model_file):
    with pytest.raises(
        InvalidArgumentError, match=r"dtype is torch.int8, supported: torch.float32"
    ):
        load_model(model_file, dtype=torch.int8)


def test_rejects_a_missing_file(tmp_path):
    path = tmp_path / "none.gguf"
    with pytest.raises(ModelFileError, match=f"{path}: cannot be opened: No such file"):
        load_model(path)


def test_qwen3_heads_are_stored_in_order_and_have_norms(tmp_path, tensors):
    path = write_gguf(tmp_path / "qwen3.gguf", as_qwen3(tensors), architecture="qwen3")
    loaded = load_model(path)
    layer = loaded.model.weights.layers[1]
    assert loaded.config.architecture == "Qwen3ForCausalLM"
    assert torch.equal(layer.qkv_proj[:8], torch.from_numpy(tensors["blk.1.attn_q.weight"]))
    assert torch.equal(layer.k_norm, torch.full((4,), 3.0))


def test_rejects_a_qwen3_file_without_norms(tmp_path, tensors):
    path = write_gguf(tmp_path / "qwen3.gguf", tensors, architecture="qwen3")
    with pytest.raises(ModelFileError, match=r"tensor blk.0.attn_q_norm.weight is missing"):
        load_model(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 zip file"])
def test_rejects_a_wrong_magic(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"found magic b'.*', expected b'GGUF'"):
        load_model(path)


def test_rejects_an_unknown_version(model_file):
    content = bytearray(model_file.read_bytes())
    content[4] = 9
    model_file.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"GGUF version is 9, known: \(2, 3\)"):
        load_model(model_file)


@pytest.mark.parametrize("num_bytes", [8, 20, 100, 5000, 10_000, 17_000])
def test_rejects_a_truncated_file_with_the_numbers(model_file, num_bytes):
    model_file.write_bytes(model_file.read_bytes()[:num_bytes])
    with pytest.raises(ModelFileError, match=f"bytes .* are needed, the file has {num_bytes}"):
        load_model(model_file)


def test_rejects_an_array_longer_than_the_file(model_file):
    content = model_file.read_bytes()
    key = b"tokenizer.ggml.token_type"
    length_at = content.index(key) + len(key) + 8
    model_file.write_bytes(
        content[:length_at] + (2**60).to_bytes(8, "little") + content[length_at + 8 :]
    )
    with pytest.raises(ModelFileError, match="are needed, the file has"):
        load_model(model_file)


def test_rejects_another_architecture(tmp_path, tensors):
    path = write_gguf(tmp_path / "qwen.gguf", tensors, architecture="qwen2")
    with pytest.raises(ModelFileError, match="architecture is 'qwen2', known: llama, qwen3"):
        load_model(path)


def test_rejects_a_missing_tensor(tmp_path, tensors):
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "short.gguf", tensors)
    message = r"tensor blk.1.ffn_up.weight is missing, expected shape \[12, 8\]"
    with pytest.raises(ModelFileError, match=message):
        load_model(path)


def test_rejects_a_tensor_of_another_shape(tmp_path, tensors):
    tensors["blk.0.attn_k.weight"] = np.zeros((8, 8), dtype=np.float32)
    path = write_gguf(tmp_path / "wide.gguf", tensors)
    message = r"tensor blk.0.attn_k.weight has shape \[8, 8\], expected \[4, 8\]"
    with pytest.raises(ModelFileError, match=message):
        load_model(path)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.2.attn_q.weight"])
def test_rejects_a_tensor_it_would_not_use(tmp_path, tensors, name):
    tensors[name] = np.ones(4, dtype=np.float32)
    path = write_gguf(tmp_path / "more.gguf", tensors)
    with pytest.raises(ModelFileError, match=f"1 tensors have no use in .* first: {name}"):
        load_model(path)


def test_rejects_a_weight_that_is_not_finite(tmp_path, tensors):
    tensors["blk.0.ffn_down.weight"][3, 3] = np.nan
    path = write_gguf(tmp_path / "nan.gguf", tensors)
    with pytest.raises(ModelFileError, match=r"tensor blk.0.ffn_down.weight holds values that are"):
        load_model(path)


def test_rejects_a_tensor_type_the_library_cannot_read(tmp_path, tensors):
    tensors["output_norm.weight"] = np.zeros(HIDDEN, dtype=np.int32)
    path = write_gguf(tmp_path / "int.gguf", tensors)
    with pytest.raises(ModelFileError, match=r"tensor output_norm.weight cannot be read as I32"):
        load_model(path)


def test_rejects_a_layer_count_far_above_the_tensors(tmp_path, tensors):
    path = write_gguf(tmp_path / "deep.gguf", tensors, num_layers=2**31)
    with pytest.raises(ModelFileError, match=r"tensor blk.2.attn_norm.weight is missing"):
        load_model(path)


def test_rejects_a_vocabulary_of_another_size(tmp_path, tensors):
    path = write_gguf(tmp_path / "vocab.gguf", tensors, vocab_size=259)
    with pytest.raises(ModelFileError, match="the tokenizer has 258 tokens, the model 259"):
        load_model(path)


def test_the_library_still_reads_through_the_methods_that_are_bounded():
    for name in ("_get", "_get_field_parts"):
        assert callable(getattr(gguf.GGUFReader, name))


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("good") / "tiny.gguf", tiny_tensors()).read_bytes()


def load_bytes(folder, content):
    path = folder / "mutant.gguf"
    path.write_bytes(content)
    return load_model(path)


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(num_bytes=st.integers(0, 17_500))
def test_any_truncation_is_a_typed_error(tmp_path, file_bytes, num_bytes):
    with pytest.raises(ModelFileError):
        load_bytes(tmp_path, file_bytes[:num_bytes])


@FUZZ
@given(at=st.integers(0, 12_000), value=st.binary(min_size=1, max_size=8), insert=st.booleans())
def test_any_damage_loads_or_is_a_typed_error(tmp_path, file_bytes, at, value, insert):
    end = at if insert else at + len(value)
    # Any other exception fails the test.
    with contextlib.suppress(ModelFileError):
        load_bytes(tmp_path, file_bytes[:at] + value + file_bytes[end:])


def test_tensor_names_are_listed_in_file_order(model_file, tensors):
    assert GGUFFile(model_file).tensor_names == tuple(tensors)


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        (torch.bfloat16, "cpu", torch.bfloat16),
    ],
    ids=str,
)
def test_a_dtype_may_be_named(name, device, dtype):
    assert resolve_dtype(name, torch.device(device)) == dtype


@pytest.mark.parametrize("dtype", ["int8", "torch.float32", torch.int8], ids=str)
def test_rejects_a_dtype_that_no_model_has(dtype):
    with pytest.raises(InvalidArgumentError, match="dtype is "):
        resolve_dtype(dtype, torch.device("cpu"))
