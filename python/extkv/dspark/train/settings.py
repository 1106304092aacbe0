"""What a training run is told: the drafter, the loss, the optimizer, batches and the budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.models.dspark import DSparkConfig

OptimizerName = Literal["adamw", "muon"]
# Where layers can begin, besides the directory of a drafter.
INITIAL_NAMES = ("target", "random")
# Blocks and lengths are multiples of this, so that attention masks stay aligned.
ALIGNMENT = 8


@dataclass(frozen=True)
class LossSettings:
    """Weigh the terms of the loss.

    Attributes:
        ce_weight: Of the cross-entropy with the token that came.
        tv_weight: Of the distance between the drafter's and the target's law, summed over tokens.
        confidence_weight: Of the cross-entropy of the confidence with the chance of acceptance.
        slot_decay: Draft `k` weighs `exp(-k / slot_decay)`, counted from 0.

    Raises:
        InvalidArgumentError: If a weight is negative or the decay not positive.
    """

    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    slot_decay: float = 4.0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("ce_weight", "tv_weight", "confidence_weight"):
            if not getattr(self, name) >= 0:
                msg = f"{name} is {getattr(self, name)}, expected 0 or more"
                raise InvalidArgumentError(msg)
        if not self.slot_decay > 0:
            raise InvalidArgumentError(f"slot_decay is {self.slot_decay}, expected more than 0")


@dataclass(frozen=True)
class OptimizerSettings:
    """Say how weights are changed.

    Attributes:
        name: ``"adamw"``, or ``"muon"`` for the projections and AdamW for the rest.
        lr: Largest learning rate; both optimizers take it, Muon's step is scaled to match.
        warmup_ratio: Share of the run in which the rate rises; then it falls along a cosine to 0.
        weight_decay: Decay of AdamW and Muon.
        clip_norm: Largest norm of all gradients together.
        betas: Decay of AdamW's moments.

    Raises:
        InvalidArgumentError: If a value is unknown or out of range.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        """Check every field."""
        known = get_args(OptimizerName)
        if self.name not in known:
            raise InvalidArgumentError(f"optimizer is {self.name!r}, known: {', '.join(known)}")
        for name in ("lr", "clip_norm"):
            if not getattr(self, name) > 0:
                msg = f"{name} is {getattr(self, name)}, expected more than 0"
                raise InvalidArgumentError(msg)
        if not 0 <= self.warmup_ratio < 1:
            msg = f"warmup_ratio is {self.warmup_ratio}, expected a number in [0, 1)"
            raise InvalidArgumentError(msg)


