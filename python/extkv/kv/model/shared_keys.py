"""Keys of `config.json` that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.kv.model.attention import GroupedAttention
from extkv.kv.model.feed_forward import Mlp
from extkv.kv.model.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extkv.kv.model.config_file import ConfigFile
    from extkv.kv.model.shape import DecoderLayer


def build(
    config: ConfigFile, architecture: str, layers: Iterable[DecoderLayer], *, is_tied: bool = False
) -> ModelShape:
    """Put a model together from its layers; `is_tied` is the family's default."""
    return ModelShape(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        layers=tuple(layers),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=is_tied),
    )


def grouped_attention(
    config: ConfigFile,
    *,
    head_dim: int | None = None,
    qkv_bias: bool | None = None,
    has_qk_norm: bool = False,
    has_output_gate: bool = False,
    window: int | None = None,
) -> GroupedAttention:
    """Read an attention layer; without `qkv_bias`, ``attention_bias`` counts for all projections.

    Raises:
        ModelFileError: If the file names no head width and heads do not divide the hidden size.
    """
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    found = config.optional_size("head_dim") or head_dim
    if found is None:
        found, rest = divmod(hidden_size, num_heads)
        if rest:
            raise config.error(
                "num_attention_heads", f"is {num_heads}", f"a divisor of hidden_size {hidden_size}"
            )
    bias = config.flag("attention_bias")
    return GroupedAttention(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=found,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        output_bias=bias if qkv_bias is None else False,
        has_qk_norm=has_qk_norm,
        has_output_gate=has_output_gate,
        window=window,
    )


def mlp(config: ConfigFile, size_key: str = "intermediate_size") -> Mlp:
    """Read a gated feed-forward layer."""
    return Mlp(config.size("hidden_size"), config.size(size_key), bias=config.flag("mlp_bias"))


def layer_types(config: ConfigFile, key: str = "layer_types") -> list[str] | None:
    """Return the kind of each layer, or None where the file does not list them.

    Raises:
        ModelFileError: If it lists more or fewer than there are layers.
    """
    found = config.texts(key)
    num_layers = config.optional_size("num_hidden_layers")
    if found is not None and num_layers is not None and len(found) != num_layers:
        raise config.error(key, f"has {len(found)} entries", f"{num_layers}, one per layer")
    return found


def layer_windows(
    config: ConfigFile, slides: Callable[[int], bool], *, is_used: bool = True
) -> list[int | None]:
    """Return the sliding window of each layer, None where a layer sees all tokens.

    Args:
        config: The configuration; ``layer_types`` decides where it is there.
        slides: Tells for the index of a layer whether it slides where there is no such list.
        is_used: Default of ``use_sliding_window``.
    """
    num_layers = config.size("num_hidden_layers")
    window = config.optional_size("sliding_window")
    if window is None or not config.flag("use_sliding_window", default=is_used):
        return [None] * num_layers
    types = layer_types(config)
    if types is None:
        return [window if slides(index) else None for index in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in types]


def sparse_layers(config: ConfigFile) -> list[bool]:
    """Tell for each layer of a Qwen mixture of experts whether it has experts."""
    step, dense = config.size("decoder_sparse_step", 1), set(config.counts("mlp_only_layers"))
    num_layers = config.size("num_hidden_layers")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
