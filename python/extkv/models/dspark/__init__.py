"""DSpark drafters of Qwen3 shape: configuration, weights, forward pass, and their files.

`load_drafter` reads one beside its target; `DSparkModel` says how to run it. `model.py` has what an
engine needs, `reference_speculator.py` the same round in plain PyTorch, `teacher_forcing.py` the
forward pass of training.
"""

from extkv.models.dspark.blocks import (
    block_positions,
    block_token_ids,
    draft_rows,
    predicted_positions,
)
from extkv.models.dspark.config import DSparkConfig, check_pair
from extkv.models.dspark.config_file import read_drafter_config
from extkv.models.dspark.loader import load_drafter
from extkv.models.dspark.model import DSparkModel
from extkv.models.dspark.random_drafter import drafter_config, random_drafter
from extkv.models.dspark.recognition import DrafterFormat, is_dspark, require_draft_path
from extkv.models.dspark.reference_speculator import Draft, ReferenceSpeculator
from extkv.models.dspark.saving import save_native, save_speculators
from extkv.models.dspark.teacher_forcing import Reading, TeacherForced, teacher_forced
from extkv.models.dspark.weights import DSparkWeights

__all__ = [
    "DSparkConfig",
    "DSparkModel",
    "DSparkWeights",
    "Draft",
    "DrafterFormat",
    "Reading",
    "ReferenceSpeculator",
    "TeacherForced",
    "block_positions",
    "block_token_ids",
    "check_pair",
    "draft_rows",
    "drafter_config",
    "is_dspark",
    "load_drafter",
    "predicted_positions",
    "random_drafter",
    "read_drafter_config",
    "require_draft_path",
    "save_native",
    "save_speculators",
    "teacher_forced",
]
