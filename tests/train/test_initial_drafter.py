"""A drafter in training that begins as another one: all of its weights, and only if it is alike."""

import dataclasses

import pytest
import torch
from extkv.dspark.train.session import with_vocabulary
from extkv.dspark.train.settings import OptimizerSettings
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.dspark import save_native, save_speculators
from support.drafters import HEADS, tiny_target
from support.training import random_texts, scrambled, student_settings, tiny_trainer

TOKENS = (0, 2, 3, 5, 8, 13, 21, 22, 27)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def saved(settings, target, path, save=save_speculators):
    trainer = scrambled(tiny_trainer(settings, target=target))
    save(trainer.students[0].model(torch.float32), path)
    return trainer.students[0].parameters


def reduced(**changes):
    settings = student_settings(draft_vocab_size=len(TOKENS), **changes)
    return dataclasses.replace(settings, draft_token_ids=TOKENS)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("save", [save_speculators, save_native])
def test_it_begins_with_every_weight(target, tmp_path, head, save):
    expected = saved(student_settings(head), target, tmp_path / "first", save)
    settings = student_settings(head, initial=str(tmp_path / "first"), seed=9)
    student = tiny_trainer(settings, target=target).students[0]
    assert student.parameters.keys() == expected.keys()
    for name, tensor in student.parameters.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
        assert tensor.requires_grad


def test_it_has_the_draft_tokens_of_the_other(target, tmp_path):
    expected = saved(reduced(), target, tmp_path / "first")
    settings = student_settings(draft_vocab_size=len(TOKENS), initial=str(tmp_path / "first"))
    assert settings.is_reduced
    assert not settings.lacks_vocabulary
    assert with_vocabulary(settings, None, None) is settings
    student = tiny_trainer(settings, target=target).students[0]
    assert student.vocabulary.target_ids.tolist() == list(TOKENS)
    torch.testing.assert_close(student.parameters["markov_w2"], expected["markov_w2"])


def test_it_learns_on_and_leaves_the_files_alone(target, tmp_path):
    saved(student_settings(), target, tmp_path / "first")
    before = {path: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    settings = student_settings(
        initial=str(tmp_path / "first"), optimizer=OptimizerSettings(lr=1e-2)
    )
    trainer = tiny_trainer(settings, target=target)
    store, losses = random_texts(12), []
    for last in (1, 41):
        done = trainer.num_steps
        trainer.train(
            store, progress=lambda: 0.3, until=lambda last=last: trainer.num_steps >= last
        )
        losses.append(trainer.students[0].figures(last - done)["total_variation"])
    assert losses[1] < losses[0]
    assert {path: path.read_bytes() for path in (tmp_path / "first").iterdir()} == before


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        ("vanilla", {"block_size": 5}, "block_size of .* is 4, expected 5 as second has it"),
        ("vanilla", {"mask_token_id": 3}, "mask_token_id of"),
        ("vanilla", {"tap_layer_ids": (1, 3)}, "tap_layer_ids of"),
        ("gated", {}, "markov_head_type of .* is vanilla, expected gated"),
        ("vanilla", {"markov_rank": 5}, r"markov_w[12] of .* has shape \[29, 6\], expected"),
        ("vanilla", {"num_layers": 2}, r"layers\.2\.\w+ of .* has shape .*, expected None"),
        ("none", {}, "has shape|confidence_reads_markov of"),
        ("vanilla", {"draft_vocab_size": 7}, "draft_vocab_size is 7, expected .* found none"),
    ],
)
def test_another_shape_is_refused(target, tmp_path, head, changes, message):
    saved(student_settings(), target, tmp_path / "first")
    settings = student_settings(head, name="second", initial=str(tmp_path / "first"), **changes)
    with pytest.raises(InvalidArgumentError, match=message):
        tiny_trainer(settings, target=target)


def test_what_is_no_directory_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="initial is 'nowhere', expected target, random"):
        student_settings(initial="nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match="empty"):
        tiny_trainer(student_settings(initial=str(tmp_path / "empty")))


def test_bigrams_would_be_learnt_over_what_it_knows(tmp_path):
    with pytest.raises(InvalidArgumentError, match="bigram_steps is 5, expected 0: vanilla begins"):
        student_settings(initial=str(tmp_path), bigram_steps=5)
