"""The decoder: taps, the seam for kernels, sliding windows, and what a CUDA graph asks of it."""

import dataclasses

import pytest
import torch
from extkv.errors import InvalidArgumentError, OutOfMemoryError
from extkv.models import QWEN3_8B, DecoderModel, DecoderOps, ModelConfig, kernel_ops, random_model
from extkv.models.attention import causal_attention
from extkv.models.weights import allocate_weights, count_parameters, slot_view, weight_slots
from extkv.reference import rms_norm, rotary_embedding, small_batch_linear
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=50,
    qk_norm=True,
    attention_bias=True,
    mlp_bias=True,
)
TOKEN_IDS = torch.arange(11) * 5 % 37
POSITIONS = torch.arange(11)


class WholeSequence:
    """The plainest cache: one forward pass over one sequence."""

    def attend(self, _layer_id, query, key, value):
        return causal_attention(query, key, value)


@pytest.fixture
def model():
    return random_model(CONFIG, seed=1)


def test_taps_are_the_residual_stream_in_the_order_asked_for(model):
    hidden, taps = model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(2, 0, 2, -1))
    assert taps.shape == (4, 11, 24)
    assert torch.equal(taps[0], taps[2])
    assert torch.equal(taps[3], model.weights.embedding[TOKEN_IDS])
    norm = torch.nn.functional.rms_norm(taps[0], (24,), model.weights.final_norm, 1e-5)
    assert torch.equal(hidden, norm)
    assert torch.equal(hidden, model.forward(TOKEN_IDS, POSITIONS, WholeSequence()))


def test_taps_are_written_where_the_caller_says(model):
    buffer = torch.full((2, 16, 24), float("nan"))
    out = buffer[:, :11]
    _, taps = model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, 1), out=out)
    assert taps is out
    assert torch.equal(buffer[:, 11:].isnan(), torch.ones(2, 5, 24, dtype=torch.bool))
    _, expected = model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, 1))
    assert torch.equal(taps, expected)


def test_no_taps_give_an_empty_second_item(model):
    hidden, taps = model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=())
    assert (hidden.shape, taps.shape) == ((11, 24), (0, 11, 24))


@pytest.mark.parametrize("tap", [-2, 3])
def test_rejects_a_tap_that_is_no_layer(model, tap):
    with pytest.raises(InvalidArgumentError, match=f"tap is {tap}, expected -1 to 2"):
        model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, tap))


@pytest.mark.parametrize(
    "out", [torch.zeros(1, 11, 24), torch.zeros(2, 11, 24, dtype=torch.bfloat16)]
)
def test_rejects_another_place_for_taps(model, out):
    with pytest.raises(
        InvalidArgumentError, match=r"out is .*, expected torch.float32 \[2, 11, 24"
    ):
        model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, 1), out=out)


def test_32_bit_ids_and_positions_give_the_same(model):
    expected = model.forward(TOKEN_IDS, POSITIONS, WholeSequence())
    found = model.forward(TOKEN_IDS.int(), POSITIONS.int(), WholeSequence())
    assert torch.equal(found, expected)


