"""Shapes of models: parameters as transformers counts them, states as vLLM shapes them."""

from __future__ import annotations

from pathlib import Path

import extkv
import pytest
import torch
from extkv.kv import StateSpec
from extkv.kv.model import (
    FAMILIES,
    ConfigFile,
    Weight,
    WeightFormat,
    read_config_file,
    read_model_shape,
    sum_by_part,
)
from extkv.kv.model.attention import GroupedAttention, LatentAttention
from extkv.kv.model.formats import model_dtype, state_dtype, weight_format
from extkv.kv.model.recurrent import GatedDeltaNet, Mamba1, Mamba2

CONFIGS = Path(__file__).parent / "data/configs"
BF16 = WeightFormat(2)
FP8_BLOCKS = WeightFormat(2, 1, (128, 128))

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
# Architecture, model_type, keys beside TINY; each with the switches that add or drop weights.
VARIANTS = [
    ("Llama", "llama", {}),
    (
        "Llama",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    ("Mistral", "mistral", {"head_dim": 24, "sliding_window": 8}),
    ("Qwen2", "qwen2", {"num_key_value_heads": None}),
    ("Qwen3", "qwen3", {"attention_bias": True}),
    (
        "Qwen3Moe",
        "qwen3_moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "head_dim": 32,
        },
    ),
    ("Mixtral", "mixtral", {"num_local_experts": 8}),
    ("Gemma2", "gemma2", {}),
    ("Gemma3", "gemma3_text", {}),
    (
        "DeepseekV2",
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    (
        "DeepseekV3",
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    (
        "Jamba",
        "jamba",
        {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "mamba_proj_bias": True,
        },
    ),
    ("Jamba", "jamba", {"num_experts": 1, "mamba_dt_rank": 7, "mamba_conv_bias": False}),
    (
        "Bamba",
        "bamba",
        {
            **MAMBA2,
            "attn_layer_indices": [1],
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    (
        "FalconH1",
        "falcon_h1",
        {
            **MAMBA2,
            "mamba_d_ssm": 96,
            "mamba_d_head": 12,
            "projectors_bias": True,
            "mamba_rms_norm": True,
            "head_dim": 24,
        },
    ),
    (
        "FalconH1",
        "falcon_h1",
        {**MAMBA2, "mamba_d_ssm": None, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    (
        "NemotronH",
        "nemotron_h",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "M*-E",
            "head_dim": 24,
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    (
        "NemotronH",
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "moe_latent_size": 20,
            "mlp_bias": True,
        },
    ),
    (
        "Qwen3Next",
        "qwen3_next",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "decoder_sparse_step": 2,
            "head_dim": 32,
        },
    ),
]


def config(architecture: str, **values) -> ConfigFile:
    values = {**TINY, "architectures": [f"{architecture}ForCausalLM"], **values}
    return ConfigFile(Path("config.json"), values)


def fixture(name: str) -> ConfigFile:
    return read_config_file(CONFIGS / name)


def transformers_count(model_type: str, values: dict) -> int:
    """Build the model without memory and count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ignored = ("model_type", "quantization_config")
    known = {key: value for key, value in values.items() if key not in ignored}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **known))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "model_type", "values"),
    VARIANTS,
    ids=[f"{v[0]}-{i}" for i, v in enumerate(VARIANTS)],
)
def test_parameters_are_those_of_transformers(family: str, model_type: str, values: dict):
    file = config(family, **values)
    assert read_model_shape(file).num_parameters == transformers_count(model_type, file.values)


def test_every_family_has_a_variant():
    assert {f"{family}ForCausalLM" for family, _, _ in VARIANTS} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("deepseek-v3", 671_026_404_352),
        # As published for Qwen3-Next-80B-A3B without its module for multi-token prediction.
        ("hybrid", 79_674_391_296),
    ],
)
def test_published_models_have_their_published_size(name: str, num_parameters: int):
    assert read_model_shape(fixture(name)).num_parameters == num_parameters


def test_windows_follow_each_family():
    def windows(file: ConfigFile) -> list[int | None]:
        return [layer.attention.window for layer in read_model_shape(file).layers]

    sliding = {"sliding_window": 8}
    assert windows(config("Llama", **sliding)) == [None] * 4
    assert windows(config("Mistral", **sliding)) == [8] * 4
    assert windows(config("Mistral", sliding_window=None)) == [None] * 4
    assert windows(config("Mixtral", num_local_experts=2, **sliding)) == [8] * 4
    assert windows(config("Gemma2", **sliding)) == [8, None, 8, None]
    six = config("Gemma3", num_hidden_layers=7, **sliding)
    assert windows(six) == [8, 8, 8, 8, 8, None, 8]
    assert windows(config("Gemma3", sliding_window_pattern=2, **sliding)) == [8, None, 8, None]
    assert windows(config("Qwen2", **sliding)) == [None] * 4
    used = {"use_sliding_window": True, "max_window_layers": 3, **sliding}
    assert windows(config("Qwen3", **used)) == [None, None, None, 8]
    listed = ["full_attention", "sliding_attention"] * 2
    assert windows(config("Gemma2", layer_types=listed, **sliding)) == [None, 8, None, 8]


def test_hybrids_alternate_as_their_file_says():
    def kinds(file: ConfigFile) -> str:
        letters = {(True, False): "A", (False, True): "R", (True, True): "B", (False, False): "-"}
        layers = read_model_shape(file).layers
        return "".join(
            letters[layer.attention is not None, layer.recurrent is not None] for layer in layers
        )

    assert kinds(fixture("hybrid")) == "RRRA" * 12
    assert kinds(config("Jamba", num_hidden_layers=8)) == "RRRRARRR"
    assert kinds(config("Bamba", attn_layer_indices=[0, 3], **MAMBA2)) == "ARRA"
    assert kinds(config("FalconH1", mamba_d_ssm=96, **MAMBA2)) == "BBBB"
    assert kinds(config("NemotronH", hybrid_override_pattern="M*-E", **NEMOTRON)) == "RA--"
    new_names = ["linear_attention", "full_attention", "mlp", "moe"]
    assert kinds(config("NemotronH", layers_block_type=new_names, **NEMOTRON)) == "RA--"


def test_states_have_the_shapes_of_vllm():
    net = GatedDeltaNet(2048, 16, 32, 128, 128, 4)
    assert net.states("bfloat16", "float32", 1) == (
        StateSpec("conv", (3, 8192), "bfloat16", 0),
        StateSpec("ssm", (32, 128, 128), "float32"),
    )
    assert [state.shape for state in net.states("bfloat16", "bfloat16", 4)] == [
        (3, 2048),
        (8, 128, 128),
    ]
    mamba = Mamba1(4096, 8192, 16, 4, 256)
    assert [state.shape for state in mamba.states("bf16", "bf16", 2)] == [(3, 4096), (4096, 16)]
    # Bamba-9B: one group, which every rank holds; Nemotron-H-8B: eight groups, divided.
    bamba = Mamba2(4096, 8192, 128, 64, 1, 128, 4)
    assert [state.shape for state in bamba.states("bf16", "bf16", 1)] == [
        (3, 8448),
        (128, 64, 128),
    ]
    assert [state.shape for state in bamba.states("bf16", "bf16", 2)] == [(3, 4352), (64, 64, 128)]
    nemotron = Mamba2(4096, 8192, 128, 64, 8, 128, 4)
    assert nemotron.states("bf16", "bf16", 2)[0].shape == (3, 5120)


def test_a_rank_holds_its_share_and_copies_of_what_cannot_be_divided():
    weight = Weight("w", (1000, 10))
    assert [weight.parameters_on_rank(n) for n in (1, 3, 8)] == [10_000, 3_334, 1_250]
    whole = Weight("w", (1000, 10), max_ranks=1)
    assert whole.parameters_on_rank(8) == 10_000
    # Two key-value heads on eight ranks: each rank holds one of them.
    assert Weight("w", (256, 10), max_ranks=2).parameters_on_rank(8) == 1_280
    grouped = GroupedAttention(2048, 16, 2, 256)
    assert grouped.spec(16, "bfloat16", "auto", 8).num_kv_heads == 1


def test_quantised_matrices_have_a_byte_per_parameter_and_scales():
    matrix = Weight("w", (576, 7168), count=3, is_quantized=True)
    assert matrix.bytes_on_rank(1, BF16) == 3 * 576 * 7168 * 2
    assert matrix.bytes_on_rank(1, FP8_BLOCKS) == 3 * (576 * 7168 + 5 * 56 * 4)
    assert matrix.bytes_on_rank(1, WeightFormat(2, 1)) == 3 * 576 * 7168
    assert Weight("norms", (576,)).bytes_on_rank(1, FP8_BLOCKS) == 1152


def test_parts_add_up_to_the_model():
    shape = read_model_shape(fixture("deepseek-v3"))
    parts = sum_by_part(shape.weights(), 1, BF16)
    assert sum(part.num_parameters for part in parts) == shape.num_parameters
    assert sum(part.num_bytes for part in parts) == 2 * shape.num_parameters
    # 58 layers of 256 experts of three matrices of 7,168 x 2,048.
    sizes = {part.part: part.num_parameters for part in parts}
    assert sizes["experts"] == 58 * 256 * 3 * 7168 * 2048
    assert sizes["embedding"] == sizes["output head"] == 129_280 * 7168


def test_dtypes_come_from_the_file_or_the_caller():
    file = fixture("qwen3-8b")
    assert model_dtype(file, None) == "bfloat16"
    assert model_dtype(file, "half") == "float16"
    assert model_dtype(config("Llama", dtype="float16", torch_dtype="float32"), None) == "float16"
    assert state_dtype(file, "Qwen3ForCausalLM") is None
    assert state_dtype(file, "NemotronHForCausalLM") == "float32"
    asked = config("NemotronH", mamba_ssm_cache_dtype="float16")
    assert state_dtype(asked, "NemotronHForCausalLM") == "float16"
    assert state_dtype(config("Qwen3Next", mamba_ssm_dtype="float32"), "x") == "float32"
    assert weight_format(file, "float32") == WeightFormat(4)
    assert weight_format(fixture("deepseek-v3"), "bfloat16") == FP8_BLOCKS
    per_tensor = config("Llama", quantization_config={"quant_method": "fp8"})
    assert weight_format(per_tensor, "bfloat16") == WeightFormat(2, 1)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (config("Llama", architectures=None), "architectures is missing"),
        (
            config("Llama", architectures=["FooForCausalLM"]),
            "'FooForCausalLM', known: Bamba.*Qwen3",
        ),
        (config("Llama", architectures="LlamaForCausalLM"), "architectures is 'Llama"),
        (config("Llama", vocab_size=None), "vocab_size is missing, expected a positive"),
        (config("Llama", hidden_size=0), r"hidden_size is 0, expected a whole number in \[1, 2\*"),
        (config("Llama", hidden_size=True), "hidden_size is True"),
        (config("Llama", hidden_size=64.0), "hidden_size is 64.0"),
        (config("Llama", hidden_size=2**41), "hidden_size is"),
        (config("Llama", num_attention_heads=7), "num_attention_heads is 7, expected a divisor"),
        (config("Llama", mlp_bias="yes"), "mlp_bias is 'yes', expected true or false"),
        (config("Gemma2", sliding_window=8, layer_types=["x"]), "has 1 entries, expected 4"),
        (config("Gemma2", sliding_window=8, layer_types=[1, 2, 3, 4]), "a list of strings"),
        (config("Qwen3Moe", num_experts=2, mlp_only_layers=1), "a list of whole numbers"),
        (config("Qwen3Moe", num_experts=2, mlp_only_layers=[-1]), "mlp_only_layers is -1"),
        (config("DeepseekV3", **{**LATENT, "kv_lora_rank": None}), "kv_lora_rank is missing"),
        (config("DeepseekV3", first_k_dense_replace=-1), "first_k_dense_replace is -1"),
        (config("Bamba", attn_layer_indices=[4], **MAMBA2), r"is \[4\], expected indices of 4"),
        (config("Bamba", mamba_n_heads=7), "mamba_n_heads is 7 with heads of 18, expected 128"),
        (config("Jamba", mamba_d_conv=1), "mamba_d_conv is 1, expected at least 2"),
        (config("Jamba", mamba_dt_rank="all"), "mamba_dt_rank is 'all'"),
        (config("NemotronH", **NEMOTRON), "layers_block_type is missing"),
        (config("NemotronH", hybrid_override_pattern="MX-E", **NEMOTRON), "has 'X', expected one"),
        (config("NemotronH", hybrid_override_pattern=5), "hybrid_override_pattern is 5"),
    ],
)
def test_refuses_files_that_describe_no_known_model(file: ConfigFile, message: str):
    with pytest.raises(extkv.ModelFileError, match=message) as raised:
        read_model_shape(file)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be opened: No such file"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", r"holds \[1\], expected a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_refuses_directories_without_a_configuration(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(extkv.ModelFileError, match=message):
        read_config_file(tmp_path)


def test_refuses_formats_that_are_not_known():
    with pytest.raises(extkv.InvalidArgumentError, match="names no dtype"):
        model_dtype(config("Llama"), None)
    with pytest.raises(extkv.InvalidArgumentError, match="unknown dtype"):
        model_dtype(config("Llama"), "float7")
    for values, message in (
        ({"quant_method": "awq"}, "quantisation is 'awq', known: 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two positive numbers"),
        ("fp8", "quantization_config is 'fp8', expected an object"),
    ):
        with pytest.raises(extkv.ModelFileError, match=message):
            weight_format(config("Llama", quantization_config=values), "bfloat16")


@pytest.mark.parametrize(
    ("part", "num_ranks", "message"),
    [
        (GroupedAttention(64, 4, 2, 16), 3, "does not divide 4 attention heads and 2 key-value"),
        (GroupedAttention(64, 12, 3, 16), 2, "does not divide 12 attention heads and 3 key-value"),
        (LatentAttention(64, 4, 8, 8, 8, 8, 8), 3, "does not divide 4 attention heads"),
        (Mamba1(64, 128, 16, 4, 4), 3, "does not divide 128 channels"),
        (Mamba2(64, 128, 8, 16, 2, 16, 4), 3, "does not divide 8 heads of recurrent"),
        (Mamba2(64, 128, 8, 16, 2, 16, 4), 4, "does not divide 2 groups of recurrent"),
        (GatedDeltaNet(64, 2, 4, 8, 8, 4), 4, "does not divide 2 key heads"),
        (GatedDeltaNet(64, 4, 6, 8, 8, 4), 4, "does not divide 6 value heads"),
    ],
)
def test_refuses_ranks_that_do_not_divide_a_layer(part, num_ranks, message):
    part.check_ranks(1)
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        part.check_ranks(num_ranks)


def test_more_ranks_than_heads_are_fine_where_heads_can_be_copied():
    GroupedAttention(64, 8, 2, 8).check_ranks(8)
    Mamba2(64, 128, 8, 16, 1, 16, 4).check_ranks(4)


def test_cache_dtypes_suit_their_attention():
    grouped, latent = GroupedAttention(64, 4, 2, 16), LatentAttention(64, 4, None, 512, 64, 8, 8)
    assert grouped.spec(16, "bfloat16", "fp8", 1).dtype == "float8_e4m3fn"
    assert latent.spec(64, "bfloat16", "fp8", 1).bytes_per_block == 64 * 576
    assert latent.spec(64, "bfloat16", "fp8_ds_mla", 8).bytes_per_block == 64 * 656
    with pytest.raises(extkv.InvalidArgumentError, match="a cache of MLA layers"):
        grouped.spec(16, "bfloat16", "fp8_ds_mla", 1)
    other = LatentAttention(64, 4, None, 256, 64, 8, 8)
    with pytest.raises(extkv.InvalidArgumentError, match="512 \\+ 64 elements, the model has 256"):
        other.spec(16, "bfloat16", "fp8_ds_mla", 1)
