"""The forward pass equals transformers' LlamaForCausalLM on small random models."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.models import LlamaConfig, LlamaLayerWeights, LlamaModel, LlamaWeights
from extkv.models.attention import causal_attention
from extkv.models.gguf_source import deinterleaved

# Float32 rounding of three small layers; logits are of size one.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class WholeSequence:
    """The plainest cache: one forward pass over one sequence."""

    def attend(self, _layer_id, query, key, value):
        return causal_attention(query, key, value)


def make_reference(num_heads, num_kv_heads, head_dim, *, tied):
    # Imported late: importing transformers takes five seconds.
    from transformers import LlamaConfig as ReferenceConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = ReferenceConfig(
        vocab_size=51,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.3,
    )
    reference = LlamaForCausalLM(config).eval()
    for name, weight in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return reference


def convert(reference):
    config = reference.config
    layers = tuple(
        LlamaLayerWeights(
            input_norm=layer.input_layernorm.weight.data,
            q_proj=layer.self_attn.q_proj.weight.data,
            k_proj=layer.self_attn.k_proj.weight.data,
            v_proj=layer.self_attn.v_proj.weight.data,
            o_proj=layer.self_attn.o_proj.weight.data,
            post_attention_norm=layer.post_attention_layernorm.weight.data,
            gate_proj=layer.mlp.gate_proj.weight.data,
            up_proj=layer.mlp.up_proj.weight.data,
            down_proj=layer.mlp.down_proj.weight.data,
        )
        for layer in reference.model.layers
    )
    weights = LlamaWeights(
        embedding=reference.model.embed_tokens.weight.data,
        layers=layers,
        final_norm=reference.model.norm.weight.data,
        lm_head=reference.lm_head.weight.data,
    )
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context_length=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=5000.0,
    )
    return LlamaModel(shape, weights)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 10), (4, 2, 10), (5, 1, 8), (10, 2, 6)],
    ids=["H4-KV4-D10", "H4-KV2-D10", "H5-KV1-D8", "H10-KV2-D6"],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_logits_equal_transformers(num_tokens, num_heads, num_kv_heads, head_dim, tied):
    reference = make_reference(num_heads, num_kv_heads, head_dim, tied=tied)
    model = convert(reference)
    token_ids = torch.randint(51, (num_tokens,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    hidden = model.forward(token_ids, torch.arange(num_tokens), WholeSequence())
    torch.testing.assert_close(model.compute_logits(hidden), expected, **TOLERANCE)


def test_shifted_positions_give_the_same_attention():
    model = convert(make_reference(4, 2, 10, tied=True))
    token_ids = torch.arange(12)
    near = model.forward(token_ids, torch.arange(12), WholeSequence())
    far = model.forward(token_ids, torch.arange(12) + 40, WholeSequence())
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-4)


def attention_by_rows(query, keys, values):
    """The definition: softmax over the visible keys, one row and head at a time, in float64."""
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    output = torch.empty_like(query, dtype=torch.float64)
    for row in range(num_tokens):
        visible = keys.shape[0] - num_tokens + row + 1
        for head in range(num_heads):
            key = keys[:visible, head // group].double()
            scores = key @ query[row, head].double() / head_dim**0.5
            output[row, head] = scores.softmax(0) @ values[:visible, head // group].double()
    return output.float()


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 13])
@pytest.mark.parametrize("num_cached", [0, 1, 16, 31])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)], ids=["H1-KV1", "H6-KV2", "H4-KV4"])
def test_attention_sees_the_past_and_itself_only(num_tokens, num_cached, heads):
    generator = torch.Generator().manual_seed(3)
    seq_len = num_cached + num_tokens
    query = torch.randn(num_tokens, heads[0], 8, generator=generator)
    keys = torch.randn(seq_len, heads[1], 8, generator=generator)
    values = torch.randn(seq_len, heads[1], 8, generator=generator)
    expected = attention_by_rows(query, keys, values)
    torch.testing.assert_close(causal_attention(query, keys, values), expected, **TOLERANCE)


def test_deinterleaving_undoes_the_interleaving_of_gguf():
    weight = torch.arange(2 * 6 * 3.0).view(12, 3)
    # How llama.cpp's converter writes query and key rows.
    stored = weight.view(2, 2, 3, 3).transpose(1, 2).reshape(12, 3)
    assert not torch.equal(stored, weight)
    restored = torch.empty_like(weight)
    restored[deinterleaved(torch.arange(12), 6)] = stored
    assert torch.equal(restored, weight)
