"""What a front end reads of a model, made from the packaged SmolLM2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.vllm_front_end import write_model_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what a front end reads of a model: configuration and tokenizer."""
    directory = tmp_path_factory.mktemp("smollm2")
    write_model_directory(directory)
    return directory
