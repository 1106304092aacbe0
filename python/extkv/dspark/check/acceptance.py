"""How much of a block the target accepts, from both models' laws over the same true text.

The tokens before each draft are those of the text, as in training ("teacher-forced"). On text that
the target drew at the temperature, the mean over blocks is what a round of standard rejection
accepts, up to the difference between accepted drafts and drawn text; on its greedy text, the greedy
count is exact. Every number here is of one block, so that two drafters are compared block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from extkv.models.dspark import predicted_positions, teacher_forced
from extkv.models.dspark.teacher_forcing import AS_PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.dspark.check.text import TargetText
    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark import DSparkModel, Reading


@dataclass(frozen=True)
class Acceptance:
    """Hold what is accepted of some blocks, slot by slot.

    Attributes:
        overlap (float32, [num_blocks, num_drafts], cpu): Chance that a drawn draft is accepted if
            those before it are: the sum of min(p, q) over all tokens.
        is_greedy_match (bool, [num_blocks, num_drafts], cpu): Whether the likeliest tokens of both
            models are the same.
    """

    overlap: torch.Tensor
    is_greedy_match: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Return the blocks of all parts."""
        return cls(
            torch.cat([part.overlap for part in parts]),
            torch.cat([part.is_greedy_match for part in parts]),
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.overlap.shape[0]

    @property
    def accepted_by_block(self) -> torch.Tensor:
        """Drafts of each block that are accepted on average (float64, [num_blocks])."""
        return self.overlap.double().cumprod(1).sum(1)

    @property
    def accepted_tokens(self) -> float:
        """Drafts accepted per block when drafts are drawn."""
        return float(self.accepted_by_block.mean())

    @property
    def greedy_accepted_tokens(self) -> float:
        """Drafts accepted per block when both models take their likeliest token."""
        return float(self.is_greedy_match.double().cumprod(1).sum(1).mean())

    @property
    def by_slot(self) -> list[float]:
        """Chance that the draft of each slot is accepted if those before it are, drawn."""
        return self.overlap.double().mean(0).tolist()

    @property
    def greedy_by_slot(self) -> list[float]:
        """Share of blocks whose likeliest token is right in each slot, after true tokens."""
        return self.is_greedy_match.double().mean(0).tolist()


@torch.inference_mode()
def target_laws(
    target: DecoderModel,
    text: TargetText,
    anchors: torch.Tensor,
    num_drafts: int,
    temperature: float,
) -> torch.Tensor:
    """Return the target's law of the tokens after each anchor.

    Returns:
        Tensor (float32, [num_anchors, num_drafts, vocab_size], device).
    """
    rows = anchors[:, None] + torch.arange(num_drafts, device=anchors.device)
    logits = target.compute_logits(text.hidden[rows.flatten()]).to(torch.float32)
    return (logits / temperature).softmax(1).view(*rows.shape, -1)


@torch.inference_mode()
def block_acceptance(
    drafter: DSparkModel,
    tap_layer_ids: Sequence[int],
    text: TargetText,
    anchors: torch.Tensor,
    laws: torch.Tensor,
    *,
    temperature: float = 1.0,
    reading: Reading = AS_PUBLISHED,
) -> Acceptance:
    """Compare a drafter with the target's laws.

    Args:
        drafter: The drafter.
        tap_layer_ids: Layers of the text that it reads.
        text: The text.
        anchors (int64, [num_anchors], device): Its blocks.
        laws: What `target_laws` returned, for at least as many drafts as the drafter makes.
        temperature: Divisor of the drafter's logits, as of the target's.
        reading: How the drafter is run.
    """
    taps = torch.stack([text.taps[layer_id] for layer_id in tap_layer_ids])
    length = int(predicted_positions(drafter.config, anchors).max()) + 1
    said = teacher_forced(
        drafter, taps[:, :length], text.token_ids[:length], anchors, reading=reading
    )
    p = laws[:, : drafter.config.num_drafts]
    q = (said.logits.to(torch.float32) / temperature).softmax(2)
    chosen = drafter.to_target_ids(q.argmax(2))
    is_match = chosen == p.argmax(2)
    if drafter.target_ids is not None:
        p = p[:, :, drafter.target_ids[: q.shape[2]]]
    overlap = torch.minimum(p[:, :, : q.shape[2]], q).sum(2)
    return Acceptance(overlap.cpu(), is_match.cpu())
