"""The Llama family, and Mistral, which is Llama with an optional sliding window.

`LlamaModel`, `LlamaWeights` and `LlamaLayerWeights` are the names under which the one decoder is
known to callers that build a llama model by hand.
"""

from __future__ import annotations

import torch

from extkv.models.decoder import DecoderModel
from extkv.models.family import Family
from extkv.models.weights import LayerWeights, ModelWeights

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    gguf_architecture="llama",
    biases=frozenset({"attention_bias", "mlp_bias"}),
    gguf_interleaves_heads=True,
)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    default_num_kv_heads=8,
    window="always",
    default_window=4096,
)

LlamaModel = DecoderModel
LlamaWeights = ModelWeights


class LlamaLayerWeights(LayerWeights):
    """Layer weights made from separate projections, which are copied into the fused ones."""

    def __init__(
        self,
        *,
        input_norm: torch.Tensor,
        q_proj: torch.Tensor,
        k_proj: torch.Tensor,
        v_proj: torch.Tensor,
        o_proj: torch.Tensor,
        post_attention_norm: torch.Tensor,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
    ) -> None:
        super().__init__(
            input_norm=input_norm,
            qkv_proj=torch.cat((q_proj, k_proj, v_proj)),
            o_proj=o_proj,
            post_attention_norm=post_attention_norm,
            gate_up_proj=torch.cat((gate_proj, up_proj)),
            down_proj=down_proj,
        )
