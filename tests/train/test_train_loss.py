"""The loss against a slow one, and its gradients against finite differences."""

import dataclasses

import pytest
import torch
from extkv.dspark.train import LossSettings
from extkv.dspark.train.batches import draw_batch
from extkv.dspark.train.forward import forward_blocks
from extkv.dspark.train.losses import Comparison, token_loss
from extkv.dspark.train.settings import BatchSettings
from extkv.dspark.train.target_pass import run_target
from extkv.models.dspark import teacher_forced
from support.drafters import HEADS, random_tokens
from support.training import (
    batch_of,
    float64_target,
    random_texts,
    scrambled,
    student_settings,
    tiny_trainer,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LAYOUTS = pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])


def slow_loss(student, batch, taps, target, loss):
    """The loss of every row by itself, as written down."""
    model = student.model(torch.float64)
    config = student.settings.config
    own = [student._taps.index(index) for index in student._taps]
    total = weighted = 0.0
    for text in range(batch.token_ids.shape[0]):
        tokens = batch.token_ids[text]
        span = slice(text * len(tokens), (text + 1) * len(tokens))
        found = teacher_forced(
            model, taps[student._taps][own][:, span], tokens, batch.anchors[text],
            is_real=batch.is_real[text],
        )  # fmt: skip
        hidden, _ = target.forward(tokens, torch.arange(len(tokens)), _Causal(), taps=(0,))
        target_logits = target.compute_logits(hidden)
        for row in range(len(batch.anchors[text])):
            rows = batch.rows[config.num_drafts].places.tolist()
            for draft in range(config.num_drafts):
                place = (text * batch.anchors.shape[1] + row) * config.num_drafts + draft
                if place not in rows:
                    continue
                label = int(found.label_positions[row, draft])
                q = torch.softmax(found.logits[row, draft], dim=-1)
                p = torch.softmax(target_logits[label - 1], dim=-1)
                distance = sum(abs(float(a - b)) for a, b in zip(q, p, strict=True))
                value = loss.ce_weight * -float(q[tokens[label]].log()) + loss.tv_weight * distance
                accepted = sum(min(float(a), float(b)) for a, b in zip(q, p, strict=True))
                c = torch.sigmoid(found.confidence_logits[row, draft])
                entropy = accepted * c.log() + (1 - accepted) * (1 - c).log()
                value -= loss.confidence_weight * float(entropy)
                weight = float(torch.exp(torch.tensor(-draft / loss.slot_decay)))
                weighted += weight * value
                total += weight
    return weighted / (total + 1e-6)


class _Causal:
    def attend(self, layer_id, query, key, value):
        del layer_id
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)


@LAYOUTS
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_loss_equals_the_slow_one(head, samples_from_anchor):
    loss = LossSettings(ce_weight=0.3, tv_weight=0.7, confidence_weight=0.5, slot_decay=2.0)
    trainer = scrambled(
        tiny_trainer(student_settings(head, samples_from_anchor=samples_from_anchor, loss=loss))
    )
    (student,) = trainer.students
    batch = batch_of(trainer)
    output = run_target(trainer.target, batch, trainer.tap_layer_ids)
    total = student.total_weight(batch)
    student.backward(batch, output.taps, output.logits, total, chunk_bytes=1000)
    figures = student.figures(1)
    expected = slow_loss(student, batch, output.taps, trainer.target, loss)
    # Weights of the slots are float32.
    found = figures["loss"] + loss.confidence_weight * figures["confidence"]
    assert found == pytest.approx(expected, rel=1e-6)


