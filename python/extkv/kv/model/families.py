"""Architectures whose shape is known, by their name in `config.json`. A new one is an entry here.

Defaults are those of the classes that write the files (huggingface/transformers 5.17,
`models/*/configuration_*.py`); sizes that differ between models must be in the file. Modules for
multi-token prediction are not counted: they are no layers of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.errors import ModelFileError
from extkv.kv.model.attention import LatentAttention
from extkv.kv.model.feed_forward import MixtureOfExperts, Mlp
from extkv.kv.model.hybrid_families import (
    read_bamba,
    read_falcon_h1,
    read_jamba,
    read_nemotron_h,
    read_qwen3_next,
)
from extkv.kv.model.shape import DecoderLayer
from extkv.kv.model.shared_keys import build, grouped_attention, layer_windows, mlp, sparse_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.kv.model.config_file import ConfigFile
    from extkv.kv.model.shape import ModelShape

GEMMA_HEAD_DIM = 256
QWEN3_HEAD_DIM = 128
GEMMA3_PATTERN = 6
QWEN_MAX_WINDOW_LAYERS = 28


def read_model_shape(config: ConfigFile) -> ModelShape:
    """Read the shape of a model.

    Raises:
        ModelFileError: If the architecture is not known, or a key is missing or out of range.
    """
    names = config.texts("architectures")
    if not names:
        raise config.error("architectures", "is missing", "a list of one name")
    read = FAMILIES.get(names[0])
    if read is None:
        raise ModelFileError(
            f"model file {config.path}: architecture is {names[0]!r:.80}, known: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return read(config, names[0])


def read_llama(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a dense model without extras; Mistral's window, if any, is on every layer."""
    layers = (
        DecoderLayer(grouped_attention(config, window=window), feed_forward=mlp(config))
        for window in layer_windows(config, lambda _: architecture == "MistralForCausalLM")
    )
    return build(config, architecture, layers)


def read_qwen2(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Qwen2: queries, keys and values have a bias."""
    layers = (
        DecoderLayer(
            grouped_attention(config, qkv_bias=True, window=window), feed_forward=mlp(config)
        )
        for window in _qwen_windows(config)
    )
    return build(config, architecture, layers)


def read_qwen3(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Qwen3, dense or a mixture of experts: heads are normalised."""
    is_moe = architecture == "Qwen3MoeForCausalLM"
    has_experts = sparse_layers(config) if is_moe else [False] * config.size("num_hidden_layers")
    layers = (
        DecoderLayer(
            grouped_attention(config, head_dim=QWEN3_HEAD_DIM, has_qk_norm=True, window=window),
            feed_forward=_qwen3_experts(config) if is_sparse else mlp(config),
        )
        for window, is_sparse in zip(_qwen_windows(config), has_experts, strict=True)
    )
    return build(config, architecture, layers)


def read_mixtral(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Mixtral: every layer is a mixture of experts."""
    hidden_size = config.size("hidden_size")
    expert = Mlp(hidden_size, config.size("intermediate_size"))
    experts = MixtureOfExperts(hidden_size, config.size("num_local_experts"), expert)
    layers = (
        DecoderLayer(grouped_attention(config, window=window), feed_forward=experts)
        for window in layer_windows(config, lambda _: True)
    )
    return build(config, architecture, layers)


def read_gemma2(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Gemma 2: every second layer slides, beginning with the first."""
    return _read_gemma(config, architecture, lambda index: index % 2 == 0, has_qk_norm=False)


def read_gemma3(config: ConfigFile, architecture: str) -> ModelShape:
    """Read the text model of a Gemma 3: all layers slide but each sixth."""
    pattern = config.size("sliding_window_pattern", GEMMA3_PATTERN)
    return _read_gemma(config, architecture, lambda i: (i + 1) % pattern != 0, has_qk_norm=True)


def read_deepseek(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a DeepSeek-V2 or V3: latent attention, experts after the first dense layers."""
    first_sparse = config.count("first_k_dense_replace", 0)
    step = config.size("moe_layer_freq", 1)
    layers = (
        DecoderLayer(
            _latent_attention(config),
            feed_forward=(
                _deepseek_experts(config)
                if index >= first_sparse and index % step == 0
                else mlp(config)
            ),
        )
        for index in range(config.size("num_hidden_layers"))
    )
    return build(config, architecture, layers)


def _qwen_windows(config: ConfigFile) -> list[int | None]:
    first = config.count("max_window_layers", QWEN_MAX_WINDOW_LAYERS)
    return layer_windows(config, lambda index: index >= first, is_used=False)


def _qwen3_experts(config: ConfigFile) -> MixtureOfExperts:
    hidden_size = config.size("hidden_size")
    expert = Mlp(hidden_size, config.size("moe_intermediate_size"))
    return MixtureOfExperts(hidden_size, config.size("num_experts"), expert)


def _read_gemma(
    config: ConfigFile, architecture: str, slides: Callable[[int], bool], *, has_qk_norm: bool
) -> ModelShape:
    layers = (
        DecoderLayer(
            grouped_attention(
                config, head_dim=GEMMA_HEAD_DIM, has_qk_norm=has_qk_norm, window=window
            ),
            feed_forward=mlp(config),
            num_norms=4,
        )
        for window in layer_windows(config, slides)
    )
    return build(config, architecture, layers, is_tied=True)


def _latent_attention(config: ConfigFile) -> LatentAttention:
    return LatentAttention(
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("num_attention_heads"),
        query_rank=config.optional_size("q_lora_rank"),
        latent_dim=config.size("kv_lora_rank"),
        rotary_dim=config.size("qk_rope_head_dim"),
        key_dim=config.size("qk_nope_head_dim"),
        value_dim=config.size("v_head_dim"),
        bias=config.flag("attention_bias"),
    )


def _deepseek_experts(config: ConfigFile) -> MixtureOfExperts:
    hidden_size, width = config.size("hidden_size"), config.size("moe_intermediate_size")
    num_shared = config.count("n_shared_experts", 0)
    return MixtureOfExperts(
        hidden_size,
        config.size("n_routed_experts"),
        Mlp(hidden_size, width),
        shared=Mlp(hidden_size, num_shared * width) if num_shared else None,
    )


FAMILIES: dict[str, Callable[[ConfigFile, str], ModelShape]] = {
    "BambaForCausalLM": read_bamba,
    "DeepseekV2ForCausalLM": read_deepseek,
    "DeepseekV3ForCausalLM": read_deepseek,
    "FalconH1ForCausalLM": read_falcon_h1,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "JambaForCausalLM": read_jamba,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_llama,
    "MixtralForCausalLM": read_mixtral,
    "NemotronHForCausalLM": read_nemotron_h,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3,
    "Qwen3NextForCausalLM": read_qwen3_next,
}
