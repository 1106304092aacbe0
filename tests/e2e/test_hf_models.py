"""Models that transformers saved give its logits, its tokens and its hidden states."""

import json
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.engine.llm import LLM
from extkv.errors import InvalidArgumentError
from extkv.models import load_model
from extkv.models.rope import rope_tables
from extkv.sampling_params import SamplingParams
from support.hf_reference import DEFAULT_ROPE, ROPES, make_reference, write_tokenizer
from support.plain_cache import PlainCache, logits_of

# Float32 rounding of three small layers; logits are of size one to ten.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def save(tmp_path):
    """Saves a reference with a byte-level tokenizer and returns the directory."""

    def save_reference(reference, **options):
        reference.save_pretrained(tmp_path, **options)
        write_tokenizer(tmp_path)
        return tmp_path

    return save_reference


def random_ids(num_tokens):
    return torch.randint(300, (num_tokens,), generator=torch.Generator().manual_seed(2))


def reference_logits(reference, token_ids):
    with torch.no_grad():
        return reference(token_ids[None]).logits[0]


GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
PLAIN = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}
BIASED = {"attention_bias": True, "mlp_bias": True}
SHARDED = {"max_shard_size": "20KB"}

CASES = {
    "llama-H4-KV2-D10-tied-single": ("Llama", GROUPED | {"tie_word_embeddings": True}, {}),
    "llama-H5-KV5-D8-untied-sharded": ("Llama", PLAIN, SHARDED),
    "llama-H4-KV2-D10-bias": ("Llama", GROUPED | BIASED, {}),
    "qwen3-H4-KV1-D16-untied-sharded": ("Qwen3", WIDE, SHARDED),
    "qwen3-H4-KV2-D10-tied-single": ("Qwen3", GROUPED | {"tie_word_embeddings": True}, {}),
    "qwen3-H4-KV1-D16-bias": ("Qwen3", WIDE | {"attention_bias": True}, {}),
    "mistral-H4-KV2-D10-untied-single": ("Mistral", GROUPED | {"sliding_window": None}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, save):
    family, options, save_options = CASES[case]
    reference = make_reference(family, **options)
    directory = save(reference, **save_options)
    assert (directory / "model.safetensors").exists() is not bool(save_options)
    loaded = load_model(directory)
    model = loaded.model
    token_ids = random_ids(33)
    torch.testing.assert_close(
        logits_of(model, token_ids), reference_logits(reference, token_ids), **TOLERANCE
    )
    is_tied = model.weights.lm_head is model.weights.embedding
    assert is_tied is options.get("tie_word_embeddings", False)
    prompt = token_ids[:5]
    expected = reference.generate(
        prompt[None],
        attention_mask=torch.ones(1, 5, dtype=torch.int64),
        max_new_tokens=128,
        do_sample=False,
        pad_token_id=0,
    )[0, 5:].tolist()
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    (output,) = LLM(loaded, device="cpu").generate([prompt.tolist()], greedy, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.filterwarnings("ignore")
def test_each_rope_scaling_equals_transformers(family, rope, save):
    reference = make_reference(family, **GROUPED, rope_parameters=dict(ROPES[rope]))
    model = load_model(save(reference)).model
    token_ids = random_ids(200)
    positions = torch.arange(256)[None]
    expected = reference.model.rotary_emb(torch.zeros(1), positions)
    tables = rope_tables(model.config, 256, torch.device("cpu"))
    for table, whole in zip(tables, expected, strict=True):
        # transformers repeats the table for the second half of a head.
        torch.testing.assert_close(table, whole[0, :, :5], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        logits_of(model, token_ids), reference_logits(reference, token_ids), **TOLERANCE
    )


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.filterwarnings("ignore")
def test_the_older_form_of_rope_settings_equals_the_newer(rope, type_key, save):
    newer = dict(ROPES.get(rope, DEFAULT_ROPE))
    reference = make_reference("Llama", **GROUPED, rope_parameters=dict(newer))
    directory = save(reference)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    values["rope_theta"] = newer.pop("rope_theta")
    newer[type_key] = newer.pop("rope_type")
    values["rope_scaling"] = None if rope == "default" else newer
    path.write_text(json.dumps(values))
    token_ids = random_ids(200)
    torch.testing.assert_close(
        logits_of(load_model(directory).model, token_ids),
        reference_logits(reference, token_ids),
        **TOLERANCE,
    )


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_taps_equal_the_hidden_states_of_transformers(family, save):
    reference = make_reference(family, **GROUPED)
    model = load_model(save(reference)).model
    token_ids = random_ids(17)
    last_layer = []
    reference.model.layers[2].register_forward_hook(lambda *call: last_layer.append(call[2]))
    with torch.no_grad():
        states = reference(token_ids[None], output_hidden_states=True).hidden_states
    cache = PlainCache(model.config)
    hidden, taps = model.forward(token_ids, torch.arange(17), cache, taps=(1, -1, 0, 2))
    torch.testing.assert_close(taps[0], states[2][0], **TOLERANCE)
    torch.testing.assert_close(taps[1], states[0][0], **TOLERANCE)
    torch.testing.assert_close(taps[2], states[1][0], **TOLERANCE)
    # The last entry of hidden_states is normalised; the tap is what comes before.
    torch.testing.assert_close(hidden, states[3][0], **TOLERANCE)
    torch.testing.assert_close(taps[3], last_layer[0][0], **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("Mistral", {}, [7, 7, 7]),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1}, [None, 7, 7]),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [7, None, 7],
        ),
        ("Qwen3", {"use_sliding_window": False}, [None, None, None]),
    ],
    ids=["mistral", "qwen3-max_window_layers", "qwen3-layer_types", "qwen3-off"],
)
def test_sliding_windows_equal_transformers(family, options, windows, save):
    reference = make_reference(family, **GROUPED, sliding_window=7, **options)
    model = load_model(save(reference)).model
    assert [model.config.layer_window(layer_id) for layer_id in range(3)] == windows
    token_ids = random_ids(33)
    torch.testing.assert_close(
        logits_of(model, token_ids), reference_logits(reference, token_ids), **TOLERANCE
    )


