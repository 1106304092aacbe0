"""Reduced draft vocabularies in training: what can be drafted, and the target's law of it.

A drafter of fewer tokens reads a smaller head and a smaller Markov table at every draft. What the
target gives to all other tokens together is one more token here, which the drafter never gives: so
the distance of the two laws, and with it the chance of acceptance, is that over the whole
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from extkv.dspark.train.texts import TextStore

# Logit of what is never drafted: its probability is 0 in every dtype, its cross-entropy finite.
NEVER = -1e4
# Bytes of logits that are looked at at a time.
_CHUNK_BYTES = 1 << 28


class DraftVocabulary:
    """The tokens that a drafter can draft.

    Attributes:
        target_ids (int64, [num_draft_tokens]): Target token of each draft token, ascending.
        draft_ids (int64, [vocab_size]): Draft token of each target token, `num_draft_tokens` for
            one that cannot be drafted.
    """

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        """Begin.

        Args:
            target_ids (int64, [num_draft_tokens]): Ascending.
            vocab_size: Number of token ids of the target.
        """
        self.target_ids = target_ids
        size = len(target_ids)
        self.draft_ids = torch.full((vocab_size,), size, device=target_ids.device)
        self.draft_ids[target_ids] = torch.arange(size, device=target_ids.device)

    def __len__(self) -> int:
        """Return the number of draft tokens."""
        return len(self.target_ids)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's logits of the draft tokens, and of all others as one.

        Args:
            logits (float, [num_rows, vocab_size]): Logits of the target.

        Returns:
            Tensor (as `logits`, [num_rows, num_draft_tokens + 1]).
        """
        found = logits.new_empty((len(logits), len(self) + 1))
        step = max(_CHUNK_BYTES // (logits.shape[1] * logits.dtype.itemsize), 1)
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            found[rows, :-1] = logits[rows].index_select(1, self.target_ids)
            others = logits[rows].index_fill(1, self.target_ids, -torch.inf)
            found[rows, -1] = torch.logsumexp(others, dim=1)
        return found


def count_answer_tokens(store: TextStore, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how often each token comes in the answers of some texts (int64, [vocab_size])."""
    return np.bincount(store.token_ids[store.is_answer], minlength=vocab_size)


def most_frequent_tokens(
    counts: npt.NDArray[np.int64], size: int, *, always: Iterable[int] = ()
) -> tuple[int, ...]:
    """Return the tokens that come most often, ascending; of equals those of lower id.

    Args:
        counts (int64, [vocab_size]): How often each token comes.
        size: How many.
        always: Tokens that are among them whatever their counts, such as those that end a text.

    Raises:
        InvalidArgumentError: If `size` is not in [1, vocab_size), or `always` has more tokens.
    """
    wanted = sorted(set(always))
    if not max(len(wanted), 1) <= size < len(counts):
        msg = (
            f"draft_vocab_size is {size}, expected at least {max(len(wanted), 1)} "
            f"and less than the vocabulary of {len(counts)}"
        )
        raise InvalidArgumentError(msg)
    ranked = counts.astype(np.int64)
    ranked[wanted] = np.iinfo(np.int64).max
    order = np.argsort(-ranked, kind="stable")
    return tuple(sorted(order[:size].tolist()))
