"""On a CUDA device a model gives the values of the CPU, also with kernels and in a CUDA graph."""

import dataclasses

import pytest
import torch
from extkv.models import DecoderModel, DecoderOps, ModelConfig, kernel_ops, random_model
from extkv.models.attention import causal_attention
from extkv.models.checkpoint import Checkpoint
from extkv.models.weight_loading import load_weights
from extkv.models.weights import slot_view, weight_slots
from safetensors.torch import save_file

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=128,
    qk_norm=True,
    attention_bias=True,
)
TOKEN_IDS = torch.arange(33) * 7 % 300
POSITIONS = torch.arange(33)
# Significant bits: 24 and 8, after three layers; logits are of size one.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


class WholeSequence:
    """The plainest cache: one forward pass over one sequence."""

    def attend(self, _layer_id, query, key, value):
        return causal_attention(query, key, value)


@pytest.fixture(autouse=True)
def exact_float32():
    """Keeps float32 products from being computed in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def checkpoint(tmp_path):
    """Weights of a random model in one file."""
    weights = random_model(CONFIG, seed=5).weights
    save_file(
        {slot.name: slot_view(weights, slot).clone() for slot in weight_slots(CONFIG)},
        tmp_path / "model.safetensors",
    )
    return Checkpoint(tmp_path)


def load(checkpoint, device, dtype, ops=None):
    weights = load_weights(checkpoint, CONFIG, dtype=dtype, device=torch.device(device))
    return DecoderModel(CONFIG, weights, ops=ops)


def logits_of(model, device):
    hidden = model.forward(TOKEN_IDS.to(device), POSITIONS.to(device), WholeSequence())
    return model.compute_logits(hidden)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("make_ops", [DecoderOps, kernel_ops], ids=["torch", "triton"])
def test_logits_equal_those_of_the_cpu(checkpoint, dtype, make_ops):
    expected = logits_of(load(checkpoint, "cpu", torch.float32), "cpu")
    found = logits_of(load(checkpoint, "cuda", dtype, make_ops()), "cuda").float().cpu()
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("make_ops", [DecoderOps, kernel_ops], ids=["torch", "triton"])
def test_a_graph_replays_the_forward_pass(checkpoint, make_ops):
    model = load(checkpoint, "cuda", torch.bfloat16, make_ops())
    token_ids, positions = TOKEN_IDS.cuda(), POSITIONS.cuda()
    taps = torch.zeros(2, 33, 64, dtype=torch.bfloat16, device="cuda")

    def step():
        hidden, _ = model.forward(token_ids, positions, WholeSequence(), taps=(0, 2), out=taps)
        return model.compute_logits(hidden)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    token_ids.copy_(TOKEN_IDS.flip(0))
    graph.replay()
    replayed, replayed_taps = logits.clone(), taps.clone()
    assert torch.equal(replayed, step())
    assert torch.equal(replayed_taps, taps)


def test_large_tensors_arrive_whole(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=200_000, tie_word_embeddings=True)
    table = torch.randn(200_000, 64, generator=torch.Generator().manual_seed(0))
    weights = random_model(config).weights
    weights.embedding.copy_(table)
    save_file(
        {slot.name: slot_view(weights, slot).clone() for slot in weight_slots(config)},
        tmp_path / "model.safetensors",
    )
    device = torch.device("cuda")
    loaded = load_weights(Checkpoint(tmp_path), config, dtype=torch.bfloat16, device=device)
    assert torch.equal(loaded.embedding.cpu(), table.bfloat16())


def test_a_random_model_takes_the_memory_of_its_weights_once():
    config = dataclasses.replace(CONFIG, vocab_size=100_000, hidden_size=1024)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_model(config, dtype=torch.bfloat16, device="cuda")
    weights = sum(slot.num_elements for slot in weight_slots(config)) * model.dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before <= weights + 8 * 1024 * 1024
