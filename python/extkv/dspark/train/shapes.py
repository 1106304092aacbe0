"""The shape of a drafter to train, from a few numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.dspark.train.settings import LossSettings, OptimizerSettings, StudentSettings
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import drafter_config
from extkv.models.dspark.random_drafter import default_tap_layer_ids

if TYPE_CHECKING:
    from typing import Any

    from extkv.dspark.train.settings import OptimizerName
    from extkv.models import ModelConfig

LAYOUTS = ("anchor", "fill-in")
NO_HEAD = "none"


def student_of(
    name: str,
    target: ModelConfig,
    *,
    num_layers: int = 3,
    num_drafts: int = 7,
    num_taps: int = 5,
    head: str = "vanilla",
    markov_rank: int = 64,
    confidence: bool = True,
    mask_token_id: int | None = None,
    layout: str = "anchor",
    optimizer: OptimizerName = "adamw",
    lr: float = 1e-3,
    initial: str = "target",
    seed: int = 0,
    draft_vocab_size: int = 0,
    bigram_steps: int = 0,
    ce_weight: float = 0.1,
    tv_weight: float = 0.9,
) -> StudentSettings:
    """Describe a drafter of the published shape with other numbers.

    Args:
        name: What it is called.
        target: Its target.
        num_layers: Its depth.
        num_drafts: Tokens that a block drafts.
        num_taps: Layers of the target that it reads, evenly spread.
        head: Type of the Markov head; ``"none"`` for none.
        markov_rank: Width of that head.
        confidence: Whether it has a confidence head.
        mask_token_id: Token of empty slots; None for the last of the vocabulary.
        layout: ``"anchor"`` where the anchor's slot drafts, ``"fill-in"`` where only masks do.
        optimizer: See `OptimizerSettings`.
        lr: See `OptimizerSettings`.
        initial: See `StudentSettings`.
        seed: See `StudentSettings`.
        bigram_steps: See `StudentSettings`; none where the head is not vanilla.
        ce_weight: See `LossSettings`.
        tv_weight: See `LossSettings`.
        draft_vocab_size: Tokens that can be drafted, the most frequent ones; 0 for all.

    Raises:
        InvalidArgumentError: If the numbers contradict each other.
    """
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout is {layout!r}, known: {', '.join(LAYOUTS)}")
    is_anchor_first = layout == "anchor"
    changes: dict[str, Any] = {
        "num_layers": num_layers,
        "block_size": num_drafts + (0 if is_anchor_first else 1),
        "samples_from_anchor": is_anchor_first,
        "tap_layer_ids": default_tap_layer_ids(target.num_layers, num_taps),
        "has_confidence_head": confidence,
        "markov_rank": 0 if head == NO_HEAD else markov_rank,
        "confidence_reads_markov": confidence and head != NO_HEAD,
    }
    if head != NO_HEAD:
        changes["markov_head_type"] = head
    if draft_vocab_size:
        changes["draft_vocab_size"] = draft_vocab_size
    if mask_token_id is not None:
        changes["mask_token_id"] = mask_token_id
    return StudentSettings(
        name,
        drafter_config(target, **changes),
        loss=LossSettings(ce_weight=ce_weight, tv_weight=tv_weight),
        optimizer=OptimizerSettings(name=optimizer, lr=lr),
        initial=initial,
        seed=seed,
        bigram_steps=bigram_steps if head == "vanilla" else 0,
    )
