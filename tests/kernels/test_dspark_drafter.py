"""A drafter on the kernels against the same drafter in plain PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from extkv.models.cuda_ops import KernelOps
from extkv.models.dspark import DSparkModel, ReferenceSpeculator
from support.drafters import config_with_head, random_taps, tiny_config, tiny_drafter

# bfloat16 has 8 bits; the interpreter cannot multiply matrices of it.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


def pair(config, dtype, device):
    plain = tiny_drafter(config, dtype=dtype, device=device)
    return DSparkModel(config, plain.weights, ops=KernelOps()), plain


def assert_near(found, expected, dtype):
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 6, 20])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_context_of_kernels(num_layers, num_tokens, device: torch.device):
    config = tiny_config(num_layers=num_layers)
    kernels, plain = pair(config, torch.float32, device)
    taps = random_taps(config, num_tokens).to(device)
    positions = torch.arange(num_tokens, device=device) + 3
    for found, expected in zip(
        kernels.context(taps, positions), plain.context(taps, positions), strict=True
    ):
        assert_near(found, expected, torch.float32)


def test_block_of_kernels(device: torch.device):
    config = tiny_config()
    taps = random_taps(config, 6).to(device)
    rows = []
    for model in pair(config, torch.float32, device):
        speculator = ReferenceSpeculator(model)
        speculator.append(taps)
        rows.append(speculator.hidden(3))
    assert_near(*rows, torch.float32)


WIDE = dataclasses.replace(
    tiny_config().backbone, hidden_size=128, intermediate_size=256, head_dim=64
)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 300])
def test_gpu_drafter_equals_plain_pytorch(num_tokens, device: torch.device):
    config = dataclasses.replace(
        tiny_config(), backbone=dataclasses.replace(WIDE, context_length=512)
    )
    kernels, plain = pair(config, torch.bfloat16, device)
    taps = random_taps(config, num_tokens, dtype=torch.bfloat16).to(device)
    positions = torch.arange(num_tokens, device=device)
    for found, expected in zip(
        kernels.context(taps, positions), plain.context(taps, positions), strict=True
    ):
        assert_near(found, expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_gpu_round_is_captured_in_a_graph(head, device: torch.device):
    config = dataclasses.replace(config_with_head(head), backbone=WIDE)
    model, _ = pair(config, torch.bfloat16, device)
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(config, 9, dtype=torch.bfloat16).to(device))
    taps = random_taps(config, 2, seed=5, dtype=torch.bfloat16).to(device)
    context_at = torch.tensor([9, 10], device=device)
    token_ids = torch.tensor([3, 28, 28, 28], device=device)
    positions = torch.arange(9, 13, device=device)

    def draft():
        keys, values = model.context(taps, context_at)
        hidden = model.block_forward(token_ids, positions, speculator.context)
        codes, _ = model.codes(token_ids[:1], hidden[:1], model.initial_state(1))
        logits = model.base_logits(hidden)
        return keys, values, logits, codes, model.confidence_logits(hidden, token_ids)

    draft()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draft()
    taps.mul_(-1)
    context_at.add_(7)
    token_ids[0] = 11
    positions.add_(2)
    graph.replay()
    replayed = [tensor.clone() for tensor in captured]
    for found, expected in zip(replayed, draft(), strict=True):
        assert torch.equal(found, expected)
