"""The drafter's forward pass against formulas written out token by token, in float64."""

import dataclasses
import math

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import (
    ReferenceSpeculator,
    block_positions,
    block_token_ids,
    draft_rows,
    drafter_config,
    predicted_positions,
    random_drafter,
    teacher_forced,
)
from extkv.models.dspark.weights import allocate_drafter_weights
from extkv.models.random_model import QWEN3_8B
from extkv.models.rope import plain_frequencies
from extkv.reference import (
    kv_append,
    paged_attention,
)
from support.drafters import (
    TARGET,
    in_float64,
    random_taps,
    random_tokens,
    scramble,
    tiny_config,
    tiny_drafter,
)

CONFIG = tiny_config()
LAYOUTS = pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Two orders of the same float32 sums.
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture
def model():
    return in_float64(tiny_drafter(CONFIG))


def norm(row, weight, eps=1e-6):
    return row / math.sqrt(float((row * row).mean()) + eps) * weight


def rotate(head, position):
    angles = (position * plain_frequencies(TARGET.rope_theta, head.shape[0])).float()
    cosine, sine = angles.cos(), angles.sin()
    first, second = head.chunk(2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine))


def projections(model, layer_id):
    """The separate projections of a layer, as a checkpoint names them."""
    backbone = model.config.backbone
    sizes = [
        heads * backbone.head_dim for heads in (backbone.num_heads, *[backbone.num_kv_heads] * 2)
    ]
    return model.weights.backbone.layers[layer_id].qkv_proj.split(sizes)


def context_of_token(model, layer_id, taps_of_token, position):
    """RoPE(k_norm(k_proj(hidden_norm(fc(taps))))) by head, and v_proj of the same."""
    weights, layer = model.weights, model.weights.backbone.layers[layer_id]
    features = norm(weights.fc @ taps_of_token.flatten(), weights.hidden_norm)
    _, k_proj, v_proj = projections(model, layer_id)
    keys = (k_proj @ features).view(-1, 8)
    keys = [rotate(norm(head, layer.k_norm), position) for head in keys]
    return torch.stack(keys), (v_proj @ features).view(-1, 8)


def hidden_of_block(model, taps, anchor_token_id, *, window=None):
    """Hidden states of all slots of the block after a context, by loops."""
    config, weights = model.config, model.weights
    anchor = taps.shape[1]
    token_ids = [anchor_token_id] + [config.mask_token_id] * (config.block_size - 1)
    stream = [weights.backbone.embedding[token_id] for token_id in token_ids]
    for layer_id, layer in enumerate(weights.backbone.layers):
        q_proj, k_proj, v_proj = projections(model, layer_id)
        first = 0 if window is None else max(anchor - window, 0)
        seen = [
            context_of_token(model, layer_id, taps[:, token], token)
            for token in range(first, anchor)
        ]
        normed = [norm(row, layer.input_norm) for row in stream]
        for slot, row in enumerate(normed):
            heads = (k_proj @ row).view(-1, 8)
            keys = [rotate(norm(head, layer.k_norm), anchor + slot) for head in heads]
            seen.append((torch.stack(keys), (v_proj @ row).view(-1, 8)))
        for slot, row in enumerate(normed):
            outs = []
            for index, head in enumerate((q_proj @ row).view(-1, 8)):
                query = rotate(norm(head, layer.q_norm), anchor + slot)
                kv_head = index // 2
                scores = torch.stack([query @ keys[kv_head] for keys, _ in seen]) / math.sqrt(8)
                shares = torch.softmax(scores, 0)
                outs.append(
                    sum(
                        share * values[kv_head]
                        for share, (_, values) in zip(shares, seen, strict=True)
                    )
                )
            stream[slot] = stream[slot] + layer.o_proj @ torch.cat(outs)
            after = norm(stream[slot], layer.post_attention_norm)
            gate, up = (layer.gate_up_proj @ after).chunk(2)
            stream[slot] = stream[slot] + layer.down_proj @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([norm(row, weights.backbone.final_norm) for row in stream])


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (4, 7), (1, 9, 1), (0, 11, 0)])
def test_context_is_the_formula_whatever_the_chunks(model, chunks):
    taps = random_taps(CONFIG, 11, dtype=torch.float64)
    positions = torch.arange(11) + 5
    parts = [
        model.context(taps[:, start : start + count], positions[start : start + count])
        for start, count in zip([0, *torch.tensor(chunks).cumsum(0).tolist()], chunks, strict=False)
    ]
    keys, values = (torch.cat([part[side] for part in parts], dim=1) for side in (0, 1))
    assert keys.shape == values.shape == (3, 11, 2, 8)
    for layer_id in range(3):
        for token in range(11):
            key, value = context_of_token(model, layer_id, taps[:, token], token + 5)
            torch.testing.assert_close(keys[layer_id, token], key, **EXACT)
            torch.testing.assert_close(values[layer_id, token], value, **EXACT)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_context_serves_any_number_of_layers(num_layers):
    model = in_float64(tiny_drafter(tiny_config(num_layers=num_layers)))
    taps = random_taps(model.config, 3, dtype=torch.float64)
    keys, values = model.context(taps, torch.tensor([7, 0, 63]))
    for layer_id in range(num_layers):
        key, value = context_of_token(model, layer_id, taps[:, 2], 63)
        torch.testing.assert_close(keys[layer_id, 2], key, **EXACT)
        torch.testing.assert_close(values[layer_id, 2], value, **EXACT)


