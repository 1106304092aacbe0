"""Pair a target with a drafter, as `LLM(draft=…, speculative_config=…)` asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extkv.dspark.confidence import AcceptanceRates, FittedConfidences, HeadConfidences
from extkv.dspark.controlled_schedule import ControlledSchedule
from extkv.dspark.drafting import Drafting
from extkv.dspark.options import SpeculativeOptions
from extkv.dspark.planning import SpeculationController
from extkv.dspark.schedule import FixedSchedule
from extkv.dspark.speculator import Speculator
from extkv.dspark.step_profile import measure_step_cost
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import check_pair, load_drafter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extkv.dspark.confidence import Confidences
    from extkv.dspark.schedule import VerifySchedule
    from extkv.engine.config import EngineConfig
    from extkv.engine.runner import ModelRunner
    from extkv.engine.sampler import Sampler
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
    _check_limits(speculator, config)
    return speculator, options


def make_drafting(
    speculator: Speculator, sampler: Sampler, options: SpeculativeOptions, runner: ModelRunner
) -> Drafting:
    """Join what drafts and verifies with the schedule that the options ask for.

    Args:
        speculator: Attached to the runner's cache.
        sampler: The engine's sampler.
        options: How to verify.
        runner: Started, before its first step: it may be measured.

    Raises:
        CostTableError: If the file of the cost table is none.
        CalibrationError: If the file of the temperatures is none.
        InvalidArgumentError: If confidences are asked of a head that the drafter lacks.
    """
    schedule: VerifySchedule
    if options.verification == "fixed":
        schedule = FixedSchedule(speculator.num_drafts, options.fixed_verify_len)
    else:
        schedule = _controlled(speculator, options, runner)
    return Drafting(speculator, sampler, options, schedule, runner.graph_token_sizes)


def _controlled(
    speculator: Speculator, options: SpeculativeOptions, runner: ModelRunner
) -> ControlledSchedule:
    num_seqs, num_drafts = runner.config.max_num_seqs, speculator.num_drafts
    source = options.confidence_source(has_head=speculator.model.config.has_confidence_head)
    confidences: Confidences
    if source == "head":
        confidences = HeadConfidences(options.load_temperatures(num_drafts))
    elif source == "acceptance":
        confidences = AcceptanceRates(num_seqs, num_drafts)
    else:
        confidences = FittedConfidences(num_drafts, source)
    cost = options.load_step_cost()
    if cost is None:
        cost = measure_step_cost(runner, speculator)
    controller = SpeculationController(
        num_seqs,
        num_drafts,
        cost,
        planner=options.planner,
        min_predicted_gain=options.min_predicted_gain,
        probe_interval=options.probe_interval,
        max_probe_interval=options.max_probe_interval,
        max_probe_share=options.max_probe_share,
        explore_interval=options.explore_interval,
    )
    is_greedy = options.planner == "greedy"
    return ControlledSchedule(controller, confidences, has_free_budget=is_greedy)


def _check_limits(speculator: Speculator, config: EngineConfig) -> None:
    """Check that a step of all sequences with all drafts fits the token budget.

    Raises:
        InvalidArgumentError: If it does not.
    """
    needed = config.max_num_seqs * (1 + speculator.num_drafts)
    if needed > config.max_num_batched_tokens:
        raise InvalidArgumentError(
            f"max_num_seqs = {config.max_num_seqs} sequences of 1 + {speculator.num_drafts} rows "
            f"are {needed} tokens, more than max_num_batched_tokens = "
            f"{config.max_num_batched_tokens}: lower max_num_seqs or raise it"
        )
