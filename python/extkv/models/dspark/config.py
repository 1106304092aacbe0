"""Shape and layout of a DSpark drafter, whatever file they come from.

A drafter is a small decoder of its own (`backbone`) that reads the residual stream of a few target
layers (`tap_layer_ids`), and a head that lets each draft token depend on the one before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from extkv.errors import DrafterMismatchError, InvalidArgumentError
from extkv.models.decoder import EMBEDDING_TAP

if TYPE_CHECKING:
    from extkv.models.config import ModelConfig

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = get_args(MarkovHeadType)
DEFAULT_NUM_ANCHORS = 512


@dataclass(frozen=True)
class DSparkConfig:
    """Describe a drafter.

    Attributes:
        backbone: Its decoder. `vocab_size` is the number of rows of its embedding, `num_layers` its
            own depth.
        tap_layer_ids: Target layers whose output it reads, strictly increasing, counted from 0;
            -1 is the embedding output. They are the `taps` of `DecoderModel.forward`.
        mask_token_id: Token that stands in the slots that are to be filled.
        block_size: Number of slots of a block: the anchor, then masks.
        samples_from_anchor: Whether slot `j` predicts position `anchor + j + 1`, so that every slot
            predicts. Else slot `j` predicts its own position, and the anchor's slot predicts
            nothing.
        draft_vocab_size: Number of tokens that can be drafted; the vocabulary of the backbone by
            default.
        markov_rank: Width of the Markov head, 0 for none.
        markov_head_type: What the bias depends on: the token before (`vanilla`), that and the
            hidden state (`gated`), or a state that runs along the block too (`rnn`).
        has_confidence_head: Whether the drafter estimates how likely each draft is accepted.
        confidence_reads_markov: Whether that head reads the Markov embedding beside the hidden
            state.
        confidence_has_bias: Whether it has a bias.
        num_target_layers: Layers of the target it was trained for; None where that is not known.
        num_anchors: Blocks per sequence in training.

    Raises:
        InvalidArgumentError: If a value is out of range, or two of them contradict.
    """

    backbone: ModelConfig
    tap_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    samples_from_anchor: bool = True
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"
    has_confidence_head: bool = False
    confidence_reads_markov: bool = False
    confidence_has_bias: bool = True
    num_target_layers: int | None = None
    num_anchors: int = DEFAULT_NUM_ANCHORS

    def __post_init__(self) -> None:
        """Check every field once, so that the model need not."""
        least = 1 if self.samples_from_anchor else 2
        if self.block_size < least:
            layout = "anchor-first" if self.samples_from_anchor else "fill-in"
            msg = f"block_size is {self.block_size}, expected at least {least} in {layout} layout"
            raise InvalidArgumentError(msg)
        for name in ("draft_vocab_size", "num_target_layers", "num_anchors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"{name} is {value}, expected a positive number"
                raise InvalidArgumentError(msg)
        self._check_taps()
        self._check_heads()
        if not 0 <= self.mask_token_id < self.backbone.vocab_size:
            msg = (
                f"mask_token_id is {self.mask_token_id}, "
                f"out of range for vocab_size {self.backbone.vocab_size}"
            )
            raise InvalidArgumentError(msg)

    def _check_taps(self) -> None:
        taps = self.tap_layer_ids
        if not taps:
            raise InvalidArgumentError("tap_layer_ids is empty, expected at least one target layer")
        if taps[0] < EMBEDDING_TAP:
            msg = f"tap layer is {taps[0]}, expected {EMBEDDING_TAP} (embedding output) or more"
            raise InvalidArgumentError(msg)
        for before, after in itertools.pairwise(taps):
            if after <= before:
                msg = f"tap layer {after} follows {before}, expected strictly increasing ids"
                raise InvalidArgumentError(msg)
        if self.num_target_layers is not None:
            check_last_tap(taps, self.num_target_layers)

    def _check_heads(self) -> None:
        if self.markov_rank < 0:
            msg = f"markov_rank is {self.markov_rank}, expected 0 or more"
            raise InvalidArgumentError(msg)
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            known = ", ".join(MARKOV_HEAD_TYPES)
            msg = f"markov_head_type is {self.markov_head_type!r}, expected one of {known}"
            raise InvalidArgumentError(msg)
        if self.confidence_reads_markov and self.has_confidence_head and self.markov_rank == 0:
            msg = "confidence_head_with_markov is true, markov_rank is 0: there is nothing to read"
            raise InvalidArgumentError(msg)

    @property
    def num_drafts(self) -> int:
        """Number of tokens that one block drafts."""
        return self.block_size - self.first_draft_slot

    @property
    def first_draft_slot(self) -> int:
        """Slot that predicts the first draft: 0, or 1 in fill-in layout."""
        return 0 if self.samples_from_anchor else 1

    @property
    def num_draft_tokens(self) -> int:
        """Number of tokens that can be drafted: rows of the head and of the Markov bias."""
        size = self.draft_vocab_size
        return self.backbone.vocab_size if size is None else size

    @property
    def num_taps(self) -> int:
        """Number of target layers that are read."""
        return len(self.tap_layer_ids)

    @property
    def confidence_size(self) -> int:
        """Width of what the confidence head reads."""
        return self.backbone.hidden_size + (self.markov_rank if self.confidence_reads_markov else 0)


def check_last_tap(tap_layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Check that taps are layers of the target before its last one.

    The last layer's output is stored normalised by some trainers and raw by others, so its tap
    means nothing certain.

    Raises:
        DrafterMismatchError: If one is not.
    """
    last = num_target_layers - 1
    tap = tap_layer_ids[-1]
    if tap == last:
        msg = (
            f"tap layer {tap} is the last of {num_target_layers} target layers, "
            f"expected at most {last - 1}: its output may be normalised or not"
        )
        raise DrafterMismatchError(msg)
    if tap > last:
        msg = f"tap layer is {tap}, out of range for {num_target_layers} target layers"
        raise DrafterMismatchError(msg)


def check_pair(
    config: DSparkConfig, target: ModelConfig, *, pipeline_parallel_size: int = 1
) -> None:
    """Check that a drafter can draft for a target.

    The drafter's vocabulary may be larger than the target's, as where its tables are padded; tokens
    past the target's vocabulary are never drafted.

    Args:
        config: The drafter.
        target: The target.
        pipeline_parallel_size: Number of stages that the target is split into.

    Raises:
        DrafterMismatchError: If hidden size, depth or vocabulary differ, a tap is no layer of the
            target or its last one, or the target is split into stages.
    """
    if pipeline_parallel_size != 1:
        msg = (
            f"pipeline_parallel_size is {pipeline_parallel_size}, expected 1: "
            "a drafter reads layers of all stages"
        )
        raise DrafterMismatchError(msg)
    backbone = config.backbone
    if backbone.hidden_size != target.hidden_size:
        msg = (
            f"hidden_size of the drafter is {backbone.hidden_size}, "
            f"of the target {target.hidden_size}"
        )
        raise DrafterMismatchError(msg)
    if config.num_target_layers not in (None, target.num_layers):
        msg = (
            f"num_target_layers of the drafter is {config.num_target_layers}, "
            f"the target has {target.num_layers}"
        )
        raise DrafterMismatchError(msg)
    check_last_tap(config.tap_layer_ids, target.num_layers)
    if backbone.vocab_size < target.vocab_size:
        msg = (
            f"vocab_size of the drafter is {backbone.vocab_size}, "
            f"of the target {target.vocab_size}: some of its tokens cannot be anchors"
        )
        raise DrafterMismatchError(msg)
