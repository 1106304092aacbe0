"""Attention on the host equals the kernels' twins, and reads no slot that is not a sequence's."""

from __future__ import annotations

import pytest
import torch
from extkv.attention.host_cache import GROUP_TOKENS, SHORT_TOKENS, HostPagedCache, group_by_length
from extkv.attention.paged_cache import PagedCache, cache_layers
from extkv.engine.batch import StepInputs
from extkv.kv import KVCache
from extkv.models import ModelConfig
from extkv.reference.kv_append import kv_append
from extkv.reference.paged_attention import paged_attention
from hypothesis import given
from hypothesis import strategies as st

NUM_BLOCKS = 60
# Sums of a hundred float32 terms in another order; bfloat16 rounds softmax weights to 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def config(window: int | None = None, full: frozenset[int] = frozenset()) -> ModelConfig:
    return ModelConfig(
        vocab_size=9,
        hidden_size=24,
        intermediate_size=8,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        context_length=500,
        sliding_window=window,
        full_attention_layer_ids=full,
    )


def make_inputs(
    lengths: list[tuple[int, int]], block_size: int, *, num_padding: int = 0, in_order: bool = False
) -> StepInputs:
    """Sequences of (query_len, seq_len) in shuffled blocks, then tokens of no sequence."""
    generator = torch.Generator().manual_seed(len(lengths))
    order = (
        torch.arange(NUM_BLOCKS) if in_order else torch.randperm(NUM_BLOCKS, generator=generator)
    )
    free = order.tolist()
    width = max([-(-seq_len // block_size) for _, seq_len in lengths] + [0]) + 2
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    slots, positions = [], []
    for seq, (query_len, seq_len) in enumerate(lengths):
        blocks = [free.pop(0) for _ in range(-(-seq_len // block_size))]
        table[seq, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(max(seq_len - query_len, 0), seq_len):
            slots.append(blocks[position // block_size] * block_size + position % block_size)
            positions.append(position)
        if seq_len == 0:
            slots += [-1] * query_len
            positions += [0] * query_len
    slots += [-1] * num_padding
    positions += [0] * num_padding
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0)
    return StepInputs(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        block_table=table,
        sample_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=max([query_len for query_len, _ in lengths] + [0]),
    )


class Pair:
    """One filled cache, seen by the host's attention and by the twins."""

    def __init__(
        self,
        model: ModelConfig,
        inputs: StepInputs,
        *,
        block_size: int,
        dtype: torch.dtype,
        is_causal: bool = True,
    ) -> None:
        self.model, self.inputs, self.is_causal = model, inputs, is_causal
        layers = cache_layers(model, block_size, dtype)
        self.cache = KVCache.reserve(layers, max_blocks=NUM_BLOCKS, device="cpu")
        self.cache.commit(NUM_BLOCKS)
        self.generator = torch.Generator().manual_seed(5)
        for tensor in self.cache.tensors().values():
            tensor.fill_(torch.nan)
        self._fill_past(block_size, dtype)
        self.host = HostPagedCache(self.cache, model, is_causal=is_causal)

    def _fill_past(self, block_size: int, dtype: torch.dtype) -> None:
        """Give every token before the step a key and a value; all other slots stay NaN."""
        starts = self.inputs.query_start_loc.tolist()
        for tensor in self.cache.tensors().values():
            for seq, seq_len in enumerate(self.inputs.seq_lens.tolist()):
                for position in range(seq_len - (starts[seq + 1] - starts[seq])):
                    block = int(self.inputs.block_table[seq, position // block_size])
                    numbers = torch.randn(2, 2, 8, generator=self.generator).to(dtype)
                    tensor[:, block, position % block_size] = numbers

    def check(self, layer_id: int, dtype: torch.dtype) -> None:
        num_tokens = self.inputs.token_ids.shape[0]
        fused = torch.randn(num_tokens, 10, 8, generator=self.generator).to(dtype)
        query, key, value = fused[:, :6], fused[:, 6:8], fused[:, 8:]
        found = self.host.attend(layer_id, query, key, value)
        tensor = self.cache.tensors()[f"layers.{layer_id}"]
        stored = tensor.clone()
        kv_append(key, value, tensor[0], tensor[1], self.inputs.slot_mapping)
        # What was stored before is stored again.
        assert torch.equal(stored.nan_to_num(9), tensor.nan_to_num(9))
        expected = paged_attention(
            query,
            tensor[0],
            tensor[1],
            query_start_loc=self.inputs.query_start_loc,
            seq_lens=self.inputs.seq_lens,
            block_table=self.inputs.block_table,
            scale=8**-0.5,
            is_causal=self.is_causal,
            sliding_window=self.model.layer_window(layer_id),
        )
        assert found.shape == query.shape
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


BATCHES = {
    "decode-one": [(1, 37)],
    "decode-one-token": [(1, 1)],
    "decode-equal": [(1, 33)] * 5,
    "decode-mixed": [(1, 1), (1, 16), (1, 17), (1, 40), (1, 64)],
    "decode-far-apart": [(1, 3), (1, 200), (1, 5), (1, 190), (1, 90)],
    "prefill-one": [(21, 21)],
    "prefill-some": [(21, 21), (1, 1), (16, 16)],
    "chunk": [(7, 45)],
    "chunks-about-folded": [(16, 60), (17, 60), (16, 16)],
    "everything": [(1, 19), (1, 130), (1, 64), (3, 3), (21, 45), (2, 50)],
    "nothing-between": [(1, 19), (0, 0), (0, 12), (2, 0), (1, 0), (5, 9), (1, 7)],
    "empty": [],
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 40], ids="window={}".format)
@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_equals_the_twins_in_a_poisoned_cache(name, window, dtype):
    inputs = make_inputs(BATCHES[name], 16, num_padding=3 if name == "nothing-between" else 0)
    pair = Pair(config(window, frozenset({1})), inputs, block_size=16, dtype=dtype)
    pair.host.bind(inputs)
    pair.check(0, dtype)
    pair.check(1, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 40], ids="window={}".format)
@pytest.mark.parametrize("name", BATCHES)
def test_blocks_that_see_all_of_themselves_equal_the_twins(name, window, dtype):
    inputs = make_inputs(BATCHES[name], 16, num_padding=3 if name == "nothing-between" else 0)
    model = config(window, frozenset({1}))
    pair = Pair(model, inputs, block_size=16, dtype=dtype, is_causal=False)
    pair.host.bind(inputs)
    pair.check(0, dtype)
    pair.check(1, dtype)


@pytest.mark.parametrize("slots", [[5, 3, 70], [5, -1, 70], [-1, -1, -1], []], ids=str)
def test_rows_of_all_layers_go_to_their_slots_and_nowhere_else(slots):
    pair = Pair(config(None, frozenset()), make_inputs([], 16), block_size=16, dtype=torch.float32)
    keys, values = torch.randn(2, 2, len(slots), 2, 8)
    mapping = torch.tensor(slots, dtype=torch.int64)
    expected = {name: tensor.clone() for name, tensor in pair.cache.tensors().items()}
    for key, value, tensor in zip(keys, values, expected.values(), strict=True):
        kv_append(key, value, tensor[0], tensor[1], mapping)
    pair.host.append(keys, values, mapping)
    for name, tensor in pair.cache.tensors().items():
        assert torch.equal(tensor.nan_to_num(9), expected[name].nan_to_num(9))


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
@pytest.mark.parametrize("in_order", [False, True], ids=["shuffled", "in-order"])
def test_block_sizes_and_sequences_whose_blocks_lie_in_order(block_size, in_order):
    lengths = [(1, 19), (1, 3), (4, 11)]
    inputs = make_inputs(lengths, block_size, in_order=in_order)
    pair = Pair(config(), inputs, block_size=block_size, dtype=torch.float32)
    pair.host.bind(inputs)
    pair.check(0, torch.float32)


def test_steps_follow_each_other_in_one_cache():
    inputs = make_inputs([(1, 40), (1, 3)], 16)
    pair = Pair(config(), inputs, block_size=16, dtype=torch.float32)
    for lengths in ([(1, 40), (1, 3)], [(1, 3)], [(9, 9), (1, 40)]):
        pair.inputs = make_inputs(lengths, 16)
        pair._fill_past(16, torch.float32)
        pair.host.bind(pair.inputs)
        pair.check(0, torch.float32)


def test_the_cache_of_the_kernels_gives_the_same_over_their_twins():
    model, inputs = config(7, frozenset({1})), make_inputs(BATCHES["everything"], 16)
    pair = Pair(model, inputs, block_size=16, dtype=torch.float32)
    paged = PagedCache(pair.cache, model, max_num_seqs=8, max_model_len=200)
    generator = torch.Generator().manual_seed(8)
    for layer_id in (0, 1):
        new = torch.randn(inputs.token_ids.shape[0], 10, 8, generator=generator)
        parts = new[:, :6], new[:, 6:8], new[:, 8:]
        pair.host.bind(inputs)
        paged.bind(inputs)
        found, expected = pair.host.attend(layer_id, *parts), paged.attend(layer_id, *parts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_before_bind_is_refused():
    pair = Pair(config(), make_inputs([(1, 1)], 16), block_size=16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="bind comes before"):
        pair.host.attend(0, torch.zeros(1, 6, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))


def test_a_slot_past_the_cache_is_refused():
    inputs = make_inputs([(1, 1)], 16)
    pair = Pair(config(), inputs, block_size=16, dtype=torch.float32)
    inputs.slot_mapping[0] = NUM_BLOCKS * 16
    pair.host.bind(inputs)
    with pytest.raises(IndexError):
        pair.host.attend(0, torch.zeros(1, 6, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))


@given(st.dictionaries(st.integers(0, 100), st.integers(1, 9000), max_size=40))
def test_groups_hold_every_sequence_once_within_bounds(lengths):
    groups = group_by_length(lengths)
    assert sorted(seq for group in groups for seq in group) == sorted(lengths)
    for group in groups:
        assert group
        longest = max(lengths[seq] for seq in group)
        total = sum(lengths[seq] for seq in group)
        assert len(group) == 1 or longest * len(group) <= GROUP_TOKENS
        assert longest <= SHORT_TOKENS or 2 * longest * len(group) <= 3 * total
