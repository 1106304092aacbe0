"""Targets and drafters to measure: read from files, or of a shape with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.device import resolve_device
from extkv.errors import InvalidArgumentError
from extkv.models import (
    QWEN3_8B,
    GenerationDefaults,
    LoadedModel,
    Tokenizer,
    find_default_model,
    kernel_ops,
    load_model,
    random_model,
)
from extkv.models.dspark import drafter_config, load_drafter, random_drafter
from extkv.models.loader import check_device, resolve_dtype
from extkv.models.model_source import read_model_config

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch

    from extkv.models import ModelConfig
    from extkv.models.dspark import DSparkModel

    Progress = Callable[[str, int, int], None]

SHAPES = {"qwen3-8b": QWEN3_8B}


@dataclass(frozen=True)
class PairSettings:
    """Say which target and drafter to measure.

    Attributes:
        model: A GGUF file or Hugging Face directory, or the name of a shape in `SHAPES`; None for
            the default model.
        draft: Directory of a DSpark drafter.
        has_random_drafter: Whether to draw a drafter of the published shape instead: its drafts say
            nothing, its cost is real.
        has_random_weights: Whether to draw the target's weights too; the directory's `config.json`
            is enough then. Shapes of `SHAPES` always do.
        device: Device; None for CUDA where there is one.
        dtype: Dtype of weights and KV cache.
        max_model_len: Longest sequence.
    """

    model: str | os.PathLike[str] | None = None
    draft: str | os.PathLike[str] | None = None
    has_random_drafter: bool = False
    has_random_weights: bool = False
    device: str | None = None
    dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Check what contradicts."""
        if self.draft is not None and self.has_random_drafter:
            raise InvalidArgumentError(f"give the drafter {self.draft} or a random one, not both")
        if self.draft is not None and self.has_random_model:
            raise InvalidArgumentError(
                f"the drafter {self.draft} was trained for a model; beside random weights take a "
                "random one"
            )

    @property
    def has_random_model(self) -> bool:
        """Whether the target's weights are drawn."""
        return self.has_random_weights or self.model in SHAPES


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and a drafter or none.

    Attributes:
        target: The target.
        draft: The drafter.
        model_name: What the target is, for people.
        draft_name: What the drafter is, for people.
    """

    target: LoadedModel
    draft: DSparkModel | None
    model_name: str
    draft_name: str


def open_pair(settings: PairSettings, on_progress: Progress | None = None) -> Pair:
    """Load or draw a target and its drafter.

    Raises:
        ModelFileError: If a file cannot be read.
        DrafterMismatchError: If the drafter is not one for the target.
        InvalidArgumentError: If a setting is not possible.
        DriverUnavailableError: If the device is a CUDA device and there is none.
    """
    kind, index = resolve_device(settings.device)
    device = check_device(kind if kind == "cpu" else f"{kind}:{index}")
    dtype = resolve_dtype(settings.dtype, device)
    if settings.has_random_model:
        target, name = _random_target(settings, device, dtype), ", random weights"
    else:
        path = find_default_model() if settings.model is None else Path(settings.model)
        target, name = _load(path, settings, device, dtype, on_progress), ""
    draft, draft_name = None, "none"
    if settings.has_random_drafter:
        config = drafter_config(target.config)
        draft = random_drafter(config, target.model, max_model_len=settings.max_model_len)
        draft_name = f"{config.backbone.num_layers} layers, random weights"
    elif settings.draft is not None:
        path = Path(settings.draft)
        report = _named(on_progress, f"loading {path.name}")
        draft = load_drafter(path, target.model, ops=target.model.ops, on_progress=report)
        draft_name = path.name
    return Pair(target, draft, target.path.name + name, draft_name)


def _load(
    path: Path,
    settings: PairSettings,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress | None,
) -> LoadedModel:
    return load_model(
        path,
        dtype=dtype,
        device=device,
        max_model_len=settings.max_model_len,
        ops=kernel_ops() if device.type == "cuda" else None,
        on_progress=_named(on_progress, f"loading {path.name}"),
    )


def _random_target(settings: PairSettings, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if settings.model is None:
        raise InvalidArgumentError(
            f"random weights need a shape: a directory with a config.json, or {', '.join(SHAPES)}"
        )
    config = SHAPES.get(str(settings.model))
    if config is None:
        config = read_model_config(Path(settings.model))
    model = random_model(
        config,
        dtype=dtype,
        device=device,
        max_model_len=settings.max_model_len,
        ops=kernel_ops() if device.type == "cuda" else None,
    )
    tokenizer = _wordless_tokenizer(config)
    return LoadedModel(Path(settings.model), model, tokenizer, None, GenerationDefaults())


def _wordless_tokenizer(config: ModelConfig) -> Tokenizer:
    """Return a tokenizer whose tokens have no text."""
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import BPE

    no_text = [b""] * config.vocab_size
    return Tokenizer(Encoder(BPE({}, [])), no_text, stop_token_ids=frozenset())


def _named(on_progress: Progress | None, phase: str) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda done, total: on_progress(phase, done, total)
