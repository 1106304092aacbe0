"""What kernels and CUDA graphs ask of a drafter's forward pass."""

import pytest
import torch
from extkv.models import DecoderOps
from extkv.models.dspark import (
    DSparkModel,
    ReferenceSpeculator,
    draft_rows,
)
from extkv.models.dspark.weights import allocate_drafter_weights
from extkv.reference import (
    rms_norm,
    rotary_embedding,
    small_batch_linear,
)
from support.drafters import (
    HEADS,
    config_with_head,
    in_float64,
    random_taps,
    random_tokens,
    tiny_config,
    tiny_drafter,
    tiny_target,
)
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = tiny_config()
# Two orders of the same float32 sums.
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture
def model():
    return in_float64(tiny_drafter(CONFIG))


def test_taps_of_the_target_are_what_context_reads():
    target = tiny_target()
    model = tiny_drafter(CONFIG, target)
    _, taps = target.forward(
        random_tokens(4), torch.arange(4), NoAttention(), taps=CONFIG.tap_layer_ids
    )
    keys, _ = model.context(taps, torch.arange(4))
    assert keys.shape == (3, 4, 2, 8)


class Bfloat16Twins(DecoderOps):
    """The kernels' twins, as a model on CUDA would call them."""

    def normalize(self, residual, norm):
        return rms_norm.rms_norm(residual, norm.weight, norm.eps)

    def add_linear(self, residual, values, weight, bias, norm):
        return small_batch_linear.small_batch_add_linear(
            residual, values, weight, bias, norm=norm.weight, eps=norm.eps
        )

    def linear(self, normalized, weight, bias):
        if isinstance(normalized, torch.Tensor):
            return super().linear(normalized, weight, bias)
        return small_batch_linear.small_batch_linear(normalized, weight, bias)

    def gated_linear(self, normalized, weight, bias):
        if isinstance(normalized, torch.Tensor):
            return super().gated_linear(normalized, weight, bias)
        return small_batch_linear.small_batch_linear(normalized, weight, bias, is_gated=True)

    def hidden(self, _normalized, residual, norm):
        return rms_norm.rms_norm(residual, norm.weight, norm.eps)

    def rotate(self, query, key, cos, sin, positions, *, norms):
        rotary_embedding.rotary_embedding(query, key, cos, sin, positions, norms=norms)


def test_kernels_can_stand_in_for_every_operation():
    plain = tiny_drafter(CONFIG)
    model = DSparkModel(CONFIG, plain.weights, ops=Bfloat16Twins())
    taps = random_taps(CONFIG, 6)
    for found, expected in zip(
        model.context(taps, torch.arange(6)), plain.context(taps, torch.arange(6)), strict=True
    ):
        torch.testing.assert_close(found, expected, **FLOAT32)
    speculators = ReferenceSpeculator(model), ReferenceSpeculator(plain)
    for speculator in speculators:
        speculator.append(taps)
    torch.testing.assert_close(*(speculator.hidden(3) for speculator in speculators), **FLOAT32)


# What reads a value on the host, or makes a tensor from host data.
FORBIDDEN = {"_local_scalar_dense", "arange", "ones", "full", "scalar_tensor", "tensor"}


class SeenOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


class NoAttention:
    """A cache outside the model's responsibility."""

    def attend(self, _layer_id, query, _key, _value):
        return query


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_round_reads_no_value_on_the_host(head):
    model = tiny_drafter(config_with_head(head, draft_vocab_size=20))
    ids, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    taps = random_taps(model.config, 8)
    with SeenOperators() as seen:
        model.context(taps, positions)
        rows = draft_rows(model.config, model.block_forward(ids, positions, NoAttention()))
        model.base_logits(rows[:, 0])
        model.codes(ids[:2], rows[:, 0], model.initial_state(2))
        model.confidence_logits(rows[:, 0], ids[:2])
        model.to_target_ids(ids)
    assert len(seen.names) > 5
    assert not seen.names & FORBIDDEN


@pytest.mark.parametrize("head", HEADS)
def test_a_round_needs_no_tensor_value(head):
    # Tensors on the meta device have none: reading one raises.
    config = config_with_head(head)
    weights = allocate_drafter_weights(config, torch.bfloat16, torch.device("meta"))
    model = DSparkModel(config, weights)
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    taps = torch.empty(3, 8, 16, dtype=torch.bfloat16, device="meta")
    keys, _ = model.context(taps, ids)
    hidden = model.block_forward(ids, ids, NoAttention())
    assert keys.dtype == hidden.dtype == torch.bfloat16
    assert model.base_logits(hidden).shape == (8, 29)
    assert model.confidence_logits(hidden, ids).dtype == torch.float32
    if head != "none":
        codes, _ = model.codes(ids, hidden, model.initial_state(8))
        assert (codes.shape, codes.dtype) == ((8, 6), torch.bfloat16)
