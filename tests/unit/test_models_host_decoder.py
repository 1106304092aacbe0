"""The host's forward pass equals the plain one, whatever the number of rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from extkv.models import ModelConfig, random_model
from extkv.models.attention import causal_attention
from extkv.models.host_decoder import HostDecoder, add_linear, linear, rms_norm, rotate
from extkv.models.ops import DecoderOps, Norm
from torch.nn import functional

if TYPE_CHECKING:
    from extkv.models.decoder import DecoderModel

# Float32 rounding of three layers in another order; values are of size one to ten.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

LLAMA = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=64,
)
CONFIGS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True),
    "bias": dataclasses.replace(LLAMA, attention_bias=True, mlp_bias=True),
    # No projection has a multiple of 32 rows.
    "odd": dataclasses.replace(
        LLAMA, vocab_size=37, hidden_size=40, intermediate_size=56, num_heads=3, num_kv_heads=1
    ),
    # An odd number of blocks, so that gate and up share one.
    "odd-blocks": dataclasses.replace(LLAMA, intermediate_size=80),
}


class OneSequence:
    """The plainest cache: one pass over one sequence."""

    has_sliding_windows = True

    def attend(self, layer_id, query, key, value):
        del layer_id
        return causal_attention(query, key, value)


def model_of(name: str) -> DecoderModel:
    model = random_model(CONFIGS[name], seed=1)
    generator = torch.Generator().manual_seed(2)
    for layer in model.weights.layers:
        for field, weight in vars(layer).items():
            if weight is not None and ("norm" in field or "bias" in field):
                weight.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 17, 33])
def test_hidden_states_logits_and_taps_equal_the_plain_forward_pass(name, num_tokens):
    model = model_of(name)
    host = HostDecoder.of(model)
    assert isinstance(host, HostDecoder)
    token_ids = torch.arange(num_tokens) % model.config.vocab_size
    positions = torch.arange(num_tokens).flip(0)
    taps = (1, -1, 2, 0)
    expected = model.forward(token_ids, positions, OneSequence(), taps=taps)
    found = host.forward(token_ids, positions, OneSequence(), taps=taps)
    for part, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(part, whole, **TOLERANCE)
    torch.testing.assert_close(
        host.forward(token_ids, positions, OneSequence()), expected[0], **TOLERANCE
    )
    torch.testing.assert_close(
        host.compute_logits(expected[0]), model.compute_logits(expected[0]), **TOLERANCE
    )


def test_the_weights_are_shared_and_not_changed():
    model = model_of("qwen3")
    before = [
        w.clone() for layer in model.weights.layers for w in vars(layer).values() if w is not None
    ]
    host = HostDecoder.of(model)
    assert host.weights is model.weights
    assert host.num_positions == model.num_positions
    host.forward(torch.arange(5), torch.arange(5), OneSequence())
    after = [w for layer in model.weights.layers for w in vars(layer).values() if w is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_keep_the_plain_forward_pass(dtype):
    model = random_model(LLAMA, dtype=dtype)
    assert HostDecoder.of(model) is model


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16, 17, 64])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("out_features", [31, 32, 96], ids="N{}".format)
def test_linear_equals_the_library(num_rows, has_bias, out_features):
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 50, generator=generator)
    weight = torch.randn(out_features, 50, generator=generator)
    bias = torch.randn(out_features, generator=generator) if has_bias else None
    residual = torch.randn(num_rows, out_features, generator=generator)
    expected = functional.linear(hidden, weight, bias)
    torch.testing.assert_close(linear(hidden, weight, bias), expected, **TOLERANCE)
    expected = expected + residual
    add_linear(residual, hidden, weight, bias)
    torch.testing.assert_close(residual, expected, **TOLERANCE)


def test_linear_takes_rows_of_a_wider_tensor():
    fused = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))
    expected = functional.linear(fused[:, 50:], weight)
    torch.testing.assert_close(linear(fused[:, 50:], weight, None), expected, **TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 64), (7, 3, 16)], ids=str)
def test_rms_norm_equals_the_plain_one(shape):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(shape, generator=generator) * 10
    hidden[0] *= 1e-4
    weight = torch.rand(shape[-1], generator=generator)
    before = hidden.clone()
    found = rms_norm(hidden, weight, 1e-6)
    torch.testing.assert_close(
        found, DecoderOps().normalize(before, Norm(weight, 1e-6)), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(hidden, before)


def test_rotate_equals_the_plain_rotation():
    generator = torch.Generator().manual_seed(4)
    heads = torch.randn(5, 6, 8, generator=generator)
    tables = torch.randn(2, 9, 4, generator=generator)
    positions = torch.tensor([3, 0, 8, 8, 1])
    expected = heads.clone()
    DecoderOps().rotate(expected[:, :4], expected[:, 4:5], *tables, positions, norms=None)
    rotate(heads[:, :5], *(table[positions][:, None] for table in tables))
    torch.testing.assert_close(heads, expected, rtol=1e-6, atol=1e-6)
