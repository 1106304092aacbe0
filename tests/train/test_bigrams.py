"""Bigrams: what a Markov head learns before anything else."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from extkv.dspark.train import Text, TextStore
from extkv.dspark.train.bigrams import answer_pairs
from extkv.dspark.train.initial_weights import QUIET
from extkv.dspark.train.report import read_log
from extkv.dspark.train.run import Run
from extkv.dspark.train.settings import RunSettings
from extkv.errors import InvalidArgumentError
from support.training import random_texts, student_settings, tiny_trainer

STEPS = 40


def chain_texts(count=60, *, seed=3):
    """Texts in which a token is followed by one of two, three times as often by the first."""
    random = np.random.default_rng(seed)
    store = TextStore()
    for _ in range(count):
        tokens = [int(random.integers(0, 29))]
        while len(tokens) < 40:
            tokens.append((tokens[-1] * 3 + (1 if random.random() < 0.75 else 7)) % 29)
        store.extend([Text(tokens, 2, 1.0, True)])
    return store


def test_pairs_are_tokens_of_answers_with_the_token_before():
    store = TextStore()
    store.extend([Text([5, 6, 7, 8], 2, 0.0, True), Text([1, 2], 0, 0.0, True)])
    assert answer_pairs(store).tolist() == [[6, 7], [7, 8], [1, 2]]


@pytest.mark.parametrize("draft_vocab_size", [29, 20])
def test_tables_learn_the_law_of_the_next_token(draft_vocab_size):
    settings = student_settings(markov_rank=24, bigram_steps=150, draft_vocab_size=draft_vocab_size)
    if settings.is_reduced:
        settings = dataclasses.replace(settings, draft_token_ids=tuple(range(20)))
    trainer = tiny_trainer(settings)
    losses = trainer.learn_bigrams(chain_texts())["vanilla"]
    assert len(losses) == 150
    # Nothing known is log(29); the law itself is worth less than log(2).
    assert losses[0] > 2.5
    if not settings.is_reduced:
        entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        assert np.mean(losses[-20:]) == pytest.approx(entropy, abs=0.12)
    parameters = trainer.students[0].parameters
    law = torch.softmax(parameters["markov_w1"] @ parameters["markov_w2"].T, dim=-1)
    # After 4 come 13 and 19.
    assert law[4, [13, 19]].tolist() == pytest.approx([0.75, 0.25], abs=0.12)


def test_only_the_tables_change_and_the_backbone_begins_silent():
    plain = tiny_trainer(student_settings())
    trainer = tiny_trainer(student_settings(bigram_steps=3))
    before = {name: value.detach().clone() for name, value in plain.students[0].parameters.items()}
    trainer.learn_bigrams(random_texts(6))
    for name, value in trainer.students[0].parameters.items():
        assert value.grad is None
        if name in {"markov_w1", "markov_w2"}:
            assert not torch.equal(value, before[name])
        elif name == "final_norm":
            torch.testing.assert_close(value, before[name] * QUIET)
        else:
            assert torch.equal(value, before[name]), name


def test_a_run_learns_them_once_and_logs_it(tmp_path):
    texts = random_texts(8)
    texts.save(tmp_path / "texts.npz")
    for is_resumed in (False, True):
        trainer = tiny_trainer(student_settings(bigram_steps=STEPS), student_settings("rnn"))
        settings = RunSettings(max_steps=3 if is_resumed else 2)
        run = Run(trainer, settings, tmp_path, texts=texts)
        if is_resumed:
            run.resume()
        run.go()
        run.checkpoint()
    found = [line for line in read_log(tmp_path / "log.jsonl") if line["event"] == "bigrams"]
    assert [line["num_steps"] for line in found] == [STEPS]
    assert found[0]["student"] == "vanilla"


def test_a_resumed_run_keeps_the_texts_that_it_is_given(tmp_path):
    random_texts(3).save(tmp_path / "texts.npz")
    first = Run(tiny_trainer(student_settings()), RunSettings(max_steps=1), tmp_path)
    first.checkpoint()
    given = random_texts(8)
    for texts, expected in ((given, 8), (None, 3)):
        run = Run(first.trainer, RunSettings(max_steps=1), tmp_path, texts=texts)
        run.resume()
        assert len(run.store) == expected


@pytest.mark.parametrize("head", ["rnn", "gated", "none"])
def test_other_heads_learn_none(head):
    with pytest.raises(InvalidArgumentError, match=f"that of x is {head}"):
        student_settings(head, name="x", bigram_steps=4)


def test_a_negative_number_is_refused():
    with pytest.raises(InvalidArgumentError, match="bigram_steps is -1"):
        student_settings(bigram_steps=-1)
