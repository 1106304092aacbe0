"""Measure a drafter and the readings next to it on the same blocks, and say which is better.

The rule: a reading is clearly better if it accepts at least `LEAST_GAIN` drafts a block more than
the file's own, and that difference, taken block by block, is at least `LEAST_STANDARD_ERRORS` of
its standard errors. Blocks do not overlap. With a dozen readings and four standard errors, a right
file is accused once in about two thousand checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from extkv.dspark.check.acceptance import Acceptance, block_acceptance, target_laws
from extkv.dspark.check.neighbours import FileKeys, Neighbour, neighbours_of
from extkv.dspark.check.text import read_text
from extkv.errors import InvalidArgumentError
from extkv.models.dspark.config import check_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark import DSparkModel

LEAST_GAIN = 0.05
LEAST_STANDARD_ERRORS = 4.0
LEAST_BLOCKS = 24
# Less than half a draft a block pays nowhere, however the file is read.
LEAST_ACCEPTED = 0.5
BLOCKS_AT_ONCE = 16


@dataclass(frozen=True)
class Comparison:
    """Hold one reading and how it did.

    Attributes:
        neighbour: The reading.
        acceptance: What it accepts.
        gain: Drafts accepted per block more than by the file's own reading.
        standard_error: Of `gain`.
    """

    neighbour: Neighbour
    acceptance: Acceptance
    gain: float
    standard_error: float

    @property
    def is_better(self) -> bool:
        """Whether it is clearly better, by the rule of this module."""
        limit = max(LEAST_GAIN, LEAST_STANDARD_ERRORS * self.standard_error)
        return self.gain >= limit


@dataclass(frozen=True)
class CheckReport:
    """Hold what a check found.

    Attributes:
        acceptance: Of the drafter as its file says.
        comparisons: The other readings, the best one first.
        temperature: Of both models.
    """

    acceptance: Acceptance
    comparisons: list[Comparison]
    temperature: float

    @property
    def better(self) -> list[Comparison]:
        """Readings that are clearly better, the best one first."""
        return [comparison for comparison in self.comparisons if comparison.is_better]

    @property
    def is_useless(self) -> bool:
        """Whether neither the file's reading nor any other accepts anything worth having."""
        best = max([self.acceptance, *(c.acceptance for c in self.comparisons)], key=_accepted)
        return best.accepted_tokens < LEAST_ACCEPTED

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            "num_blocks": self.acceptance.num_blocks,
            "temperature": self.temperature,
            **_numbers(self.acceptance),
            "is_useless": self.is_useless,
            "neighbours": [
                {
                    "name": found.neighbour.name,
                    **_numbers(found.acceptance),
                    "gain": found.gain,
                    "standard_error": found.standard_error,
                    "is_better": found.is_better,
                    "fault": found.neighbour.fault,
                    "change": found.neighbour.change,
                }
                for found in self.comparisons
            ],
        }


def check_draft(
    target: DecoderModel,
    drafter: DSparkModel,
    texts: Sequence[tuple[Sequence[int], int]],
    *,
    keys: FileKeys | None = None,
    mask_token_ids: Collection[int] = (),
    temperature: float = 1.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Measure acceptance of a drafter, and of the readings of its file next to the one it names.

    Args:
        target: The target.
        drafter: The drafter, as its file says.
        texts: Token ids of prompts with what the target wrote after each, and the number of tokens
            of the prompt. Draw them at `temperature`.
        keys: How the file spells what advice is about.
        mask_token_ids: More ids that the mask may be.
        temperature: Divisor of both models' logits.
        on_progress: Called with (blocks measured, blocks in all).

    Raises:
        InvalidArgumentError: If the texts hold fewer than `LEAST_BLOCKS` blocks, a text is too long
            or of another vocabulary, or the temperature is not positive.
        DrafterMismatchError: If the drafter is not one for this target.
    """
    check_pair(drafter.config, target.config)
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidArgumentError(f"temperature is {temperature}, expected a positive number")
    neighbours = neighbours_of(drafter, target, keys=keys, mask_token_ids=mask_token_ids)
    vocab_size = target.config.vocab_size
    readings = [Neighbour("file", "", ""), *neighbours]
    drafters = [reading.apply(drafter, vocab_size) for reading in readings]
    layer_ids = {
        layer_id for reading in readings for layer_id in reading.tap_layer_ids(drafter.config)
    }
    most = max(other.config.num_drafts for other in drafters)
    limit = min(target.num_positions, drafter.num_positions)
    blocks = _divide(texts, most, limit)
    num_blocks, num_done = sum(len(anchors) for _, anchors in blocks), 0
    if num_blocks < LEAST_BLOCKS:
        raise InvalidArgumentError(
            f"the texts have {num_blocks} blocks of {most} drafts, expected at least "
            f"{LEAST_BLOCKS}: give more prompts, or longer answers"
        )
    parts: list[list[Acceptance]] = [[] for _ in readings]
    for (token_ids, num_prompt), anchors in blocks:
        text = read_text(target, token_ids[:limit], num_prompt, layer_ids)
        for chunk in torch.split(anchors.to(target.device), BLOCKS_AT_ONCE):
            laws = target_laws(target, text, chunk, most, temperature)
            for place, (reading, other) in enumerate(zip(readings, drafters, strict=True)):
                found = block_acceptance(
                    other,
                    reading.tap_layer_ids(drafter.config),
                    text,
                    chunk,
                    laws,
                    temperature=temperature,
                    reading=reading.reading,
                )
                parts[place].append(found)
            num_done += len(chunk)
            if on_progress is not None:
                on_progress(num_done, num_blocks)
    own, *others = [Acceptance.join(part) for part in parts]
    pairs = zip(neighbours, others, strict=True)
    comparisons = [_compare(neighbour, other, own) for neighbour, other in pairs]
    comparisons.sort(key=lambda comparison: -comparison.gain)
    return CheckReport(own, comparisons, temperature)


def _divide(
    texts: Sequence[tuple[Sequence[int], int]], num_drafts: int, limit: int
) -> list[tuple[tuple[Sequence[int], int], torch.Tensor]]:
    """Return texts that hold blocks, each with its anchors."""
    blocks = []
    for token_ids, num_prompt in texts:
        first = max(num_prompt - 1, 0)
        end = min(len(token_ids), limit) - num_drafts
        anchors = torch.arange(first, max(end, first), num_drafts + 1)
        if len(anchors):
            blocks.append(((token_ids, num_prompt), anchors))
    return blocks


def _compare(neighbour: Neighbour, other: Acceptance, own: Acceptance) -> Comparison:
    gains = other.accepted_by_block - own.accepted_by_block
    return Comparison(
        neighbour, other, float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    )


def _accepted(acceptance: Acceptance) -> float:
    return acceptance.accepted_tokens


def _numbers(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "accepted_tokens": acceptance.accepted_tokens,
        "greedy_accepted_tokens": acceptance.greedy_accepted_tokens,
        "acceptance_by_slot": acceptance.by_slot,
        "greedy_acceptance_by_slot": acceptance.greedy_by_slot,
    }
