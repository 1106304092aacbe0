"""Learn which token follows which before anything else, into the tables of the Markov head.

A vanilla Markov head alone is a bigram model of low rank. Its two tables are most of a drafter's
weights, and in a short run most of their rows are seen a few times only. Pairs of tokens need no
target and no backbone: a pass over all of them costs what a few steps of training do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from extkv.dspark.train.distributed import Ranks
    from extkv.dspark.train.student import Student
    from extkv.dspark.train.texts import TextStore

BATCH_PAIRS = 1024
LEARNING_RATE = 1e-2


def answer_pairs(store: TextStore) -> torch.Tensor:
    """Return each token of an answer with the token before it (int64, [num_pairs, 2])."""
    has_pair = store.is_answer
    # The first token of a text has none before it.
    has_pair[store.starts[:-1]] = False
    (places,) = has_pair.nonzero()
    tokens = store.token_ids.astype(np.int64)
    return torch.from_numpy(np.stack((tokens[places - 1], tokens[places]), axis=1))


def learn_bigrams(
    student: Student, store: TextStore, num_steps: int, *, ranks: Ranks, seed: int = 0
) -> list[float]:
    """Change `markov_w1` and `markov_w2` so that they alone predict answers from token to token.

    Args:
        student: A drafter with a vanilla Markov head.
        store: Texts.
        num_steps: Steps of `BATCH_PAIRS` pairs; the rate falls linearly to 0.
        ranks: Processes that learn together, each from its texts.
        seed: Seed of the order of pairs.

    Returns:
        Cross-entropy of each step, of tokens that can be drafted.
    """
    first, second = student.parameters["markov_w1"], student.parameters["markov_w2"]
    pairs = answer_pairs(store).to(first.device)
    if student.vocabulary is not None:
        labels = student.vocabulary.draft_ids[pairs[:, 1]]
        is_inside = labels < len(student.vocabulary)
        pairs = torch.stack((pairs[:, 0], labels), dim=1)[is_inside]
    optimizer = torch.optim.AdamW(
        (first, second), lr=LEARNING_RATE, weight_decay=0.0, fused=first.is_cuda
    )
    generator = torch.Generator().manual_seed(seed + 7919 * ranks.rank)
    losses = []
    for step in range(num_steps):
        rows = torch.randint(len(pairs), (BATCH_PAIRS,), generator=generator).to(pairs.device)
        before, after = pairs[rows].unbind(1)
        logits = functional.linear(functional.embedding(before, first), second)
        loss = functional.cross_entropy(logits, after) / ranks.size
        loss.backward()  # type: ignore[no-untyped-call]
        ranks.add_gradients((first, second))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / num_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach() * ranks.size)
    return [float(loss) for loss in losses]