def test_context_keys_and_values_are_heads_of_one_tensor(model):
    keys, values = model.context(
        random_taps(CONFIG, 4, dtype=torch.float64), torch.arange(4, dtype=torch.int32)
    )
    assert keys.stride(-1) == values.stride(-1) == 1
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "taps",
    [torch.zeros(1, 4, 16), torch.zeros(3, 5, 16), torch.zeros(3, 4, 16, dtype=torch.bfloat16)],
    ids=["taps", "tokens", "dtype"],
)
def test_context_rejects_taps_that_do_not_fit(taps):
    model = random_drafter(CONFIG)
    with pytest.raises(
        InvalidArgumentError, match=r"taps are .*expected torch.float32 \[3, 4, 16\]"
    ):
        model.context(taps, torch.arange(4))


@LAYOUTS
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_block_is_the_formula(num_tokens, samples_from_anchor):
    config = tiny_config(samples_from_anchor=samples_from_anchor)
    model = in_float64(tiny_drafter(config))
    taps = random_taps(config, num_tokens, dtype=torch.float64)
    speculator = ReferenceSpeculator(model)
    speculator.append(taps)
    expected = hidden_of_block(model, taps, 17)
    torch.testing.assert_close(
        speculator.hidden(17), expected[config.first_draft_slot :], rtol=1e-8, atol=1e-8
    )


def test_a_sliding_window_begins_before_the_block_for_every_slot():
    config = tiny_config()
    windowed = dataclasses.replace(config.backbone, sliding_window=3)
    model = in_float64(tiny_drafter(dataclasses.replace(config, backbone=windowed)))
    taps = random_taps(config, 9, dtype=torch.float64)
    speculator = ReferenceSpeculator(model)
    speculator.append(taps)
    expected = hidden_of_block(model, taps, 17, window=3)
    torch.testing.assert_close(speculator.hidden(17), expected, rtol=1e-8, atol=1e-8)
    tokens = torch.cat((random_tokens(9), torch.tensor([17])))
    later = random_taps(config, 10, dtype=torch.float64)
    later[:, :9] = taps
    trained = teacher_forced(model, later, tokens, torch.tensor([9]))
    torch.testing.assert_close(trained.hidden[0], expected, rtol=1e-8, atol=1e-8)


