"""Training a DSpark drafter on its target's own answers.

`session.train_drafters` puts a run together, `trainer.Trainer` takes the steps, `student.Student`
is a drafter in training, `acceptance` measures. `docs/training-drafters.md` explains it.
"""

from extkv.dspark.train.session import SessionSettings, train_drafters
from extkv.dspark.train.settings import (
    BatchSettings,
    LossSettings,
    OptimizerSettings,
    RunSettings,
    StudentSettings,
)
from extkv.dspark.train.student import Student
from extkv.dspark.train.texts import Text, TextStore
from extkv.dspark.train.trainer import Trainer

__all__ = [
    "BatchSettings",
    "LossSettings",
    "OptimizerSettings",
    "RunSettings",
    "SessionSettings",
    "Student",
    "StudentSettings",
    "Text",
    "TextStore",
    "Trainer",
    "train_drafters",
]
