"""A tiny target in float64, drafters in training for it, and texts."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from extkv.dspark.train import (
    BatchSettings,
    LossSettings,
    OptimizerSettings,
    StudentSettings,
    Text,
    TextStore,
    Trainer,
)
from extkv.dspark.train.batches import draw_batch
from extkv.models import DecoderModel
from support.drafters import config_with_head, tiny_target


def float64_target(**changes) -> DecoderModel:
    target = tiny_target(**changes)

    def doubled(owner):
        wide = {
            name: value.double()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(owner, **wide)

    layers = tuple(doubled(layer) for layer in target.weights.layers)
    weights = dataclasses.replace(doubled(target.weights), layers=layers)
    return DecoderModel(target.config, weights)


def student_settings(head="vanilla", *, name=None, **changes) -> StudentSettings:
    fields = ("loss", "optimizer", "initial", "seed", "bigram_steps")
    own = {field: changes.pop(field) for field in fields if field in changes}
    config = config_with_head(head, **changes)
    return StudentSettings(name or head, config, **own)


def random_texts(count: int, *, seed: int = 5, least: int = 8, most: int = 20) -> TextStore:
    random = np.random.default_rng(seed)
    store = TextStore()
    for _ in range(count):
        length = int(random.integers(least, most + 1))
        tokens = random.integers(0, 29, length).tolist()
        temperature = float(random.integers(0, 2))
        store.extend([Text(tokens, int(random.integers(1, 4)), temperature, True)])
    return store


def tiny_trainer(*students: StudentSettings, target=None, **batch) -> Trainer:
    settings = BatchSettings(**({"batch_tokens": 96, "batch_blocks": 32} | batch))
    chosen = students or (student_settings(),)
    return Trainer(float64_target() if target is None else target, chosen, settings)


def scrambled(trainer):
    """Redraw all weights of the drafters, so that nothing is 0 or 1."""
    generator = torch.Generator().manual_seed(11)
    for student in trainer.students:
        for name, tensor in student.parameters.items():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            base = 1.0 if name.endswith("norm") else 0.0
            tensor.data.copy_(base + 0.3 * values)
    return trainer


def batch_of(trainer, count=3):
    settings = BatchSettings(batch_blocks=8 * count)
    generator = torch.Generator().manual_seed(4)
    return draw_batch(random_texts(count), range(count), settings, trainer._num_drafts, generator)


FAST = OptimizerSettings(lr=1e-2)
PLAIN_LOSS = LossSettings()