class Blocks:
    """Attention of several blocks, each over a context of its own."""

    has_sliding_windows = True

    def __init__(self, contexts, block_size):
        self.contexts = contexts
        self.block_size = block_size

    def attend(self, layer_id, *heads):
        parts = zip(*(part.split(self.block_size) for part in heads), strict=True)
        outs = [
            context.attend(layer_id, *part)
            for context, part in zip(self.contexts, parts, strict=True)
        ]
        return torch.cat(outs)


def test_packed_blocks_are_the_blocks_alone(model):
    speculators, lengths = [], (5, 0, 8)
    for seed, num_tokens in enumerate(lengths):
        speculators.append(ReferenceSpeculator(model))
        speculators[-1].append(random_taps(CONFIG, num_tokens, seed=seed, dtype=torch.float64))
    anchors = torch.tensor([3, 11, 28])
    positions = block_positions(CONFIG, torch.tensor(lengths), model.num_positions)
    cache = Blocks([speculator.context for speculator in speculators], CONFIG.block_size)
    hidden = model.block_forward(block_token_ids(CONFIG, anchors), positions, cache)
    rows = draft_rows(CONFIG, hidden)
    for index, speculator in enumerate(speculators):
        alone = speculator.hidden(int(anchors[index]))
        torch.testing.assert_close(rows[index], alone, **EXACT)