class WindowlessCache(PlainCache):
    has_sliding_windows = False


def test_a_cache_that_ignores_windows_is_refused(save):
    model = load_model(save(make_reference("Mistral", **GROUPED, sliding_window=7))).model
    with pytest.raises(
        InvalidArgumentError, match="WindowlessCache ignores sliding windows, the model's is 7"
    ):
        model.forward(random_ids(3), torch.arange(3), WindowlessCache(model.config))


def test_a_window_that_no_sequence_outgrows_needs_no_such_cache(save):
    reference = make_reference("Mistral", **GROUPED, sliding_window=30)
    model = load_model(save(reference), max_model_len=30).model
    token_ids = random_ids(30)
    hidden = model.forward(token_ids, torch.arange(30), WindowlessCache(model.config))
    torch.testing.assert_close(
        model.compute_logits(hidden), reference_logits(reference, token_ids), **TOLERANCE
    )


def test_a_saved_model_generates_text(save):
    llm = LLM(save(make_reference("Qwen3", **WIDE)), device="cpu")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (result,) = llm.generate("Hi", params, use_tqdm=False)[0].outputs
    assert len(result.token_ids) == 20
    assert result.text == llm.model.tokenizer.decode(result.token_ids)


# Significant bits after rounding: 8 and 11; three layers lose a few percent and a few permille.
RELATIVE_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.004}


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_stored_dtype_loads_in_any_dtype(dtype, stored, save):
    reference = make_reference("Qwen3", **GROUPED).to(stored)
    model = load_model(save(reference), dtype=dtype).model
    assert model.dtype == model.weights.layers[0].qkv_proj.dtype == dtype
    stored_rows = reference.model.layers[1].self_attn.k_proj.weight.data
    assert torch.equal(model.weights.layers[1].qkv_proj[40:60], stored_rows.to(dtype))
    token_ids = random_ids(33)
    expected = reference_logits(reference.float(), token_ids)
    difference = logits_of(model, token_ids).float() - expected
    assert difference.norm() <= RELATIVE_ERROR[dtype] * expected.norm()
