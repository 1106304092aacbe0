"""Readings of a drafter's file that are one mistake away from what it says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from extkv.dspark.check.text import tappable
from extkv.models.dspark import DSparkModel, Reading
from extkv.models.dspark.layout_keys import (
    MASK_TOKEN_SPELLINGS,
    TAP_SPELLINGS,
    Spelling,
    mask_token_spelling,
    tap_spelling,
)
from extkv.models.dspark.teacher_forcing import AS_PUBLISHED
from extkv.models.dspark.weights import EMBEDDING, LM_HEAD
from extkv.models.hf_config import CONFIG_FILE
from extkv.models.json_file import read_json

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator

    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark import DSparkConfig

# Mask tokens of published drafters: Qwen3, DeepSeek-V4, Gemma4.
KNOWN_MASK_TOKEN_IDS = (151_669, 128_799, 4)


@dataclass(frozen=True)
class FileKeys:
    """Name the keys that advice is about.

    Attributes:
        taps: How the file spells the tapped layers.
        mask_token: How it spells the mask token.
    """

    taps: Spelling = TAP_SPELLINGS[-1]
    mask_token: Spelling = MASK_TOKEN_SPELLINGS[1]


def read_file_keys(directory: str | os.PathLike[str]) -> FileKeys:
    """Return how a drafter's `config.json` spells its keys.

    Raises:
        ModelFileError: If the file is missing, damaged, or has none of the spellings.
    """
    values = read_json(Path(directory) / CONFIG_FILE)
    return FileKeys(tap_spelling(values), mask_token_spelling(values))


@dataclass(frozen=True)
class Neighbour:
    """Describe one other reading.

    Attributes:
        name: Short and unique.
        fault: What is wrong with the file if this reading is the right one.
        change: What to change in the file.
        tap_shift: Added to the tapped layers.
        config: Fields of the drafter's configuration that differ.
        tensors: Fields of `DSparkWeights.backbone` that are replaced.
        reading: How the drafter is run.
    """

    name: str
    fault: str
    change: str
    tap_shift: int = 0
    config: dict[str, int | bool] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    reading: Reading = AS_PUBLISHED

    def tap_layer_ids(self, config: DSparkConfig) -> list[int]:
        """Return the layers that are read in place of those of the file."""
        return [layer_id + self.tap_shift for layer_id in config.tap_layer_ids]

    def apply(self, drafter: DSparkModel, vocab_size: int) -> DSparkModel:
        """Return the drafter with the differences that stand in its configuration or weights."""
        if not self.config and not self.tensors:
            return drafter
        weights = drafter.weights
        backbone = dataclasses.replace(weights.backbone, **self.tensors)  # type: ignore[arg-type]
        return DSparkModel(
            dataclasses.replace(drafter.config, **self.config),  # type: ignore[arg-type]
            dataclasses.replace(weights, backbone=backbone),
            vocab_size=vocab_size,
            ops=drafter.ops,
            max_model_len=drafter.num_positions,
        )


def neighbours_of(
    drafter: DSparkModel,
    target: DecoderModel,
    *,
    keys: FileKeys | None = None,
    mask_token_ids: Collection[int] = (),
) -> list[Neighbour]:
    """Return the readings next to a drafter's own.

    Args:
        drafter: The drafter as its file says.
        target: Its target.
        keys: How the file spells what is to be changed.
        mask_token_ids: Ids beside the neighbouring and the well-known ones that its mask may be.
    """
    names = FileKeys() if keys is None else keys
    return [
        *_other_taps(drafter.config, target.config.num_layers, names.taps),
        *_other_layouts(drafter.config),
        *_other_readings(),
        *_other_masks(drafter.config, names.mask_token, mask_token_ids),
        *_other_vocabularies(drafter, target),
    ]


def _other_taps(config: DSparkConfig, num_layers: int, spelling: Spelling) -> Iterator[Neighbour]:
    written = [layer_id + spelling.shift for layer_id in config.tap_layer_ids]
    for shift in (-1, 1):
        moved = [layer_id + shift for layer_id in config.tap_layer_ids]
        if not all(tappable(layer_id, num_layers) for layer_id in moved):
            continue
        direction = "later" if shift > 0 else "earlier"
        mixed_up = (shift > 0) == (spelling.shift > 0)
        reason = (
            f": {spelling.name} counts the embedding output as 0, and these ids do not"
            if mixed_up and spelling.shift
            else f": these ids count the embedding output as 0, and {spelling.name} does not"
            if mixed_up
            else ""
        )
        yield Neighbour(
            f"taps{shift:+d}",
            f"the drafter reads the target one layer {direction}{reason}",
            f"{spelling.name}: {[layer_id + shift for layer_id in written]} instead of {written}",
            tap_shift=shift,
        )


def _other_layouts(config: DSparkConfig) -> Iterator[Neighbour]:
    is_anchor_first = not config.samples_from_anchor
    if is_anchor_first or config.block_size > 1:
        layout = "anchor-first" if is_anchor_first else "fill-in"
        predicts = "the token after its own position" if is_anchor_first else "its own position"
        yield Neighbour(
            layout,
            f"the layout is {layout}: each slot predicts {predicts}",
            f"sample_from_anchor: {str(is_anchor_first).lower()}",
            config={"samples_from_anchor": is_anchor_first},
        )


def _other_readings() -> Iterator[Neighbour]:
    for offset in (-1, 1):
        yield Neighbour(
            f"positions{offset:+d}",
            f"slot j was trained at position anchor {offset:+d} + j, not anchor + j",
            "no key says this: train again, or run it where positions count like that",
            reading=Reading(position_offset=offset),
        )
    places: tuple[Literal["before", "none"], ...] = ("before", "none")
    for place in places:
        said = "each tap is normalised before fc" if place == "before" else "nothing is normalised"
        yield Neighbour(
            f"norm-{place}",
            f"hidden_norm does not follow fc: {said}",
            "no key says this: train again, or run it where the norm stands there",
            reading=Reading(context_norm=place),
        )


def _other_masks(
    config: DSparkConfig, spelling: Spelling, others: Collection[int]
) -> Iterator[Neighbour]:
    if config.block_size == 1:
        return
    mask, size = config.mask_token_id, config.backbone.vocab_size
    wanted = [mask - 1, mask + 1, *others, *KNOWN_MASK_TOKEN_IDS, size - 1]
    for token_id in dict.fromkeys(wanted):
        if token_id != mask and 0 <= token_id < size:
            yield Neighbour(
                f"mask-{token_id}",
                f"the mask token is {token_id}, not {mask}",
                f"{spelling.name}: {token_id} instead of {mask}",
                config={"mask_token_id": token_id},
            )


def _other_vocabularies(drafter: DSparkModel, target: DecoderModel) -> Iterator[Neighbour]:
    """Try the target's embedding and head for those of the file, and the embedding as head."""
    weights, backbone = drafter.weights, drafter.weights.backbone
    theirs = target.weights
    if EMBEDDING not in weights.shared and _fits(backbone.embedding, theirs.embedding):
        yield Neighbour(
            "target-embedding",
            f"{EMBEDDING} of the file is not the one it was trained with: the target's is",
            f"leave {EMBEDDING} out of the file",
            tensors={"embedding": theirs.embedding},
        )
    if LM_HEAD not in weights.shared:
        head = theirs.lm_head
        if weights.target_ids is not None:
            head = head[weights.target_ids]
        if _fits(backbone.lm_head, head) and not torch.equal(backbone.lm_head, head):
            yield Neighbour(
                "target-head",
                f"{LM_HEAD} of the file is not the one it was trained with: the target's is",
                f"leave {LM_HEAD} out of the file, and tie_word_embeddings: false",
                tensors={"lm_head": head},
            )
    tied = backbone.embedding
    is_own = tied.data_ptr() == backbone.lm_head.data_ptr()
    if not is_own and _fits(backbone.lm_head, tied) and not torch.equal(backbone.lm_head, tied):
        yield Neighbour(
            "tied-head",
            f"{LM_HEAD} is not the one it was trained with: its embedding is",
            f"store {EMBEDDING} as {LM_HEAD} too",
            tensors={"lm_head": tied},
        )


def _fits(own: torch.Tensor, other: torch.Tensor) -> bool:
    return own.shape == other.shape
