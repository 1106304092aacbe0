"""`config.json` of drafters: every spelling is read, and every refusal names its key."""

import dataclasses
import json

import pytest
from extkv.errors import (
    ModelFileError,
    UnsupportedDrafterError,
)
from extkv.models import QWEN3_8B
from extkv.models.dspark import (
    drafter_config,
    read_drafter_config,
)

# As published for Qwen3-8B.
NATIVE = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151_669,
    "max_position_embeddings": 40_960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}


LAYER_CONFIG = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "max_position_embeddings": 40_960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "vocab_size": 151_936,
}


SPECULATORS = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 32_000,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151_669,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dspark",
    "target_hidden_size": 4096,
    "transformer_layer_config": LAYER_CONFIG,
}


ABSENT = object()
BOTH = pytest.mark.parametrize("base", [NATIVE, SPECULATORS], ids=["native", "speculators"])


@pytest.fixture
def read(tmp_path):
    def read_changed(base, **changes):
        values = {key: value for key, value in (base | changes).items() if value is not ABSENT}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_drafter_config(tmp_path)

    return read_changed


def test_reads_the_published_8b_drafter(read):
    assert read(NATIVE) == drafter_config(QWEN3_8B)


def test_reads_a_speculators_drafter(read):
    config = read(SPECULATORS)
    published = drafter_config(QWEN3_8B)
    assert config == dataclasses.replace(
        published,
        block_size=8,
        samples_from_anchor=False,
        draft_vocab_size=32_000,
        num_target_layers=None,
    )
    assert (config.num_drafts, config.first_draft_slot) == (7, 1)


def test_speculators_leaves_out_what_transformers_assumes(read):
    config = read(SPECULATORS, transformer_layer_config={"num_hidden_layers": 5})
    backbone = config.backbone
    assert (backbone.vocab_size, backbone.hidden_size) == (151_936, 4096)
    assert (backbone.intermediate_size, backbone.num_heads, backbone.num_kv_heads) == (
        22_016,
        32,
        32,
    )
    assert (backbone.head_dim, backbone.context_length) == (128, 32_768)


def test_reads_rope_of_both_spellings(read):
    new = {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read(NATIVE, **new).backbone.rope_theta == 5e5
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert read(NATIVE, rope_scaling=yarn).backbone.context_length == 131_072


@pytest.mark.parametrize(
    ("changes", "token_id"),
    [
        ({"mask_token_id": 5}, 5),
        ({"mask_token_id": ABSENT, "dspark_noise_token_id": 6}, 6),
        ({"mask_token_id": ABSENT, "pard_token": 7}, 7),
        ({"mask_token_id": ABSENT, "ptd_token_id": 8}, 8),
        ({"mask_token_id": 5, "dflash_config": {"mask_token_id": 9}}, 9),
        ({"mask_token_id": None, "pard_token": 7, "ptd_token_id": 8}, 7),
        ({"mask_token_id": 5, "dspark_noise_token_id": 6}, 5),
        ({"mask_token_id": ABSENT, "dspark_noise_token_id": 6, "pard_token": 7}, 6),
        ({"mask_token_id": 0, "pard_token": 7}, 0),
    ],
)
@BOTH
def test_first_mask_token_spelling_wins(read, base, changes, token_id):
    assert read(base, **changes).mask_token_id == token_id


@BOTH
def test_a_missing_mask_token_names_all_its_keys(read, base):
    message = (
        "config.json: names a mask token id under none of dflash_config.mask_token_id, "
        "mask_token_id, dspark_noise_token_id, pard_token, ptd_token_id"
    )
    with pytest.raises(ModelFileError, match=message):
        read(base, mask_token_id=ABSENT)


NO_TAPS = {"target_layer_ids": ABSENT, "aux_hidden_state_layer_ids": ABSENT}


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({"target_layer_ids": [1, 9]}, (1, 9)),
        ({"target_layer_ids": [-1, 4]}, (-1, 4)),
        ({"aux_hidden_state_layer_ids": [2, 10]}, (1, 9)),
        ({"aux_hidden_state_layer_ids": [0, 5]}, (-1, 4)),
        ({"dflash_config": {"target_layer_ids": [1, 9]}}, (1, 9)),
        ({"dspark_target_layer_ids": [1, 9]}, (1, 9)),
        ({"aux_hidden_state_layer_ids": [3], "target_layer_ids": [8]}, (2,)),
        ({"dflash_config": {"target_layer_ids": [7]}, "target_layer_ids": [8]}, (7,)),
        ({"dspark_target_layer_ids": [6], "target_layer_ids": [8]}, (6,)),
        ({"dflash_config": {"mask_token_id": 3}, "target_layer_ids": [8]}, (8,)),
    ],
)
@BOTH
def test_every_spelling_of_taps_means_the_same_layers(read, base, changes, taps):
    assert read(base, **(NO_TAPS | changes)).tap_layer_ids == taps