@dataclass(frozen=True)
class StudentSettings:
    """Describe one drafter in training.

    Attributes:
        name: What logs and folders call it.
        config: Its shape.
        loss: Its loss.
        optimizer: Its optimizer.
        initial: Where it begins: with its layers at layers of the ``"target"`` or at ``"random"``
            numbers, or as the drafter in a directory, which has its shape and its draft tokens.
        seed: Seed of the random numbers.
        bigram_steps: Steps in which a vanilla Markov head learns which token follows which before
            the run; the backbone begins nearly silent then. See `learn_bigrams`.
        draft_token_ids: Target token of each draft token, ascending; None where the drafter drafts
            every token. Chosen after texts are there, see `most_frequent_tokens`.

    Raises:
        InvalidArgumentError: If the drafter has sliding windows, bigrams are to be learnt by a
            head that is not vanilla or that a drafter brings along, or `initial` is no directory.
    """

    name: str
    config: DSparkConfig
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    initial: str = "target"
    seed: int = 0
    bigram_steps: int = 0
    draft_token_ids: tuple[int, ...] | None = None

    @property
    def is_reduced(self) -> bool:
        """Whether some tokens of the target cannot be drafted."""
        return self.config.num_draft_tokens != self.config.backbone.vocab_size

    @property
    def first_drafter(self) -> Path | None:
        """The directory of the drafter that it begins as; None where it begins anew."""
        return None if self.initial in INITIAL_NAMES else Path(self.initial)

    @property
    def lacks_vocabulary(self) -> bool:
        """Whether its draft tokens are still to be chosen."""
        return self.is_reduced and self.draft_token_ids is None and self.first_drafter is None

    def __post_init__(self) -> None:
        """Refuse what the trainer does not compute."""
        backbone = self.config.backbone
        if backbone.sliding_window is not None:
            msg = f"sliding_window is {backbone.sliding_window}, expected none: it is not trained"
            raise InvalidArgumentError(msg)
        if self.bigram_steps < 0:
            msg = f"bigram_steps is {self.bigram_steps}, expected 0 or more"
            raise InvalidArgumentError(msg)
        is_vanilla = self.config.markov_rank and self.config.markov_head_type == "vanilla"
        if self.bigram_steps and not is_vanilla:
            found = self.config.markov_head_type if self.config.markov_rank else "none"
            msg = f"bigrams are learnt by a vanilla Markov head, that of {self.name} is {found}"
            raise InvalidArgumentError(msg)
        first = self.first_drafter
        if first is not None and not first.is_dir():
            known = ", ".join(INITIAL_NAMES)
            msg = f"initial is {self.initial!r}, expected {known} or the directory of a drafter"
            raise InvalidArgumentError(msg)
        if first is not None and self.bigram_steps:
            msg = f"bigram_steps is {self.bigram_steps}, expected 0: {self.name} begins as {first}"
            raise InvalidArgumentError(msg)


@dataclass(frozen=True)
class BatchSettings:
    """Say what a step reads.

    Attributes:
        batch_tokens: Most tokens of a batch, padding included.
        batch_blocks: Blocks of a batch, over all its texts.
        max_anchors: Most blocks of one text.
        num_micro_batches: Batches of a step; their gradients are added.
        chunk_bytes: Bytes of draft logits that exist at a time.
        seed: Seed of the order of texts and of the anchors.

    Raises:
        InvalidArgumentError: If a number is not positive.
    """

    batch_tokens: int = 32_768
    batch_blocks: int = 8192
    max_anchors: int = 512
    num_micro_batches: int = 1
    chunk_bytes: int = 1 << 29
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every number."""
        for name in (
            "batch_tokens", "batch_blocks", "max_anchors", "num_micro_batches", "chunk_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class RunSettings:
    """Say how long a run goes on and what it writes when.

    Attributes:
        budget_s: Seconds for generating and training together; the evaluations count.
        generation_ratio: Share of the budget spent on generating; 0 with texts from a file.
        num_rounds: Times that generating and training take turns.
        max_steps: Steps instead of seconds, where a run must be repeatable.
        evaluate_every_s: Seconds between evaluations, after each of which drafters are written.
        checkpoint_every_s: Seconds between checkpoints.
        log_every_steps: Steps between lines of the log.

    Raises:
        InvalidArgumentError: If a number is out of range.
    """

    budget_s: float = 300.0
    generation_ratio: float = 0.3
    num_rounds: int = 3
    max_steps: int | None = None
    evaluate_every_s: float = 60.0
    checkpoint_every_s: float = 60.0
    log_every_steps: int = 20

    @property
    def generation_s(self) -> float:
        """Seconds of a round in which texts are generated."""
        return self.budget_s / self.num_rounds * self.generation_ratio

    def __post_init__(self) -> None:
        """Check every number."""
        if not self.budget_s > 0:
            raise InvalidArgumentError(f"budget_s is {self.budget_s}, expected more than 0")
        if not 0 <= self.generation_ratio < 1:
            msg = f"generation_ratio is {self.generation_ratio}, expected a number in [0, 1)"
            raise InvalidArgumentError(msg)
        for name in ("num_rounds", "log_every_steps"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected at least 1")
