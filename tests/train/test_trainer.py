"""Steps of training: side by side, over micro-batches, over processes, and from a checkpoint."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from extkv.dspark.train import (
    BatchSettings,
    LossSettings,
    OptimizerSettings,
    Text,
    TextStore,
    Trainer,
)
from extkv.dspark.train.batches import draw_batch
from extkv.dspark.train.distributed import Ranks
from extkv.dspark.train.optimizers import schedule
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.dspark import load_drafter, save_native, save_speculators
from support.drafters import HEADS, tiny_target
from support.training import float64_target, random_texts, student_settings, tiny_trainer

TESTS = Path(__file__).parents[1]

MUON = OptimizerSettings(name="muon", lr=1e-2)


def run_steps(trainer, store, count):
    last = trainer.num_steps + count
    trainer.train(
        store,
        progress=lambda: trainer.num_steps / 20,
        until=lambda: trainer.num_steps >= last,
    )


def parameters_of(trainer):
    return [
        {name: tensor.detach().clone() for name, tensor in student.parameters.items()}
        for student in trainer.students
    ]


def assert_equal(first, second):
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("optimizer", [OptimizerSettings(lr=1e-2), MUON], ids=["adamw", "muon"])
def test_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path, optimizer):
    store = random_texts(30)
    students = [student_settings(head, optimizer=optimizer) for head in ("vanilla", "rnn")]
    whole = tiny_trainer(*students, target=tiny_target())
    run_steps(whole, store, 11)
    broken = tiny_trainer(*students, target=tiny_target())
    run_steps(broken, store, 6)
    broken.save(tmp_path / "checkpoint.pt")
    resumed = tiny_trainer(*students, target=tiny_target())
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.num_steps == 6
    run_steps(resumed, store, 5)
    assert_equal(parameters_of(whole), parameters_of(resumed))
    assert whole.students[0].figures(11)["loss"] > 0


def test_checkpoints_of_other_drafters_are_refused(tmp_path):
    tiny_trainer(student_settings("vanilla")).save(tmp_path / "checkpoint.pt")
    with pytest.raises(InvalidArgumentError, match=r"drafters \['vanilla'\], expected \['rnn'\]"):
        tiny_trainer(student_settings("rnn")).load(tmp_path / "checkpoint.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    for name in ("broken.pt", "missing.pt"):
        with pytest.raises(ModelFileError, match=f"{name} cannot be read"):
            tiny_trainer().load(tmp_path / name)


def test_drafters_side_by_side_learn_as_they_do_alone():
    store = random_texts(20)
    students = [student_settings(head) for head in HEADS]
    together = tiny_trainer(*students)
    run_steps(together, store, 4)
    for index, settings in enumerate(students):
        alone = tiny_trainer(settings)
        run_steps(alone, store, 4)
        assert_equal([parameters_of(together)[index]], parameters_of(alone))


def test_micro_batches_together_are_one_step():
    store = random_texts(6)
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]]):
        slow = OptimizerSettings(lr=1e-9, clip_norm=1e9)
        trainer = tiny_trainer(student_settings(optimizer=slow))
        (student,) = trainer.students
        seen = {}
        for name, tensor in student.parameters.items():
            tensor.register_post_accumulate_grad_hook(
                lambda leaf, n=name, s=seen: s.__setitem__(n, leaf.grad.clone())
            )
        batches = []
        for part in parts:
            # Every possible anchor, so that both ways see the same blocks.
            batch = draw_batch(
                store, part, BatchSettings(batch_blocks=24 * len(part)), {4}, generator
            )
            batches.append(batch)
        trainer.step(batches, 0.5)
        gradients.append(seen)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-6, atol=1e-9)


def test_the_target_and_shared_tables_do_not_change():
    target = float64_target()
    layer = target.weights.layers[2].qkv_proj.clone()
    embedding, head = target.weights.embedding.clone(), target.weights.lm_head.clone()
    trainer = tiny_trainer(target=target)
    run_steps(trainer, random_texts(10), 3)
    assert torch.equal(embedding, target.weights.embedding)
    assert torch.equal(head, target.weights.lm_head)
    assert not target.weights.embedding.requires_grad
    assert torch.equal(layer, target.weights.layers[2].qkv_proj)


def test_steps_lower_the_loss():
    store = random_texts(12)
    trainer = tiny_trainer(student_settings(optimizer=OptimizerSettings(lr=2e-2)))
    run_steps(trainer, store, 3)
    first = trainer.students[0].figures(3)
    run_steps(trainer, store, 12)
    run_steps(trainer, store, 3)
    trainer.students[0].sums.clear()
    run_steps(trainer, store, 3)
    assert trainer.students[0].figures(3)["loss"] < first["loss"] - 0.05


def test_rate_rises_linearly_and_falls_along_a_cosine():
    found = [schedule(progress, 0.25) for progress in (0.0, 0.125, 0.25, 0.625, 1.0, 2.0)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])
    assert schedule(0.0, 0.0) == 1.0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
def test_both_formats_load_as_what_was_trained(tmp_path, head, samples_from_anchor):
    target = tiny_target()
    trainer = tiny_trainer(
        student_settings(head, samples_from_anchor=samples_from_anchor), target=target
    )
    run_steps(trainer, random_texts(10), 2)
    model = trainer.students[0].model(torch.float32)
    save_speculators(model, tmp_path / "speculators", max_shard_bytes=8000)
    save_native(model, tmp_path / "native", has_shared=False)
    save_native(model, tmp_path / "whole")
    assert len(list((tmp_path / "speculators").glob("*.safetensors"))) > 1
    for name in ("speculators", "native", "whole"):
        loaded = load_drafter(tmp_path / name, target)
        assert loaded.weights.shared == {"embed_tokens.weight", "lm_head.weight"}
        config = dataclasses.replace(loaded.config, draft_vocab_size=None)
        assert config == model.config
        ours, theirs = dict(loaded.weights.tensors()), dict(model.weights.tensors())
        assert ours.keys() == theirs.keys()
        for field, tensor in ours.items():
            assert torch.equal(tensor, theirs[field]), field


def test_a_tensor_larger_than_a_shard_is_refused(tmp_path):
    model = tiny_trainer(target=tiny_target()).students[0].model(torch.float32)
    with pytest.raises(InvalidArgumentError, match="max_shard_bytes is 100, "):
        save_speculators(model, tmp_path, max_shard_bytes=100)


def test_two_processes_learn_as_one(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        import torch
        from torch import distributed
        from extkv.dspark.train import BatchSettings, OptimizerSettings, Trainer
        from extkv.dspark.train.batches import draw_batch
        from extkv.dspark.train.distributed import Ranks
        from support.training import float64_target, random_texts, student_settings
        rank, folder = int(sys.argv[1]), sys.argv[2]
        torch.set_num_threads(1)
        size = int(sys.argv[3])
        if size > 1:
            distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size
            )
        settings = student_settings(optimizer=OptimizerSettings(lr=1e-2))
        trainer = Trainer(float64_target(), [settings], BatchSettings(), ranks=Ranks())
        store = random_texts(8)
        for step in range(3):
            shares = [[0, 1, 2], [3, 4, 5, 6, 7]]
            own = shares[rank : rank + 1] if size > 1 else shares
            # Every possible anchor: all see the same blocks.
            generator = torch.Generator().manual_seed(step)
            batches = [
                draw_batch(store, part, BatchSettings(batch_blocks=24 * len(part)), {4}, generator)
                for part in own
            ]
            trainer.step(batches, 0.5)
        assert trainer.ranks.first(float(rank)) == 0.0
        if rank == 0:
            torch.save(dict(trainer.students[0].parameters), f"{folder}/{size}.pt")
        if size > 1:
            distributed.barrier()
            distributed.destroy_process_group()
        """
    )
    for size in (1, 2):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), str(tmp_path), str(size)],
                env=os.environ | {"PYTHONPATH": str(TESTS)},
            )
            for rank in range(size)
        ]
        assert [process.wait(100) for process in running] == [0] * size
    alone, together = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("has_own_texts", "num_read"), [(True, 12), (False, 6)])