@LAYOUTS
@pytest.mark.parametrize("head", HEADS)
def test_batched_forward_is_the_one_of_single_texts(head, samples_from_anchor):
    trainer = scrambled(
        tiny_trainer(student_settings(head, samples_from_anchor=samples_from_anchor))
    )
    (student,) = trainer.students
    batch = batch_of(trainer)
    output = run_target(trainer.target, batch, trainer.tap_layer_ids)
    found = student.forward(batch, output.taps)
    model = student.model(torch.float64)
    num_tokens = batch.token_ids.shape[1]
    for text in range(3):
        taps = output.taps[student._taps][:, text * num_tokens : (text + 1) * num_tokens]
        alone = teacher_forced(
            model, taps, batch.token_ids[text], batch.anchors[text], is_real=batch.is_real[text]
        )
        logits = found.hidden[text] @ model.lm_head.T
        if head != "none":
            logits = logits + found.codes[text] @ model.markov_weight.T
        torch.testing.assert_close(logits, alone.logits, **EXACT)
        torch.testing.assert_close(found.confidence_logits[text], alone.confidence_logits, **EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_those_of_finite_differences(head):
    # The label of the confidence is held fixed, so it must not move with the weights here.
    loss = LossSettings(confidence_weight=0.0)
    trainer = scrambled(tiny_trainer(student_settings(head, loss=loss, num_layers=2)))
    (student,) = trainer.students
    batch = batch_of(trainer, 2)
    output = run_target(trainer.target, batch, trainer.tap_layer_ids)
    total = student.total_weight(batch)

    def value() -> float:
        student.sums = {}
        blocks = student.forward(batch, output.taps, has_gradient=False)
        weights = student.slot_weights[batch.rows[student.num_drafts].slots] / (total + 1e-6)
        return float(student.terms(blocks, batch, output.logits, weights, chunk_bytes=512).loss)

    student.backward(batch, output.taps, output.logits, total, chunk_bytes=512)
    generator = torch.Generator().manual_seed(9)
    for name, tensor in student.parameters.items():
        if name.startswith("confidence"):
            continue
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        slope = float((tensor.grad * direction).sum())
        before = tensor.data.clone()
        step = 1e-6
        tensor.data.copy_(before + step * direction)
        above = value()
        tensor.data.copy_(before - step * direction)
        below = value()
        tensor.data.copy_(before)
        assert slope == pytest.approx((above - below) / (2 * step), rel=2e-4, abs=1e-7), name


def test_confidence_gradients_reach_backbone_and_markov_table_but_not_the_label():
    trainer = scrambled(tiny_trainer(student_settings("vanilla")))
    (student,) = trainer.students
    batch = batch_of(trainer, 2)
    output = run_target(trainer.target, batch, trainer.tap_layer_ids)
    settings = dataclasses.replace(
        student.settings, loss=LossSettings(ce_weight=0.0, tv_weight=0.0)
    )
    student.settings = settings
    student.backward(
        batch, output.taps, output.logits, student.total_weight(batch), chunk_bytes=512
    )
    for name in ("fc", "markov_w1", "confidence_proj", "layers.0.qkv_proj"):
        assert bool((student.parameters[name].grad != 0).any()), name
    # The label holds the head's bias, which has no other way to get a gradient.
    assert not bool((student.parameters["markov_w2"].grad != 0).any())


def test_the_size_of_chunks_does_not_matter():
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, codes, markov = draw(11, 6), draw(11, 3), draw(29, 3)
    head, target_logits = draw(29, 6), draw(5, 29)
    comparison = Comparison(
        target_logits, torch.arange(11) % 5, random_tokens(11), torch.rand(11, generator=generator)
    )
    found = []
    for chunk_bytes in (1, 29 * 8 * 4, 1 << 20):
        leaves = [part.clone().requires_grad_() for part in (hidden, codes, markov)]
        terms = token_loss(*leaves, head, comparison, LossSettings(), chunk_bytes=chunk_bytes)
        terms.loss.backward()
        found.append([terms.loss.detach(), *terms[1:], *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for first, second in zip(found[0], other, strict=True):
            torch.testing.assert_close(first, second, **EXACT)


def test_nothing_without_rows():
    empty = torch.zeros(0, dtype=torch.int64)
    comparison = Comparison(torch.zeros(1, 29), empty, empty, torch.zeros(0))
    hidden = torch.zeros(0, 6, requires_grad=True)
    terms = token_loss(
        hidden, None, None, torch.zeros(29, 6), comparison, LossSettings(), chunk_bytes=100
    )
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    assert terms.acceptance.shape == (0,)


def test_forward_takes_texts_up_to_the_last_position():
    trainer = tiny_trainer(student_settings(), target=float64_target())
    (student,) = trainer.students
    store = random_texts(1, least=64, most=64)
    batch = draw_batch(
        store, [0], BatchSettings(batch_blocks=8), {4}, torch.Generator().manual_seed(0)
    )
    taps = run_target(trainer.target, batch, trainer.tap_layer_ids).taps
    own = taps[student._taps].transpose(0, 1).flatten(1)
    weights = student.model(torch.float64).weights
    output = forward_blocks(student.settings.config, weights, student._rotations, batch, own)
    assert bool(output.hidden.isfinite().all())