@BOTH
def test_missing_taps_name_all_their_keys(read, base):
    message = (
        "names tap layers under none of aux_hidden_state_layer_ids, "
        "dflash_config.target_layer_ids, dspark_target_layer_ids, target_layer_ids"
    )
    with pytest.raises(ModelFileError, match=message):
        read(base, **NO_TAPS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": []}, "tap_layer_ids is empty"),
        ({"target_layer_ids": [-2, 4]}, "tap layer is -2, expected -1"),
        ({"target_layer_ids": [4, 4]}, "tap layer 4 follows 4, expected strictly increasing"),
        ({"target_layer_ids": [9, 1]}, "tap layer 1 follows 9, expected strictly increasing"),
        (
            {"target_layer_ids": [1, 35]},
            "tap layer 35 is the last of 36 target layers, expected at m",
        ),
        ({"target_layer_ids": [1, 36]}, "tap layer is 36, out of range for 36 target layers"),
        ({"target_layer_ids": 4}, "key target_layer_ids is 4, expected an array of int"),
        ({"target_layer_ids": [True]}, "key target_layer_ids is True, expected int"),
        ({"mask_token_id": 151_936}, "mask_token_id is 151936, out of range for vocab_size 151936"),
        ({"mask_token_id": -1}, "mask_token_id is -1, out of range"),
        ({"mask_token_id": "x"}, "key mask_token_id is 'x', expected int"),
        ({"block_size": ABSENT}, "key block_size is missing, expected int"),
        ({"block_size": 0}, "block_size is 0, expected at least 1 in anchor-first layout"),
        (
            {"block_size": 1, "sample_from_anchor": False},
            "block_size is 1, expected at least 2 in fi",
        ),
        ({"markov_rank": ABSENT}, "key markov_rank is missing, expected int"),
        ({"markov_rank": -1}, "markov_rank is -1, expected 0 or more"),
        ({"markov_head_type": ABSENT}, "key markov_head_type is missing, expected str"),
        (
            {"markov_head_type": "lstm"},
            "key markov_head_type is 'lstm', expected one of vanilla, gat",
        ),
        (
            {"enable_confidence_head": ABSENT},
            "key enable_confidence_head is missing, expected bool",
        ),
        ({"confidence_head_with_markov": ABSENT}, "key confidence_head_with_markov is missing"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true, markov_rank is 0"),
        ({"num_target_layers": 0}, "num_target_layers is 0, expected a positive number"),
        ({"num_anchors": 0}, "num_anchors is 0, expected a positive number"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0, expected a positive number"),
        ({"hidden_size": ABSENT}, "key hidden_size is missing, expected int"),
        ({"hidden_act": "gelu"}, "key hidden_act is 'gelu', expected 'silu'"),
        (
            {"attention_sink_bias": True},
            "key attention_sink_bias is True, expected no such key or fa",
        ),
        ({"logit_scale": 0.5}, "key logit_scale is 0.5, expected no such key or 1"),
        (
            {"final_logit_softcapping": 30.0},
            "key final_logit_softcapping is 30.0, expected no such k",
        ),
        (
            {"rope_is_neox_style": False},
            "key rope_is_neox_style is False, expected no such key or t",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "key quantization_config is "),
        (
            {"dflash_config": {"causal": True}},
            "key dflash_config.causal is True, expected no such ke",
        ),
        ({"dflash_config": {"use_swa": True}}, "key dflash_config.use_swa is True"),
        ({"dflash_config": 3}, "key dflash_config is 3, expected an object"),
        (
            {"sample_from_anchor": True, "dspark_bonus_anchor": True},
            "key dspark_bonus_anchor is True, expected the opposite of sample_from_anchor True",
        ),
        ({"sample_from_anchor": 1}, "key sample_from_anchor is 1, expected bool"),
        ({"num_attention_heads": 5}, "num_heads 5 is not a multiple of num_kv_heads 8"),
    ],
)
def test_native_refusals_name_the_key(read, changes, message):
    with pytest.raises(ModelFileError, match=f"config.json: {message}"):
        read(NATIVE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_layer_config": ABSENT}, "key transformer_layer_config is missing"),
        ({"transformer_layer_config": 4}, "key transformer_layer_config is 4, expected an object"),
        (
            {"transformer_layer_config": LAYER_CONFIG | {"model_type": "llama"}},
            "key transformer_layer_config.model_type is 'llama', expected 'qwen3'",
        ),
        (
            {"transformer_layer_config": LAYER_CONFIG | {"hidden_act": "relu"}},
            "key transformer_layer_config.hidden_act is 'relu', expected 'silu'",
        ),
        (
            {"transformer_layer_config": LAYER_CONFIG | {"rope_is_neox_style": False}},
            "key transformer_layer_config.rope_is_neox_style is False",
        ),
        (
            {"speculators_model_type": "eagle3"},
            "key speculators_model_type is 'eagle3', expected 'd",
        ),
        ({"target_hidden_size": 2048}, "key target_hidden_size is 2048, expected hidden_size 4096"),
        ({"block_size": ABSENT}, "key block_size is missing, expected int"),
        (
            {"sample_from_anchor": ABSENT, "speculators_config": {"proposal_methods": [7]}},
            "key speculators_config.proposal_methods has 7, expected objects",
        ),
        ({"aux_hidden_state_layer_ids": [-1, 4]}, "tap layer is -2, expected -1"),
    ],
)
def test_speculators_refusals_name_the_key(read, changes, message):
    with pytest.raises(ModelFileError, match=f"config.json: {message}"):
        read(SPECULATORS, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"sample_from_anchor": True}, True),
        ({"sample_from_anchor": False}, False),
        ({"dspark_bonus_anchor": True}, False),
        ({"dspark_bonus_anchor": False}, True),
        ({"dflash_config": {"sample_from_anchor": False}}, False),
        ({"sample_from_anchor": False, "dspark_bonus_anchor": True}, False),
    ],
)
def test_native_layout(read, changes, expected):
    assert read(NATIVE, **changes).samples_from_anchor is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sample_from_anchor": True}, True),
        ({"sample_from_anchor": False}, False),
        ({"sample_from_anchor": ABSENT}, False),
        ({"sample_from_anchor": ABSENT, "block_size": 7}, True),
        ({"sample_from_anchor": ABSENT, "speculators_config": ABSENT}, False),
        ({"sample_from_anchor": ABSENT, "speculators_config": {"proposal_methods": []}}, False),
    ],
)
def test_speculators_layout(read, changes, expected):
    assert read(SPECULATORS, **changes).samples_from_anchor is expected


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@BOTH
def test_reads_head_types(read, base, head_type):
    assert read(base, markov_head_type=head_type).markov_head_type == head_type


