"""Training on a CUDA device: the numbers of the host, and the same steps again after a break."""

import pytest
import torch
from extkv.dspark.train import BatchSettings, Trainer
from extkv.dspark.train.acceptance import measure
from extkv.dspark.train.shapes import student_of
from extkv.models import kernel_ops
from extkv.models.loader import load_model
from support.chat_model import write_chat_model
from support.training import random_texts

pytestmark = pytest.mark.gpu
SHAPE = {"num_layers": 2, "num_drafts": 3, "num_taps": 2, "markov_rank": 8}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def trainer_on(path, device, dtype, **changes):
    ops = kernel_ops() if device == "cuda" else None
    loaded = load_model(path, dtype=dtype, device=device, ops=ops)
    names = ("none", "vanilla", "gated", "rnn")
    students = [student_of(head, loaded.config, head=head, **(SHAPE | changes)) for head in names]
    return Trainer(loaded.model, students, BatchSettings(batch_tokens=512, batch_blocks=64))


def run(trainer, store, count):
    last = trainer.num_steps + count
    trainer.train(store, progress=lambda: 0.5, until=lambda: trainer.num_steps >= last)


def test_losses_of_device_and_host_are_close(model_path):
    store = random_texts(20)
    host = trainer_on(model_path, "cpu", torch.float32)
    device = trainer_on(model_path, "cuda", torch.bfloat16)
    for trainer in (host, device):
        run(trainer, store, 3)
    for ours, theirs in zip(device.students, host.students, strict=True):
        found, expected = ours.figures(3), theirs.figures(3)
        for name in ("loss", "cross_entropy", "total_variation", "confidence"):
            assert found[name] == pytest.approx(expected[name], rel=0.05), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_is_close_to_the_unbroken_one(model_path, tmp_path, optimizer):
    store = random_texts(20)
    whole = trainer_on(model_path, "cuda", torch.bfloat16, optimizer=optimizer)
    run(whole, store, 6)
    broken = trainer_on(model_path, "cuda", torch.bfloat16, optimizer=optimizer)
    run(broken, store, 3)
    broken.save(tmp_path / "checkpoint.pt")
    resumed = trainer_on(model_path, "cuda", torch.bfloat16, optimizer=optimizer)
    resumed.load(tmp_path / "checkpoint.pt")
    run(resumed, store, 3)
    for ours, theirs in zip(resumed.students, whole.students, strict=True):
        for name, tensor in ours.parameters.items():
            torch.testing.assert_close(
                tensor, theirs.parameters[name], atol=5e-3, rtol=0, msg=lambda m, n=name: n + m
            )


def test_acceptance_is_measured_on_the_device(model_path):
    trainer = trainer_on(model_path, "cuda", torch.bfloat16)
    store = random_texts(6)
    for lengths in measure(trainer.students, trainer.target, store, trainer.tap_layer_ids):
        assert lengths.num_rounds > 0
        assert 1 <= lengths.accepted_length <= 1 + SHAPE["num_drafts"]
