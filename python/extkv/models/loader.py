"""Loading a model from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from extkv.errors import DriverUnavailableError, InvalidArgumentError
from extkv.models.decoder import DecoderModel, num_positions
from extkv.models.model_source import open_model
from extkv.models.weight_loading import load_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from extkv.models.chat_template import ChatTemplate
    from extkv.models.config import ModelConfig
    from extkv.models.generation import GenerationDefaults
    from extkv.models.ops import DecoderOps
    from extkv.models.tokenizer import Tokenizer

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedModel:
    """Hold a model with what is needed to talk to it.

    Attributes:
        path: The file or directory.
        model: Weights and forward pass.
        tokenizer: Text to token ids and back.
        chat_template: The file's template, or None.
        generation: Special tokens and the sampling parameters the model is published with.
    """

    path: Path
    model: DecoderModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.model.config


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    ops: DecoderOps | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Read a model; each weight goes straight to its place in its final dtype.

    Args:
        path: A GGUF file, or a directory with `config.json`, `tokenizer.json` and
            `model.safetensors` or its shards.
        dtype: Dtype of weights and activations: float32, bfloat16 or float16.
        device: Where the weights go.
        max_model_len: Bounds the positions that may occur; the model's context length by default.
        ops: Kernels that the forward pass uses instead of plain PyTorch.
        on_progress: Called with (tensors read, tensors in all) after each tensor.

    Raises:
        ModelFileError: If a file is missing, truncated or corrupt, the architecture, RoPE scaling
            or tokenizer is not known, or a tensor is missing, unexpected, or of another shape.
        InvalidArgumentError: If `dtype`, `device` or `max_model_len` is not possible.
        DriverUnavailableError: If the device is a CUDA device and there is none.
        OutOfMemoryError: If the weights do not fit on the device.
    """
    check_dtype(dtype)
    target = check_device(device)
    source = open_model(Path(path))
    # Before the weights, which may take minutes.
    num_positions(source.config, max_model_len)
    weights = load_weights(
        source.weights, source.config, dtype=dtype, device=target, on_progress=on_progress
    )
    model = DecoderModel(source.config, weights, ops=ops, max_model_len=max_model_len)
    return LoadedModel(
        source.path, model, source.tokenizer, source.chat_template, source.generation
    )


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that a name means; ``"auto"`` is bfloat16 on CUDA and float32 on the host.

    Raises:
        InvalidArgumentError: If a model cannot have it.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    named = {str(known).removeprefix("torch."): known for known in SUPPORTED_DTYPES}
    if isinstance(dtype, str):
        if dtype not in named:
            msg = f"dtype is {dtype!r}, known: auto, {', '.join(named)}"
            raise InvalidArgumentError(msg)
        return named[dtype]
    check_dtype(dtype)
    return dtype


def check_dtype(dtype: torch.dtype) -> None:
    """Check that a model can have a dtype.

    Raises:
        InvalidArgumentError: If not.
    """
    if dtype not in SUPPORTED_DTYPES:
        msg = f"dtype is {dtype}, supported: {', '.join(map(str, SUPPORTED_DTYPES))}"
        raise InvalidArgumentError(msg)


def check_device(device: str | torch.device) -> torch.device:
    """Return the device that a name means.

    Raises:
        InvalidArgumentError: If torch knows no such device.
        DriverUnavailableError: If it is a CUDA device and there is none.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        msg = f"device is {device!r}, torch knows no such device"
        raise InvalidArgumentError(msg) from error
    if target.type == "cuda" and not torch.cuda.is_available():
        msg = f"device is {target}, torch finds no CUDA device"
        raise DriverUnavailableError(msg)
    return target