def test_rank_0_needs_no_head_type(read):
    changes = {"markov_rank": 0, "markov_head_type": ABSENT, "confidence_head_with_markov": False}
    config = read(NATIVE, **changes)
    assert (config.markov_rank, config.confidence_size) == (0, 4096)


def test_no_confidence_head_needs_no_input_type(read):
    changes = {"enable_confidence_head": False, "confidence_head_with_markov": ABSENT}
    assert not read(NATIVE, **changes).has_confidence_head


def test_training_keys_have_defaults(read):
    config = read(NATIVE, num_anchors=ABSENT, num_target_layers=ABSENT)
    assert (config.num_anchors, config.num_target_layers) == (512, None)
    nested = {"num_target_layers": ABSENT, "dflash_config": {"num_target_layers": 36}}
    assert read(NATIVE, **nested).num_target_layers == 36


# Bug case B60.
@pytest.mark.parametrize("window", [ABSENT, None, 128])
def test_a_window_that_is_off_is_none(read, window):
    assert read(NATIVE, sliding_window=window).backbone.sliding_window is None


# Bug case B60.
@BOTH
def test_a_window_of_0_is_refused(read, base):
    changes = {"sliding_window": 0}
    if base is SPECULATORS:
        changes = {"transformer_layer_config": LAYER_CONFIG | changes}
    with pytest.raises(
        ModelFileError, match="sliding_window is 0, expected a positive number or n"
    ):
        read(base, **changes)