class PagedBlocks:
    """Context and blocks in a paged cache, as an engine keeps them."""

    def __init__(self, model, lengths, *, block_size=4):
        backbone = model.config.backbone
        num_slots = model.config.block_size
        ends = [length + num_slots for length in lengths]
        most = max(-(-end // block_size) for end in ends)
        # Sequences take turns, so that no sequence has neighbouring blocks; the rest is NaN.
        self.table = torch.arange(most * len(lengths)).view(most, len(lengths)).T.int().contiguous()
        shape = (most * len(lengths), block_size, backbone.num_kv_heads, backbone.head_dim)
        self.caches = [
            (torch.full(shape, float("nan")), torch.full(shape, float("nan")))
            for _ in range(backbone.num_layers)
        ]
        self.block_size = block_size
        self.lengths = lengths
        self.starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * num_slots
        self.ends = torch.tensor(ends, dtype=torch.int32)
        self.scale = backbone.head_dim**-0.5

    def slots(self, seq, start, end):
        positions = torch.arange(start, end)
        blocks = self.table[seq, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def append_context(self, seq, start, keys, values):
        slots = self.slots(seq, start, start + keys.shape[1])
        for layer_id, (key_cache, value_cache) in enumerate(self.caches):
            kv_append.kv_append(keys[layer_id], values[layer_id], key_cache, value_cache, slots)

    def attend(self, layer_id, query, key, value):
        key_cache, value_cache = self.caches[layer_id]
        ends = self.ends.tolist()
        slots = [self.slots(s, start, ends[s]) for s, start in enumerate(self.lengths)]
        kv_append.kv_append(key, value, key_cache, value_cache, torch.cat(slots))
        return paged_attention.paged_attention(
            query,
            key_cache,
            value_cache,
            query_start_loc=self.starts,
            seq_lens=self.ends,
            block_table=self.table,
            scale=self.scale,
            is_causal=False,
        )


def test_a_paged_cache_gives_the_blocks_of_whole_tensors():
    model = tiny_drafter(CONFIG)
    lengths, anchors = (5, 0, 8), torch.tensor([3, 11, 28])
    cache, expected = PagedBlocks(model, lengths), []
    for seq, length in enumerate(lengths):
        taps = random_taps(CONFIG, length, seed=seq)
        speculator = ReferenceSpeculator(model)
        speculator.append(taps)
        expected.append(speculator.hidden(int(anchors[seq])))
        for start, end in ((0, length // 2), (length // 2, length)):
            positions = torch.arange(start, end)
            cache.append_context(seq, start, *model.context(taps[:, start:end], positions))
    positions = block_positions(CONFIG, torch.tensor(lengths), model.num_positions)
    hidden = model.block_forward(block_token_ids(CONFIG, anchors), positions, cache)
    torch.testing.assert_close(draft_rows(CONFIG, hidden), torch.stack(expected), **FLOAT32)


@pytest.mark.parametrize("changed_slot", range(4))
def test_any_slot_changes_all_slots(model, changed_slot):
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(CONFIG, 5, dtype=torch.float64))
    token_ids = block_token_ids(CONFIG, torch.tensor([3]))
    positions = block_positions(CONFIG, torch.tensor([5]), 64)
    before = model.block_forward(token_ids, positions, speculator.context)
    token_ids[changed_slot] = 12
    after = model.block_forward(token_ids, positions, speculator.context)
    assert bool(((before - after).abs().amax(dim=1) > 1e-6).all())


# Bug case B38.
def test_positions_of_slots_and_drafts():
    config = drafter_config(TARGET)
    assert block_positions(config, torch.tensor([12]), 64).tolist() == list(range(12, 19))
    assert predicted_positions(config, torch.tensor([12])).tolist() == [list(range(13, 20))]
    fill_in = dataclasses.replace(config, block_size=8, samples_from_anchor=False)
    assert block_positions(fill_in, torch.tensor([12]), 64).tolist() == list(range(12, 20))
    assert predicted_positions(fill_in, torch.tensor([12])).tolist() == [list(range(13, 20))]


def test_positions_stop_at_the_last_one():
    assert block_positions(CONFIG, torch.tensor([61, 3]), 64).tolist() == [
        *(61, 62, 63, 63),
        *(3, 4, 5, 6),
    ]


def test_a_block_holds_its_anchor_and_masks():
    mask = CONFIG.mask_token_id
    found = block_token_ids(CONFIG, torch.tensor([5, 9]))
    assert found.tolist() == [5, mask, mask, mask, 9, mask, mask, mask]


# Bug case B55.
def test_rows_that_predict():
    hidden = torch.arange(16.0).view(8, 2)
    assert torch.equal(draft_rows(CONFIG, hidden), hidden.view(2, 4, 2))
    fill_in = dataclasses.replace(CONFIG, samples_from_anchor=False)
    assert torch.equal(draft_rows(fill_in, hidden), hidden.view(2, 4, 2)[:, 1:])
    assert (CONFIG.num_drafts, fill_in.num_drafts) == (4, 3)


def test_refresh_takes_over_changed_weights(model):
    taps = random_taps(CONFIG, 2, dtype=torch.float64)
    scramble(model, seed=9)
    keys, _ = model.context(taps, torch.arange(2))
    torch.testing.assert_close(keys[2, 1], context_of_token(model, 2, taps[:, 1], 1)[0], **EXACT)


def test_published_shape_of_an_8b_target():
    config = drafter_config(QWEN3_8B)
    weights = allocate_drafter_weights(config, torch.bfloat16, torch.device("meta"))
    assert config.tap_layer_ids == (1, 9, 17, 25, 33)
    assert config.mask_token_id == 151_669
    assert tuple(weights.fc.shape) == (4096, 20_480)
    assert tuple(weights.markov_w2.shape) == (151_936, 256)
    assert tuple(weights.confidence_proj.shape) == (1, 4352)
    # The published file: 4.74 GB with both vocabulary matrices.
    assert round(weights.num_bytes / 1e9, 2) == 4.74
    of_14b = drafter_config(dataclasses.replace(QWEN3_8B, num_layers=40))
    assert of_14b.tap_layer_ids == (1, 10, 19, 28, 37)


@pytest.mark.parametrize(("num_layers", "taps"), [(1, (-1,)), (2, (0,)), (4, (2,)), (5, (1, 2))])
def test_small_targets_have_fewer_taps(num_layers, taps):
    target = dataclasses.replace(TARGET, num_layers=num_layers)
    assert drafter_config(target).tap_layer_ids == taps
