"""The dense Qwen3 family: Llama with normalised query and key heads of a width of their own."""

from __future__ import annotations

from extkv.models.family import Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf_architecture="qwen3",
    qk_norm=True,
    biases=frozenset({"attention_bias"}),
    default_num_kv_heads=32,
    default_head_dim=128,
    window="flag",
    default_window=4096,
)