WINDOWED = LAYER_CONFIG | {
    "use_sliding_window": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
}


def test_reads_a_window_that_begins_at_the_block(read):
    changes = {"transformer_layer_config": WINDOWED, "sliding_window_non_causal": True}
    backbone = read(SPECULATORS, **changes).backbone
    assert [backbone.layer_window(layer_id) for layer_id in range(5)] == [128] * 4 + [None]


def test_refuses_a_window_that_begins_at_each_slot(read):
    message = "key sliding_window_non_causal is not true, expected true with sliding_window 128"
    with pytest.raises(ModelFileError, match=message):
        read(SPECULATORS, transformer_layer_config=WINDOWED)


def test_refuses_a_native_window(read):
    changes = {"use_sliding_window": True, "sliding_window": 128, "layer_types": ABSENT}
    with pytest.raises(
        ModelFileError, match="key sliding_window is 128, expected null: where the w"
    ):
        read(NATIVE, **changes, max_window_layers=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["DSparkDraftModel"]},
        {"architectures": ABSENT},
        {"architectures": ["Qwen3DSparkModel", "Other"], "dspark_markov_rank": 256},
    ],
)
def test_recognises_native_architectures(read, changes):
    assert read(NATIVE, **changes) == drafter_config(QWEN3_8B)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architecture is LlamaForCausalLM with model type",
        ),
        (
            {"architectures": ["DSparkDraftModel"], "model_type": "llama"},
            "architecture is DSparkDra",
        ),
        ({"architectures": [], "model_type": ABSENT}, "architecture is missing with model type ''"),
    ],
)
def test_refuses_what_is_no_drafter(read, changes, message):
    with pytest.raises(
        ModelFileError, match=f"config.json: {message}.* known drafters: Qwen3DSpark"
    ):
        read(NATIVE, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "Gemma4"),
        ({"architectures": ABSENT, "model_type": "gemma4_text"}, "Gemma4"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}, "DeepSeek-V4"),
        ({"architectures": ["DSparkDraftModel"], "dspark_block_size": 5}, "DeepSeek-V4"),
        ({"architectures": ["DSparkDraftModel"], "hc_mult": 4}, "DeepSeek-V4"),
    ],
)
def test_says_which_drafters_are_not_supported_yet(read, changes, what):
    message = rf"config.json: drafters of {what} \(.*\) are not supported yet"
    with pytest.raises(UnsupportedDrafterError, match=message) as caught:
        read(NATIVE, **changes)
    assert isinstance(caught.value, ModelFileError)


def test_a_drafter_for_gemma4_that_is_qwen3_itself_is_read(read):
    verifier = {"verifier": {"architectures": ["Gemma4ForConditionalGeneration"]}}
    assert read(SPECULATORS, speculators_config=verifier).block_size == 8


def test_refuses_a_directory_without_a_config(tmp_path):
    with pytest.raises(ModelFileError, match=r"config.json: cannot be opened: No such file"):
        read_drafter_config(tmp_path)