def test_a_process_reads_all_of_its_own_texts_or_half_of_common_ones(has_own_texts, num_read):
    ranks = Ranks()
    ranks.rank, ranks.size = 1, 2
    trainer = Trainer(
        float64_target(),
        [student_settings()],
        BatchSettings(batch_tokens=20),
        ranks=ranks,
        has_own_texts=has_own_texts,
    )
    batches = trainer._order.batches(random_texts(12, least=12).lengths)
    assert len(np.unique(np.concatenate(batches))) == num_read


def test_there_must_be_texts_and_different_names():
    with pytest.raises(InvalidArgumentError, match="no texts"):
        run_steps(tiny_trainer(), random_texts(0), 1)
    with pytest.raises(InvalidArgumentError, match="expected different names"):
        tiny_trainer(student_settings(), student_settings())
    with pytest.raises(InvalidArgumentError, match="expected different names"):
        Trainer(tiny_target(), [], BatchSettings())


def recall_texts(count, *, seed=1):
    """Texts whose every other token is the one that they begin with; the others are random."""
    random = np.random.default_rng(seed)
    store = TextStore()
    for _ in range(count):
        tokens = random.integers(0, 29, 24)
        tokens[::2] = tokens[0]
        store.extend([Text(tokens.tolist(), 4, 1.0, True)])
    return store


@pytest.mark.parametrize("initial", ["random", "target"])
def test_a_drafter_learns_what_only_the_context_says(initial):
    settings = student_settings(
        "none",
        initial=initial,
        loss=LossSettings(ce_weight=1.0, tv_weight=0.0),
        optimizer=OptimizerSettings(lr=1e-2),
    )
    trainer = tiny_trainer(settings, batch_tokens=768, batch_blocks=256)
    store = recall_texts(200)
    for last in (180, 200):
        trainer.train(
            store, progress=lambda: 0.3, until=lambda last=last: trainer.num_steps >= last
        )
        figures = trainer.students[0].figures(1)
    # One of two tokens cannot be known; without the context none can.
    assert min(figures["greedy_acceptance_by_slot"]) > 0.4
