"""Accepted length of a drafter on texts of its target, by the engine's law but without running it.

A round begins at an anchor of a text that the target wrote. Given the token that came, draft `k`
was accepted with probability `min(1, q / p)` of that token where the text was drawn; where the text
is greedy, it was if the drafter's likeliest token is that token. Rounds follow each other as in the
engine. So a text and a pass over all its positions give what drafting would have given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from extkv.dspark.train.batches import make_batch, padded_texts
from extkv.dspark.train.settings import ALIGNMENT
from extkv.dspark.train.target_pass import run_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from extkv.dspark.train.batches import Batch
    from extkv.dspark.train.student import Student
    from extkv.dspark.train.target_pass import TargetOutput
    from extkv.dspark.train.texts import Text, TextStore
    from extkv.models.decoder import DecoderModel

    Float32Array = npt.NDArray[np.float32]

# Tokens and blocks of a pass on CUDA; the host, with less memory, takes an eighth.
_BATCH_TOKENS = 16_384
_MAX_BLOCKS = 4096
_HOST_DIVISOR = 8


@dataclass
class AcceptedLengths:
    """Count rounds.

    Attributes:
        num_rounds: Rounds.
        num_tokens: Tokens of all rounds, the one after the accepted drafts included.
        num_drafted: Drafts that had a token to be compared with, per place in the block.
        num_accepted: Those accepted.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens per round; 0 before the first."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def add(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Count one round."""
        missing = num_drafts - len(self.num_drafted)
        self.num_drafted += [0] * missing
        self.num_accepted += [0] * missing
        self.num_rounds += 1
        self.num_tokens += num_tokens
        for place in range(num_drafts):
            self.num_drafted[place] += 1
            self.num_accepted[place] += place < num_accepted

    def to_dict(self) -> dict[str, Any]:
        """Return figures for a log."""
        pairs = zip(self.num_accepted, self.num_drafted, strict=True)
        return {
            "accepted_length": round(self.accepted_length, 4),
            "acceptance_by_slot": [round(hit / total, 4) for hit, total in pairs],
            "num_rounds": self.num_rounds,
        }


