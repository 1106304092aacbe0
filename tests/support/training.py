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
    fields = ("loss", "optimizer", "initial", "seed")
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


FAST = OptimizerSettings(lr=1e-2)
PLAIN_LOSS = LossSettings()
