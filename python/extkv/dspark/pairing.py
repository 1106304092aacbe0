"""Pair a target with a drafter, as `LLM(draft=…, speculative_config=…)` asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extkv.dspark.options import SpeculativeOptions
from extkv.dspark.speculator import Speculator, check_limits
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import check_pair, load_drafter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extkv.engine.config import EngineConfig
    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark import DSparkModel


def make_speculator(
    target: DecoderModel,
    draft: str | os.PathLike[str] | DSparkModel | None,
    speculative_config: Mapping[str, Any] | None,
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Speculator, SpeculativeOptions]:
    """Load a drafter and check that it fits its target and the engine's limits.

    Raises:
        InvalidArgumentError: If the configuration is wrong, names no drafter, or asks for more than
            the drafter or the token budget allow.
        ModelFileError: If the drafter cannot be read.
        DrafterMismatchError: If it is not one for this target.
    """
    options = SpeculativeOptions.from_mapping(speculative_config or {})
    source = options.model if draft is None else draft
    if source is None:
        raise InvalidArgumentError("speculative_config names no drafter: give draft=…")
    if isinstance(source, (str, os.PathLike)):
        report = None
        if on_progress is not None:
            notify, name = on_progress, Path(source).name

            def report(done: int, total: int) -> None:
                notify(f"loading {name}", done, total)

        source = load_drafter(source, target, ops=target.ops, on_progress=report)
    check_pair(source.config, target.config)
    speculator = Speculator(source, options, config, vocab_size=target.config.vocab_size)
    check_limits(speculator, config)
    return speculator, options
