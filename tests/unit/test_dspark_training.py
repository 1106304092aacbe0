"""The forward pass of training against that of inference."""

import dataclasses

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import (
    DSparkModel,
    ReferenceSpeculator,
    teacher_forced,
)
from support.drafters import (
    HEADS,
    config_with_head,
    in_float64,
    random_taps,
    random_tokens,
    tiny_config,
    tiny_drafter,
)

CONFIG = tiny_config()
LAYOUTS = pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture
def model():
    return in_float64(tiny_drafter(CONFIG))


@LAYOUTS
def test_tokens_from_the_anchor_on_leave_the_draft_unchanged(samples_from_anchor):
    config = tiny_config(samples_from_anchor=samples_from_anchor)
    model = in_float64(tiny_drafter(config))
    taps, tokens = random_taps(config, 12, dtype=torch.float64), random_tokens(12)
    anchors = torch.tensor([6])
    before = teacher_forced(model, taps, tokens, anchors)
    taps[:, 6:] = 99.0
    changed = tokens.clone()
    changed[7:] = 0
    after = teacher_forced(model, taps, changed, anchors)
    assert torch.equal(before.hidden, after.hidden)
    taps[:, 5] += 1.0
    assert not torch.allclose(before.hidden, teacher_forced(model, taps, tokens, anchors).hidden)


@LAYOUTS
@pytest.mark.parametrize("head", HEADS)
def test_training_forward_is_the_inference_forward(head, samples_from_anchor):
    config = config_with_head(head, samples_from_anchor=samples_from_anchor)
    model = in_float64(tiny_drafter(config))
    taps, tokens = random_taps(config, 15, dtype=torch.float64), random_tokens(15)
    anchors = torch.tensor([0, 4, 5, 11])
    trained = teacher_forced(model, taps, tokens, anchors)
    for index, anchor in enumerate(anchors.tolist()):
        speculator = ReferenceSpeculator(model)
        speculator.append(taps[:, :anchor])
        hidden = speculator.hidden(int(tokens[anchor]))
        torch.testing.assert_close(trained.hidden[index], hidden, **EXACT)
        state = model.initial_state(1)
        for step in range(config.num_drafts):
            previous = tokens[min(anchor + step, 14)].view(1)
            row = hidden[step : step + 1]
            logits = model.base_logits(row)
            if head != "none":
                codes, state = model.codes(previous, row, state)
                logits = logits + codes @ model.markov_weight.T
            torch.testing.assert_close(trained.logits[index, step], logits[0], **EXACT)
            confidence = model.confidence_logits(row, previous)[0]
            torch.testing.assert_close(trained.confidence_logits[index, step], confidence, **EXACT)


def test_blocks_of_a_sequence_do_not_see_each_other(model):
    taps, tokens = random_taps(CONFIG, 15, dtype=torch.float64), random_tokens(15)
    together = teacher_forced(model, taps, tokens, torch.tensor([3, 8]))
    for index, anchor in enumerate((3, 8)):
        alone = teacher_forced(model, taps, tokens, torch.tensor([anchor]))
        torch.testing.assert_close(together.logits[index], alone.logits[0], **EXACT)


def test_padding_blocks_are_finite_and_change_nothing(model):
    taps, tokens = random_taps(CONFIG, 15, dtype=torch.float64), random_tokens(15)
    anchors, is_real = torch.tensor([3, 0, 0]), torch.tensor([True, False, False])
    padded = teacher_forced(model, taps, tokens, anchors, is_real=is_real)
    alone = teacher_forced(model, taps, tokens, anchors[:1])
    torch.testing.assert_close(padded.logits[:1], alone.logits, **EXACT)
    assert bool(padded.logits.isfinite().all())


def test_labels_follow_the_anchor(model):
    taps, tokens = random_taps(CONFIG, 9, dtype=torch.float64), random_tokens(9)
    found = teacher_forced(model, taps, tokens, torch.tensor([2, 7]))
    assert found.label_positions.tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]]
    assert torch.equal(found.previous_token_ids[0], tokens[2:6])
    assert found.previous_token_ids[1].tolist() == [*tokens[7:9].tolist(), *[int(tokens[8])] * 2]


def test_training_forward_gives_every_weight_a_gradient():
    for head in ("gated", "rnn"):
        model = tiny_drafter(config_with_head(head))
        trained = [tensor for _, tensor in model.weights.tensors()]
        for tensor in trained:
            tensor.requires_grad_()
        found = teacher_forced(model, random_taps(CONFIG, 9), random_tokens(9), torch.tensor([5]))
        (found.logits.sum() + found.confidence_logits.sum()).backward()
        assert all(bool((tensor.grad != 0).any()) for tensor in trained)


@pytest.mark.parametrize("num_tokens", [8, 65])
def test_training_forward_rejects_a_sequence_that_does_not_fit(model, num_tokens):
    taps = random_taps(CONFIG, 9 if num_tokens == 8 else 65, dtype=torch.float64)
    with pytest.raises(
        InvalidArgumentError, match=f"token_ids has {num_tokens}, expected the same"
    ):
        teacher_forced(model, taps, random_tokens(num_tokens), torch.tensor([2]))


def test_biases_of_the_projections_reach_context_and_block():
    config = tiny_config()
    biased = dataclasses.replace(config.backbone, attention_bias=True)
    model = in_float64(tiny_drafter(dataclasses.replace(config, backbone=biased)))
    taps, tokens = random_taps(config, 8, dtype=torch.float64), random_tokens(8)
    speculator = ReferenceSpeculator(model)
    speculator.append(taps[:, :5])
    trained = teacher_forced(model, taps, tokens, torch.tensor([5]))
    torch.testing.assert_close(trained.hidden[0], speculator.hidden(int(tokens[5])), **EXACT)
    plain = dataclasses.replace(
        model.weights.backbone,
        layers=tuple(
            dataclasses.replace(layer, qkv_bias=torch.zeros_like(layer.qkv_bias))
            for layer in model.weights.backbone.layers
        ),
    )
    unbiased = DSparkModel(model.config, dataclasses.replace(model.weights, backbone=plain))
    for with_bias, without in zip(
        model.context(taps, torch.arange(8)), unbiased.context(taps, torch.arange(8)), strict=True
    ):
        assert not torch.allclose(with_bias, without)
