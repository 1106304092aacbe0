"""Reduced draft vocabularies in training: which tokens, and the law over the whole vocabulary."""

import dataclasses

import numpy as np
import pytest
import torch
from extkv.dspark.train import Text, TextStore
from extkv.dspark.train.draft_vocabulary import (
    DraftVocabulary,
    count_answer_tokens,
    most_frequent_tokens,
)
from extkv.dspark.train.settings import LossSettings
from extkv.dspark.train.target_pass import run_target
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import load_drafter, save_native, save_speculators
from support.drafters import HEADS
from support.training import (
    batch_of,
    float64_target,
    random_texts,
    scrambled,
    student_settings,
    tiny_trainer,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Of 29 tokens.
TOKENS = (0, 2, 3, 5, 8, 13, 21, 22, 27)


def reduced(head="vanilla", **changes):
    settings = student_settings(head, draft_vocab_size=len(TOKENS), **changes)
    return dataclasses.replace(settings, draft_token_ids=TOKENS)


def restricted_trainer(head="vanilla", **changes):
    return scrambled(tiny_trainer(reduced(head, **changes)))


def test_tokens_of_prompts_are_not_counted():
    store = TextStore()
    store.extend([Text([7, 7, 1, 2], 2, 0.0, True), Text([3, 1, 1], 1, 1.0, True)])
    counts = count_answer_tokens(store, 9)
    assert counts.tolist() == [0, 3, 1, 0, 0, 0, 0, 0, 0]


def test_the_most_frequent_tokens_ascend_and_ties_go_to_lower_ids():
    counts = np.array([1, 5, 0, 5, 2, 2])
    assert most_frequent_tokens(counts, 3) == (1, 3, 4)
    assert most_frequent_tokens(counts, 3, always=[2]) == (1, 2, 3)


@pytest.mark.parametrize(("size", "always"), [(0, ()), (6, ()), (1, (2, 3))])
def test_sizes_out_of_range_are_refused(size, always):
    with pytest.raises(InvalidArgumentError, match=f"draft_vocab_size is {size}"):
        most_frequent_tokens(np.arange(6), size, always=always)


def test_restricted_law_is_the_whole_one_with_the_rest_as_one_token():
    logits = torch.randn(5, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    vocabulary = DraftVocabulary(torch.tensor(TOKENS), 29)
    whole = torch.softmax(logits, -1)
    found = torch.softmax(vocabulary.restrict(logits), -1)
    torch.testing.assert_close(found[:, :-1], whole[:, list(TOKENS)], **EXACT)
    torch.testing.assert_close(found[:, -1], 1 - whole[:, list(TOKENS)].sum(-1), **EXACT)
    assert vocabulary.draft_ids[8] == 4
    assert vocabulary.draft_ids[9] == len(TOKENS)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_loss_is_that_of_laws_over_the_whole_vocabulary(head, chunk_bytes):
    trainer = restricted_trainer(head)
    student, target = trainer.students[0], trainer.target
    batch = batch_of(trainer)
    output = run_target(target, batch, trainer.tap_layer_ids)
    rows = batch.rows[student.num_drafts]
    weights = student.slot_weights[rows.slots].double()
    blocks = student.forward(batch, output.taps, has_gradient=False)
    terms = student.terms(blocks, batch, output.logits, weights, chunk_bytes=chunk_bytes)

    hidden = blocks.hidden.flatten(0, 2)[rows.places]
    logits = hidden @ target.weights.lm_head[list(TOKENS)].T
    if blocks.codes is not None:
        logits += blocks.codes.flatten(0, 2)[rows.places] @ student.parameters["markov_w2"].T
    q = torch.zeros(len(logits), 29, dtype=torch.float64)
    q[:, list(TOKENS)] = torch.softmax(logits.detach(), -1)
    p = torch.softmax(output.logits[rows.target_rows], -1)
    distance = (p - q).abs().sum(-1)
    torch.testing.assert_close(terms.total_variation, distance, **EXACT)
    torch.testing.assert_close(terms.acceptance, torch.minimum(p, q).sum(-1), **EXACT)
    assert torch.equal(terms.argmax, q.argmax(-1))
    is_inside = torch.isin(rows.label_ids, torch.tensor(TOKENS))
    assert 0 < int(is_inside.sum()) < len(is_inside)
    chosen = q.gather(1, rows.label_ids[:, None])[:, 0]
    torch.testing.assert_close(terms.cross_entropy[is_inside], -chosen[is_inside].log(), **EXACT)
    ratios = (-terms.cross_entropy - terms.target_logprob).clamp(max=0).exp()
    assert not ratios[~is_inside].any()
    entropy = torch.where(is_inside, -chosen.clamp(min=1e-300).log(), 0.0)
    expected = (weights * (0.1 * entropy + 0.9 * distance)).sum()
    torch.testing.assert_close(terms.loss, expected, **EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_those_of_finite_differences(head):
    loss = LossSettings(ce_weight=0.4, tv_weight=0.7)
    trainer = restricted_trainer(head, loss=loss)
    student = trainer.students[0]
    batch = batch_of(trainer, count=2)
    output = run_target(trainer.target, batch, trainer.tap_layer_ids)
    rows = batch.rows[student.num_drafts]
    weights = student.slot_weights[rows.slots].double()

    def value():
        blocks = student.forward(batch, output.taps)
        return student.terms(blocks, batch, output.logits, weights, chunk_bytes=4096).loss

    value().backward()
    generator = torch.Generator().manual_seed(3)
    for name, tensor in student.parameters.items():
        if tensor.grad is None:
            # The confidence head has a loss of its own.
            assert name.startswith("confidence")
            continue
        step = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        step *= 1e-6 / step.norm()
        with torch.no_grad():
            tensor.add_(step)
            above = value().item()
            tensor.sub_(step, alpha=2)
            below = value().item()
            tensor.add_(step)
        slope = float((tensor.grad * step).sum())
        assert (above - below) / 2 == pytest.approx(slope, rel=2e-4, abs=2e-13), name


@pytest.mark.parametrize("save", [save_native, save_speculators])
def test_files_load_as_what_was_trained(tmp_path, save):
    trainer = scrambled(tiny_trainer(reduced(), target=float64_target()))
    model = trainer.students[0].model(torch.float64)
    save(model, tmp_path)
    loaded = load_drafter(tmp_path, trainer.target)
    assert loaded.weights.target_ids.tolist() == list(TOKENS)
    for (name, expected), (_, found) in zip(
        model.weights.tensors(), loaded.weights.tensors(), strict=True
    ):
        assert torch.equal(found.double(), expected.double()), name


def test_tokens_must_be_chosen_before_training():
    settings = student_settings("vanilla", draft_vocab_size=9)
    with pytest.raises(InvalidArgumentError, match="expected as many draft_token_ids, found none"):
        tiny_trainer(settings)


def test_steps_lower_the_distance():
    trainer = tiny_trainer(reduced(), target=float64_target())
    store = random_texts(8)
    figures = []
    for last in (5, 60):
        trainer.train(
            store, progress=lambda: 0.3, until=lambda last=last: trainer.num_steps >= last
        )
        figures.append(trainer.students[0].figures(1))
    assert figures[1]["cross_entropy"] > 0
    per_step = [figures[0]["total_variation"] / 5, figures[1]["total_variation"] / 55]
    assert per_step[1] < per_step[0]