class CountingOps(DecoderOps):
    """Say what was called."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in {"normalize", "add_linear", "linear", "gated_linear", "hidden", "rotate"}:
            self.calls.append(name)
        return super().__getattribute__(name)


def test_an_engine_can_pass_its_own_operations(model):
    ops = CountingOps()
    other = DecoderModel(CONFIG, model.weights, ops=ops)
    expected = model.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, 2))
    found = other.forward(TOKEN_IDS, POSITIONS, WholeSequence(), taps=(0, 2))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    # The plain operations are made of each other.
    added = ["add_linear", "normalize"]
    layer = ["linear", "rotate", *added, "gated_linear", "linear", *added]
    assert ops.calls == ["normalize", *layer * 3, "hidden"]


class SmallBatchTwins(DecoderOps):
    """The twins of the kernels for few tokens."""

    def add_linear(self, residual, values, weight, bias, norm):
        return small_batch_linear.small_batch_add_linear(
            residual, values, weight, bias, norm=norm.weight, eps=norm.eps
        )

    def linear(self, normalized, weight, bias):
        if isinstance(normalized, torch.Tensor):
            return super().linear(normalized, weight, bias)
        return small_batch_linear.small_batch_linear(normalized, weight, bias)

    def gated_linear(self, normalized, weight, bias):
        return small_batch_linear.small_batch_linear(normalized, weight, bias, is_gated=True)

    def hidden(self, _normalized, residual, norm):
        return rms_norm.rms_norm(residual, norm.weight, norm.eps)

    def rotate(self, *arguments, **options):
        rotary_embedding.rotary_embedding(*arguments, **options)


def test_the_twins_of_the_kernels_fit_the_seam(model):
    # Weights that are not 1, so that their place in the order of operations matters.
    for layer in model.weights.layers:
        for norm in (layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm):
            norm.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(norm.shape[0]))
    found = DecoderModel(CONFIG, model.weights, ops=SmallBatchTwins()).forward(
        TOKEN_IDS, POSITIONS, WholeSequence()
    )
    expected = model.forward(TOKEN_IDS, POSITIONS, WholeSequence())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_kernels_are_those_of_the_kernels_package():
    pytest.importorskip("triton", reason="this machine has no Triton")
    assert type(kernel_ops()).__module__ == "extkv.models.cuda_ops"


def test_importing_models_imports_no_kernel(run_python):
    result = run_python(
        "import sys, extkv.models\n"
        "assert not [name for name in sys.modules if name.startswith('extkv.kernels')]"
    )
    assert result.returncode == 0, result.stderr


def test_rotation_in_place_leaves_values_alone():
    fused = torch.randn(5, 10, 8, generator=torch.Generator().manual_seed(0))
    before = fused.clone()
    angles = torch.arange(20.0).view(5, 4)
    positions = torch.arange(5)
    DecoderOps().rotate(
        fused[:, :6], fused[:, 6:8], angles.cos(), angles.sin(), positions, norms=None
    )
    assert torch.equal(fused[:, 8:], before[:, 8:])
    # Each pair keeps its length, and only position 0 of pair 0 keeps its direction.
    torch.testing.assert_close(pair_lengths(fused), pair_lengths(before))
    assert torch.equal(fused[0, :8, 0], before[0, :8, 0])
    assert not torch.isclose(fused[1:, :8], before[1:, :8]).all(dim=-1).any()


def pair_lengths(heads):
    return heads[..., :4] ** 2 + heads[..., 4:] ** 2


# What copies a value to the host, or makes a tensor that is not a function of another.
FORBIDDEN = {"_local_scalar_dense", "arange", "zeros", "ones", "full", "scalar_tensor", "tensor"}


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


def test_a_forward_pass_makes_no_tensor_and_reads_no_value(model):
    with SeenOperators() as seen:
        hidden, _ = model.forward(TOKEN_IDS, POSITIONS, NoAttention(), taps=(0,))
        model.compute_logits(hidden)
    assert len(seen.names) > 5
    assert not seen.names & FORBIDDEN


def test_a_forward_pass_needs_no_tensor_value():
    # Tensors on the meta device have none: reading one raises.
    weights = allocate_weights(CONFIG, torch.bfloat16, torch.device("meta"))
    model = DecoderModel(CONFIG, weights)
    token_ids = torch.empty(5, dtype=torch.int64, device="meta")
    hidden, taps = model.forward(token_ids, token_ids, NoAttention(), taps=(1, 2))
    assert model.compute_logits(hidden).shape == (5, 37)
    assert taps.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [1, 3, 8, 13, 100])
@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (1, 20), (6, 0), (13, 9), (4, 30)])
def test_windowed_attention_sees_the_last_tokens_only(num_tokens, num_cached, window):
    generator = torch.Generator().manual_seed(0)
    seq_len = num_tokens + num_cached
    query = torch.randn(num_tokens, 4, 8, generator=generator)
    keys = torch.randn(seq_len, 2, 8, generator=generator)
    values = torch.randn(seq_len, 2, 8, generator=generator)
    found = causal_attention(query, keys, values, sliding_window=window)
    for row in range(num_tokens):
        last = num_cached + row + 1
        seen = slice(max(0, last - window), last)
        expected = causal_attention(query[row : row + 1], keys[seen], values[seen])
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-5, atol=1e-5)


def test_a_random_model_is_the_same_for_the_same_seed():
    first, again, other = (random_model(CONFIG, seed=seed).weights for seed in (3, 3, 4))
    assert torch.equal(first.layers[2].down_proj, again.layers[2].down_proj)
    assert not torch.equal(first.layers[2].down_proj, other.layers[2].down_proj)
    assert not torch.equal(first.layers[0].o_proj, first.layers[1].o_proj)


def test_a_random_model_has_the_shape_of_its_config():
    weights = random_model(CONFIG, dtype=torch.float16).weights
    layer = weights.layers[1]
    assert layer.qkv_proj.shape == ((6 + 2 * 2) * 8, 24)
    assert layer.gate_up_proj.shape == (80, 24)
    assert layer.qkv_bias.shape == (80,)
    assert layer.q_norm.shape == layer.k_norm.shape == (8,)
    assert weights.lm_head.shape == weights.embedding.shape == (37, 24)
    assert weights.lm_head is not weights.embedding
    tensors = [weights.embedding, weights.lm_head, weights.final_norm]
    for layer in weights.layers:
        tensors += [tensor for tensor in vars(layer).values() if tensor is not None]
    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert sum(tensor.numel() for tensor in tensors) == count_parameters(CONFIG)


def test_a_random_model_keeps_activations_in_range():
    deep = dataclasses.replace(CONFIG, num_layers=40, hidden_size=64, tie_word_embeddings=True)
    model = random_model(deep, dtype=torch.bfloat16)
    hidden = model.forward(TOKEN_IDS, POSITIONS, WholeSequence())
    logits = model.compute_logits(hidden).float()
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_slots_cover_every_weight_once():
    weights = random_model(CONFIG).weights
    for slot in weight_slots(CONFIG):
        slot_view(weights, slot).fill_(float("nan"))
    assert weights.embedding.isnan().all()
    assert weights.final_norm.isnan().all()
    for layer in weights.layers:
        assert all(tensor.isnan().all() for tensor in vars(layer).values())
    assert sum(slot.num_elements for slot in weight_slots(CONFIG)) == count_parameters(CONFIG)


def test_qwen3_8b_has_the_published_number_of_parameters():
    assert count_parameters(QWEN3_8B) == 8_190_735_360
    shapes = allocate_weights(QWEN3_8B, torch.bfloat16, torch.device("meta"))
    assert shapes.layers[35].qkv_proj.shape == (6144, 4096)
    assert shapes.layers[35].gate_up_proj.shape == (24_576, 4096)


def test_weights_that_do_not_fit_are_a_typed_error():
    huge = dataclasses.replace(CONFIG, vocab_size=2**40)
    with pytest.raises(OutOfMemoryError, match=r"cannot allocate [\d,]+ bytes of weights on cpu"):
        random_model(huge)
