"""One batch of training: padded texts, anchors, and the rows that have a label."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from extkv.dspark.train.anchors import draw_anchors, supervised
from extkv.dspark.train.settings import ALIGNMENT
from extkv.dspark.train.texts import padded_len

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extkv.dspark.train.settings import BatchSettings
    from extkv.dspark.train.texts import TextStore


class Rows(NamedTuple):
    """Drafts that have a label, for one number of drafts per block; one element each.

    Attributes:
        places (int64, [num_rows]): Place among all drafts of the batch, `[text, anchor, draft]`.
        slots (int64, [num_rows]): Draft within its block, counted from 0.
        label_ids (int64, [num_rows]): Token that came.
        target_rows (int64, [num_rows]): Row of the target's logits that predicts it.
    """

    places: torch.Tensor
    slots: torch.Tensor
    label_ids: torch.Tensor
    target_rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts and anchors of a step.

    Attributes:
        token_ids (int64, [num_texts, num_tokens]): Padded with token 0.
        anchors (int64, [num_texts, num_anchors]): Position of each anchor.
        is_real (bool, [num_texts, num_anchors]): Blocks that are more than padding.
        predicting (int64, [num_target_rows]): Tokens, in the flattened batch, whose logits of the
            target are needed.
        rows: Rows by number of drafts per block.
    """

    token_ids: torch.Tensor
    anchors: torch.Tensor
    is_real: torch.Tensor
    predicting: torch.Tensor
    rows: dict[int, Rows]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        moved = {
            field.name: move(getattr(self, field.name))
            for field in fields(self)
            if field.name != "rows"
        }
        rows = {count: Rows(*map(move, found)) for count, found in self.rows.items()}
        return Batch(**moved, rows=rows)

    def previous_ids(self, num_drafts: int) -> torch.Tensor:
        """Return the true token before each draft, the last one of the text past its end.

        Returns:
            Tensor (int64, [num_texts, num_anchors, num_drafts]).
        """
        offsets = torch.arange(num_drafts, device=self.anchors.device)
        positions = self.anchors[..., None] + offsets
        positions = positions.clamp(max=self.token_ids.shape[1] - 1)
        return self.token_ids.gather(1, positions.flatten(1)).view(positions.shape)


def padded_texts(
    store: TextStore, indices: Sequence[int], length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts as one tensor.

    Args:
        store: The texts.
        indices: Which of them.
        length: Tokens to pad to; by default the longest, rounded up.

    Returns:
        Tokens (int64, [num_texts, num_tokens]), 0 past the end of a text, and which of them are
        answer (bool, the same shape).
    """
    starts, ends = store.starts[:-1][indices], store.starts[1:][indices]
    width = padded_len(int((ends - starts).max())) if length is None else length
    token_ids = torch.zeros((len(indices), width), dtype=torch.int64)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        token_ids[row, : end - start] = torch.from_numpy(store.token_ids[start:end])
    places = torch.arange(width)
    lengths = torch.from_numpy(ends - starts)[:, None]
    answers = torch.from_numpy(store.answer_starts[indices])[:, None]
    return token_ids, (places >= answers) & (places < lengths)


def make_batch(
    token_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    is_real: torch.Tensor,
    num_drafts: Iterable[int],
) -> Batch:
    """Find the rows of a batch.

    Args:
        token_ids (int64, [num_texts, num_tokens], CPU): Padded texts.
        loss_mask (bool, [num_texts, num_tokens], CPU): Tokens of answers.
        anchors (int64, [num_texts, num_anchors], CPU): Position of each anchor.
        is_real (bool, [num_texts, num_anchors], CPU): Blocks that are more than padding.
        num_drafts: Numbers of drafts per block that rows are needed for.
    """
    num_tokens = token_ids.shape[1]
    masks = {count: supervised(loss_mask, anchors, is_real, count) for count in num_drafts}
    # Token t is predicted by the logits of token t - 1.
    is_needed = torch.zeros_like(loss_mask)
    is_needed[:, :-1] = loss_mask[:, 1:]
    predicting = is_needed.flatten().nonzero()[:, 0]
    row_of = torch.zeros(loss_mask.numel(), dtype=torch.int64)
    row_of[predicting] = torch.arange(len(predicting))
    texts = torch.arange(token_ids.shape[0])[:, None, None] * num_tokens
    rows = {}
    for count, mask in masks.items():
        labels = anchors[..., None] + torch.arange(1, count + 1) + texts
        index = mask.flatten().nonzero()[:, 0]
        flat = labels.flatten()[index]
        rows[count] = Rows(index, index % count, token_ids.flatten()[flat], row_of[flat - 1])
    return Batch(token_ids, anchors, is_real, predicting, rows)


def draw_batch(
    store: TextStore,
    indices: Sequence[int],
    settings: BatchSettings,
    num_drafts: Iterable[int],
    generator: torch.Generator,
) -> Batch:
    """Make a batch with anchors drawn anew.

    The blocks of a batch are shared out equally among its texts.
    """
    token_ids, loss_mask = padded_texts(store, indices)
    share = settings.batch_blocks // len(indices)
    num_anchors = max(min(share, settings.max_anchors, token_ids.shape[1]), 1)
    num_anchors = -(-num_anchors // ALIGNMENT) * ALIGNMENT
    anchors, is_real = draw_anchors(loss_mask, num_anchors, generator)
    return make_batch(token_ids, loss_mask, anchors, is_real, num_drafts)
