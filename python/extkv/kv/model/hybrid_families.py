"""Families with recurrent layers. `families.py` lists all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.kv.model.feed_forward import MixtureOfExperts, Mlp
from extkv.kv.model.recurrent import GatedDeltaNet, Mamba1, Mamba2
from extkv.kv.model.shape import DecoderLayer
from extkv.kv.model.shared_keys import build, grouped_attention, layer_types, mlp, sparse_layers

if TYPE_CHECKING:
    from extkv.kv.model.config_file import ConfigFile
    from extkv.kv.model.shape import ModelShape

QWEN3_NEXT_HEAD_DIM = 256
NEMOTRON_H_HEAD_DIM = 128
# Letters of `hybrid_override_pattern`, and the words that newer files list instead.
NEMOTRON_H_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def read_qwen3_next(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Qwen3-Next: gated delta nets with gated attention at each fourth layer."""
    interval = config.size("full_attention_interval", 4)
    types = layer_types(config) or [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention"
        for index in range(config.size("num_hidden_layers"))
    ]
    attention = grouped_attention(
        config, head_dim=QWEN3_NEXT_HEAD_DIM, has_qk_norm=True, has_output_gate=True
    )
    recurrent = GatedDeltaNet(
        hidden_size=config.size("hidden_size"),
        num_key_heads=config.size("linear_num_key_heads"),
        num_value_heads=config.size("linear_num_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        kernel=_kernel(config, "linear_conv_kernel_dim"),
    )
    layers = (
        DecoderLayer(
            attention=attention if kind == "full_attention" else None,
            recurrent=None if kind == "full_attention" else recurrent,
            feed_forward=_qwen3_next_experts(config) if is_sparse else mlp(config),
        )
        for kind, is_sparse in zip(types, sparse_layers(config), strict=True)
    )
    return build(config, architecture, layers)


def read_jamba(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Jamba: Mamba layers, attention and experts each at a period of its own."""
    attention_period, attention_offset = _period(config, "attn_layer", 8, 4)
    expert_period, expert_offset = _period(config, "expert_layer", 2, 1)
    hidden_size, num_experts = config.size("hidden_size"), config.size("num_experts", 16)
    experts = MixtureOfExperts(hidden_size, num_experts, mlp(config))
    layers = (
        DecoderLayer(
            attention=grouped_attention(config) if is_attention else None,
            recurrent=None if is_attention else _jamba_mamba(config),
            feed_forward=(
                experts
                if num_experts > 1 and index % expert_period == expert_offset
                else mlp(config)
            ),
        )
        for index in range(config.size("num_hidden_layers"))
        for is_attention in [index % attention_period == attention_offset]
    )
    return build(config, architecture, layers)


def read_bamba(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Bamba: Mamba 2 layers, attention at the layers that the file lists."""
    with_attention = set(config.counts("attn_layer_indices"))
    num_layers = config.size("num_hidden_layers")
    if any(index >= num_layers for index in with_attention):
        found = f"is {sorted(with_attention)!r:.80}"
        raise config.error("attn_layer_indices", found, f"indices of {num_layers} layers")
    num_channels = config.size("mamba_expand", 2) * config.size("hidden_size")
    recurrent = _mamba2(config, num_channels, config.flag("mamba_proj_bias"))
    layers = (
        DecoderLayer(
            attention=grouped_attention(config) if index in with_attention else None,
            recurrent=None if index in with_attention else recurrent,
            feed_forward=mlp(config),
        )
        for index in range(num_layers)
    )
    return build(config, architecture, layers)


def read_falcon_h1(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Falcon-H1: every layer has attention and Mamba 2 side by side."""
    num_channels = config.optional_size("mamba_d_ssm")
    if num_channels is None:
        num_channels = config.size("mamba_expand", 2) * config.size("hidden_size")
    output_bias, has_norm = config.flag("projectors_bias"), config.flag("mamba_rms_norm")
    layer = DecoderLayer(
        attention=grouped_attention(config),
        recurrent=_mamba2(config, num_channels, output_bias, has_norm=has_norm),
        feed_forward=mlp(config),
    )
    return build(config, architecture, [layer] * config.size("num_hidden_layers"))


def read_nemotron_h(config: ConfigFile, architecture: str) -> ModelShape:
    """Read a Nemotron-H: every layer is one of Mamba 2, attention, a network or experts.

    Raises:
        ModelFileError: If a layer is of another kind.
    """
    key = "hybrid_override_pattern"
    kinds: list[str] = list(config.text(key) or "")
    if not kinds:
        key = "layers_block_type"
        kinds = layer_types(config, key) or []
    unknown = [kind for kind in kinds if kind not in NEMOTRON_H_KINDS]
    if unknown or not kinds:
        found = f"has {unknown[0]!r:.20}" if unknown else "is missing"
        raise config.error(key, found, f"one of {', '.join(NEMOTRON_H_KINDS)} per layer")
    one_of_each: dict[str, DecoderLayer] = {}
    layers = []
    for kind in kinds:
        name = NEMOTRON_H_KINDS[kind]
        if name not in one_of_each:
            one_of_each[name] = _nemotron_h_layer(config, name)
        layers.append(one_of_each[name])
    return build(config, architecture, layers)


def _kernel(config: ConfigFile, key: str) -> int:
    kernel = config.size(key, 4)
    if kernel == 1:
        raise config.error(key, "is 1", "at least 2")
    return kernel


def _period(config: ConfigFile, name: str, period: int, offset: int) -> tuple[int, int]:
    return config.size(f"{name}_period", period), config.count(f"{name}_offset", offset)


def _qwen3_next_experts(config: ConfigFile) -> MixtureOfExperts:
    hidden_size = config.size("hidden_size")
    return MixtureOfExperts(
        hidden_size,
        config.size("num_experts"),
        Mlp(hidden_size, config.size("moe_intermediate_size")),
        shared=Mlp(hidden_size, config.size("shared_expert_intermediate_size")),
        has_shared_gate=True,
    )


def _jamba_mamba(config: ConfigFile) -> Mamba1:
    hidden_size = config.size("hidden_size")
    rank = -(-hidden_size // 16)
    if config.values.get("mamba_dt_rank", "auto") != "auto":
        rank = config.size("mamba_dt_rank")
    return Mamba1(
        hidden_size=hidden_size,
        num_channels=config.size("mamba_expand", 2) * hidden_size,
        state_size=config.size("mamba_d_state", 16),
        kernel=_kernel(config, "mamba_d_conv"),
        time_step_rank=rank,
        conv_bias=config.flag("mamba_conv_bias", default=True),
        bias=config.flag("mamba_proj_bias"),
    )


def _mamba2(
    config: ConfigFile, num_channels: int, output_bias: bool, *, has_norm: bool = True
) -> Mamba2:
    num_heads = config.size("mamba_n_heads", 128)
    head_dim = num_channels // num_heads
    if config.values.get("mamba_d_head", "auto") != "auto":
        head_dim = config.size("mamba_d_head")
    if num_heads * head_dim != num_channels:
        found = f"is {num_heads} with heads of {head_dim}"
        raise config.error("mamba_n_heads", found, f"{num_channels} channels together")
    return Mamba2(
        hidden_size=config.size("hidden_size"),
        num_channels=num_channels,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.size("mamba_n_groups", 1),
        state_size=config.size("mamba_d_state", 256),
        kernel=_kernel(config, "mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        input_bias=config.flag("mamba_proj_bias"),
        output_bias=output_bias,
        has_norm=has_norm,
    )


def _nemotron_h_layer(config: ConfigFile, kind: str) -> DecoderLayer:
    hidden_size, bias = config.size("hidden_size"), config.flag("mlp_bias")
    if kind == "attention":
        attention = grouped_attention(config, head_dim=NEMOTRON_H_HEAD_DIM, qkv_bias=False)
        return DecoderLayer(attention=attention, num_norms=1)
    if kind == "mlp":
        width = config.size("intermediate_size")
        network = Mlp(hidden_size, width, is_gated=False, bias=bias)
        return DecoderLayer(feed_forward=network, num_norms=1)
    if kind == "moe":
        return DecoderLayer(feed_forward=_nemotron_h_experts(config), num_norms=1)
    num_heads, head_dim = config.size("mamba_num_heads", 128), config.size("mamba_head_dim", 64)
    recurrent = Mamba2(
        hidden_size=hidden_size,
        num_channels=num_heads * head_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.size("n_groups", 8),
        state_size=config.size("ssm_state_size", 128),
        kernel=_kernel(config, "conv_kernel"),
        conv_bias=config.flag("use_conv_bias", default=True),
        input_bias=config.flag("use_bias"),
        output_bias=config.flag("use_bias"),
    )
    return DecoderLayer(recurrent=recurrent, num_norms=1)


def _nemotron_h_experts(config: ConfigFile) -> MixtureOfExperts:
    hidden_size, latent_size = config.size("hidden_size"), config.optional_size("moe_latent_size")
    width = config.size("moe_intermediate_size")
    shared_width = config.size("moe_shared_expert_intermediate_size")
    bias = config.flag("mlp_bias")
    return MixtureOfExperts(
        hidden_size,
        config.size("n_routed_experts"),
        Mlp(hidden_size if latent_size is None else latent_size, width, is_gated=False),
        shared=Mlp(hidden_size, shared_width, is_gated=False, bias=bias),
        latent_size=latent_size,
        latent_bias=bias,
    )
