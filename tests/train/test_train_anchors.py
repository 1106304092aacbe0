"""Anchors, supervised rows, weights and attention masks, by enumeration."""

import itertools

import numpy as np
import pytest
import torch
from extkv.dspark.train.anchors import draw_anchors, slot_weights, supervised
from extkv.dspark.train.batches import draw_batch, make_batch, padded_texts
from extkv.dspark.train.block_attention import (
    MaskedAttention,
    SplitAttention,
    attention_bias,
)
from extkv.dspark.train.settings import BatchSettings
from extkv.dspark.train.texts import Text, TextStore
from support.drafters import tiny_config
from support.training import random_texts


def test_every_anchor_has_answer_at_its_place_and_the_next():
    for bits in itertools.product([False, True], repeat=6):
        mask = torch.tensor([bits])
        possible = {place for place in range(5) if bits[place] and bits[place + 1]}
        generator = torch.Generator().manual_seed(0)
        anchors, is_real = draw_anchors(mask, 8, generator)
        drawn = anchors[is_real].tolist()
        assert set(drawn) == possible
        assert drawn == sorted(drawn)
        assert len(drawn) == len(set(drawn))
        assert anchors[~is_real].tolist() == [0] * (8 - len(possible))
        assert is_real.tolist()[0] == [True] * len(possible) + [False] * (8 - len(possible))


def test_anchors_are_uniform_over_the_places():
    mask = torch.tensor([[False] * 3 + [True] * 9])
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(12)
    for _ in range(4000):
        anchors, is_real = draw_anchors(mask, 2, generator)
        assert bool(is_real.all())
        counts[anchors[0]] += 1
    assert counts[:3].sum() == 0
    assert counts[11] == 0
    assert float((counts[3:11] - 1000).abs().max()) < 5 * 1000**0.5


def test_rows_are_supervised_up_to_the_first_place_outside_the_answer():
    for bits in itertools.product([False, True], repeat=6):
        mask = torch.tensor([bits])
        anchors = torch.arange(6)[None]
        found = supervised(mask, anchors, torch.ones(1, 6, dtype=torch.bool), 3)[0]
        for anchor in range(6):
            expected = []
            for draft in range(1, 4):
                place = anchor + draft
                is_on = place < 6 and bits[place]
                expected.append(is_on and (not expected or expected[-1]))
            assert found[anchor].tolist() == expected


def test_padding_blocks_have_no_rows():
    mask = torch.ones(1, 6, dtype=torch.bool)
    is_real = torch.tensor([[True, False]])
    found = supervised(mask, torch.tensor([[2, 0]]), is_real, 2)
    assert found.tolist() == [[[True, True], [False, False]]]


def test_weights_fall_with_the_place_in_the_block():
    expected = [np.exp(-place / 4) for place in range(7)]
    assert slot_weights(7, 4.0).tolist() == pytest.approx(expected)


def test_rows_name_label_and_the_logits_that_predict_it():
    store = random_texts(5)
    token_ids, loss_mask = padded_texts(store, [0, 1, 2, 3, 4])
    anchors, is_real = draw_anchors(loss_mask, 8, torch.Generator().manual_seed(2))
    batch = make_batch(token_ids, loss_mask, anchors, is_real, {3, 4})
    for count in (3, 4):
        rows = batch.rows[count]
        seen = 0
        for place, slot, label, target_row in zip(*(part.tolist() for part in rows), strict=True):
            text, rest = divmod(place, 8 * count)
            block, draft = divmod(rest, count)
            assert draft == slot
            position = int(anchors[text, block]) + draft + 1
            assert label == store.text(text).token_ids[position]
            predicting = int(batch.predicting[target_row])
            assert divmod(predicting, token_ids.shape[1]) == (text, position - 1)
            seen += 1
        mask = supervised(loss_mask, anchors, is_real, count)
        assert seen == int(mask.sum())


def test_texts_are_padded_and_answers_marked():
    store = TextStore()
    store.extend(
        [Text([5, 6, 7], 1, 0.0, True), Text([8, 9, 10, 11, 12, 13, 14, 15, 16], 4, 1.0, False)]
    )
    token_ids, mask = padded_texts(store, [1, 0])
    assert token_ids.tolist() == [[*range(8, 17), *[0] * 7], [5, 6, 7, *[0] * 13]]
    assert mask[0].nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8]
    assert mask[1].nonzero()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
def test_a_slot_sees_the_context_before_its_anchor_and_its_own_block(samples_from_anchor):
    config = tiny_config(samples_from_anchor=samples_from_anchor)
    store = random_texts(3)
    batch = draw_batch(
        store, [0, 1, 2], BatchSettings(batch_blocks=24), {config.num_drafts},
        torch.Generator().manual_seed(3),
    )  # fmt: skip
    bias = attention_bias(config, batch, torch.float32)
    num_texts, num_tokens = batch.token_ids.shape
    num_anchors, size = batch.anchors.shape[1], config.block_size
    assert bias.shape == (num_texts, 1, num_anchors * size, num_tokens + num_anchors * size)
    for text, query, key in itertools.product(
        range(num_texts), range(num_anchors * size), range(bias.shape[-1])
    ):
        block = query // size
        if key < num_tokens:
            is_visible = bool(batch.is_real[text, block]) and key < int(batch.anchors[text, block])
        else:
            is_visible = (key - num_tokens) // size == block
        assert float(bias[text, 0, query, key]) == (0.0 if is_visible else -torch.inf)


@pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
def test_both_ways_to_attend_are_one(samples_from_anchor):
    config = tiny_config(samples_from_anchor=samples_from_anchor)
    generator = torch.Generator().manual_seed(2)
    batch = draw_batch(random_texts(3), range(3), BatchSettings(batch_blocks=72), {4}, generator)
    assert not batch.is_real.all()
    num_texts, num_tokens = batch.token_ids.shape
    num_slots = batch.anchors.shape[1] * config.block_size

    def drawn(length, num_heads):
        shape = (num_texts, length, num_heads, 8)
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    query = drawn(num_slots, 4)
    context = (drawn(num_tokens, 2), drawn(num_tokens, 2))
    slots = (drawn(num_slots, 2), drawn(num_slots, 2))
    weights = torch.randn((num_texts, num_slots, 32), generator=generator, dtype=torch.float64)
    found = []
    for attention in (MaskedAttention(config, batch, torch.float64), SplitAttention(config, batch)):
        attended = attention.attend(query, context, slots)
        gradients = torch.autograd.grad((attended * weights).sum(), (query, *context, *slots))
        found.append((attended, *gradients))
    for masked, split in zip(*found, strict=True):
        torch.testing.assert_close(split, masked, rtol=1e-9, atol=1e-12)