@dataclass(frozen=True, eq=False)
class TextAcceptance:
    """What a drafter gave at every position of one text that can be an anchor.

    Attributes:
        text: The text.
        first: Position of the first anchor.
        chances (float32, [num_anchors, num_drafts]): Chance that each draft is accepted if those
            before it are; 0 past the end.
        confidence_logits (float32, [num_anchors, num_drafts]): None without such a head.
    """

    text: Text
    first: int
    chances: Float32Array
    confidence_logits: Float32Array | None

    def rounds(self, random: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yield index of the anchor and accepted drafts of each round."""
        index, num_drafts = 0, self.chances.shape[1]
        while index < len(self.chances):
            hits = random.random(num_drafts) < self.chances[index]
            num_accepted = num_drafts if hits.all() else int(hits.argmin())
            yield index, num_accepted
            index += num_accepted + 1


def measure(
    students: Sequence[Student],
    target: DecoderModel,
    store: TextStore,
    tap_layer_ids: Sequence[int],
    *,
    seed: int = 0,
) -> list[AcceptedLengths]:
    """Return the accepted lengths of drafters over all texts of a store.

    Args:
        students: The drafters.
        target: The target, which wrote the texts.
        store: The texts.
        tap_layer_ids: Taps of all drafters.
        seed: Seed of the draws of acceptance.
    """
    found = [AcceptedLengths() for _ in students]
    random = [np.random.default_rng(seed) for _ in students]
    for number, acceptance in text_acceptances(students, target, store, tap_layer_ids):
        length = len(acceptance.text.token_ids)
        for index, num_accepted in acceptance.rounds(random[number]):
            left = length - 1 - acceptance.first - index
            num_drafts = min(acceptance.chances.shape[1], left)
            found[number].add(num_drafts, num_accepted, min(num_accepted + 1, left))
    return found


@torch.no_grad()
def text_acceptances(
    students: Sequence[Student],
    target: DecoderModel,
    store: TextStore,
    tap_layer_ids: Sequence[int],
) -> Iterator[tuple[int, TextAcceptance]]:
    """Yield number of the drafter and what it gave, for every text and drafter."""
    order = np.argsort(store.lengths, kind="stable")
    order = order[store.lengths[order] - store.answer_starts[order] > 1]
    most = _BATCH_TOKENS // (1 if target.device.type == "cuda" else _HOST_DIVISOR)
    begin = 0
    while begin < len(order):
        longest = int(store.lengths[order[begin]])
        count = 1
        while begin + count < len(order):
            longest = int(store.lengths[order[begin + count]])
            if longest * (count + 1) > most:
                break
            count += 1
        yield from _batch_acceptances(
            students, target, store, order[begin : begin + count], tap_layer_ids
        )
        begin += count


def _batch_acceptances(
    students: Sequence[Student],
    target: DecoderModel,
    store: TextStore,
    indices: npt.NDArray[np.int64],
    tap_layer_ids: Sequence[int],
) -> Iterator[tuple[int, TextAcceptance]]:
    token_ids, loss_mask = padded_texts(store, indices.tolist())
    answers = loss_mask.sum(dim=1)
    firsts = torch.from_numpy(store.answer_starts[indices])
    counts = {student.num_drafts for student in students}
    num_anchors = int(answers.max()) - 1
    most = _MAX_BLOCKS // (1 if target.device.type == "cuda" else _HOST_DIVISOR)
    step = max(min(most // len(indices), num_anchors) // ALIGNMENT, 1) * ALIGNMENT
    parts: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = [[] for _ in students]
    output: TargetOutput | None = None
    for start in range(0, num_anchors, step):
        places = start + torch.arange(step)
        is_real = places < (answers - 1)[:, None]
        anchors = torch.where(is_real, firsts[:, None] + places, 0)
        batch = make_batch(token_ids, loss_mask, anchors, is_real, counts).to(target.device)
        if output is None:
            output = run_target(target, batch, tap_layer_ids)
        is_greedy = torch.from_numpy(store.temperatures[indices] < 1e-5)  # noqa: PLR2004
        for student, found in zip(students, parts, strict=True):
            found.append(_chances(student, batch, output, is_greedy.to(target.device)))
    for number, found in enumerate(parts):
        chances = torch.cat([part for part, _ in found], dim=1).cpu().numpy()
        logits = None
        if all(part is not None for _, part in found):
            logits = torch.cat([part for _, part in found if part is not None], 1).cpu().numpy()
        for row, index in enumerate(indices.tolist()):
            count = max(int(answers[row]) - 1, 0)
            text = store.text(index)
            own = None if logits is None else logits[row, :count]
            yield number, TextAcceptance(text, text.answer_start, chances[row, :count], own)


def _chances(
    student: Student, batch: Batch, output: TargetOutput, is_greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return chance of acceptance and confidence logits, [num_texts, num_anchors, num_drafts]."""
    rows = batch.rows[student.num_drafts]
    blocks = student.forward(batch, output.taps, has_gradient=False)
    weights = torch.zeros(len(rows.places), device=rows.places.device)
    terms = student.terms(blocks, batch, output.logits, weights, chunk_bytes=1 << 28)
    ratios = (-terms.cross_entropy - terms.target_logprob).clamp(max=0).exp()
    hits = (terms.argmax == rows.label_ids).to(ratios.dtype)
    num_anchors = batch.anchors.shape[1]
    texts = rows.places // (num_anchors * student.num_drafts)
    chosen = torch.where(is_greedy[texts], hits, ratios).to(torch.float32)
    shape = (*batch.anchors.shape, student.num_drafts)
    chances = torch.zeros(shape, device=chosen.device)
    chances.view(-1)[rows.places] = chosen
    confidences = blocks.confidence_logits
    return chances, None if confidences is None else confidences.to(torch.float32)
