"""Masks of a step's rows, on the host: one per output, or one per place of its drafts.

All outputs go ahead together, draft by draft, and llguidance fills the masks of a place on several
threads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from extkv.structured_outputs.compiler import guarded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import llguidance
    from numpy.typing import NDArray

    from extkv.structured_outputs.matcher import TokenMatcher


class TokenMasks(NamedTuple):
    """The masks of the rows that have one.

    Attributes:
        words (int32, [num_masks, ceil(vocab_size / 32)]): As `apply_token_bitmask` takes them.
        row_ids (int64, [num_masks]): The row of each, ascending.
        unreachable: Rows after a draft that the grammar forbids. Nothing is decided from them, and
            every token is allowed.
        failures: Why a row has no mask. Its request has failed if a token is decided from it.
    """

    words: NDArray[np.int32]
    row_ids: NDArray[np.int64]
    unreachable: frozenset[int]
    failures: Mapping[int, str]


def fill_masks(
    rows: Sequence[tuple[TokenMatcher | None, Sequence[int]]], vocab_size: int
) -> TokenMasks:
    """Make the masks of a step.

    Args:
        rows: For each row its matcher, None for a row without a grammar, and the drafts between the
            output and the row. Rows of one matcher have beginnings of the same drafts.
        vocab_size: Columns of the logits.

    Returns:
        The masks; the matchers are where they were.
    """
    masked = [index for index, (matcher, _) in enumerate(rows) if matcher is not None]
    place_of = {index: place for place, index in enumerate(masked)}
    words = np.full((len(masked), -(-vocab_size // 32)), -1, np.int32)
    unreachable, failures = set(masked), dict[int, str]()
    walks = _walks(rows)
    try:
        depth, going = 0, walks
        while going:
            _fill(
                words, [(w.matcher, place_of[w.rows[depth][0]]) for w in going if depth in w.rows]
            )
            ahead = []
            for walk in going:
                indices = walk.rows.get(depth, [])
                reason = _finish(words, walk.matcher, [place_of[index] for index in indices])
                if reason is not None:
                    # What comes after it cannot be known either.
                    indices = [index for at in walk.rows if at >= depth for index in walk.rows[at]]
                    failures.update(dict.fromkeys(indices, reason))
                unreachable.difference_update(indices)
                is_last = depth == len(walk.drafts) or reason is not None
                if not is_last and walk.matcher.look_ahead(walk.drafts[depth]):
                    ahead.append(walk)
            depth, going = depth + 1, ahead
    finally:
        # Also after an interrupt: the step is computed again.
        for walk in walks:
            walk.matcher.look_back()
    return TokenMasks(words, np.array(masked, np.int64), frozenset(unreachable), failures)


class _Walk(NamedTuple):
    """The rows of one output by the number of drafts before them, and the longest drafts."""

    matcher: TokenMatcher
    rows: dict[int, list[int]]
    drafts: Sequence[int]


def _walks(rows: Sequence[tuple[TokenMatcher | None, Sequence[int]]]) -> list[_Walk]:
    walks: dict[int, _Walk] = {}
    for index, (matcher, drafts) in enumerate(rows):
        if matcher is None:
            continue
        walk = walks.setdefault(id(matcher), _Walk(matcher, {}, drafts))
        walk.rows.setdefault(len(drafts), []).append(index)
        if len(drafts) > len(walk.drafts):
            walks[id(matcher)] = walk._replace(drafts=drafts)
    return list(walks.values())


def _fill(words: NDArray[np.int32], places: Sequence[tuple[TokenMatcher, int]]) -> None:
    """Let each grammar fill the mask at its place."""
    batch: list[tuple[llguidance.LLMatcher, int]] = []
    for matcher, place in places:
        unfilled = matcher.unfilled
        if unfilled is not None:
            batch.append((unfilled, place))
    if not batch:
        return
    import llguidance.numpy as filling

    if len(batch) > 1:
        all_at_once = lambda: filling.fill_next_token_bitmask_par(_executor(), batch, words)  # noqa: E731
        if guarded(all_at_once) is None:
            return
    # Alone, and so that a panic is told from whom it comes.
    for matcher, place in places:
        unfilled = matcher.unfilled
        if unfilled is not None:
            reason = guarded(functools.partial(_fill_one, unfilled, words, place))
            if reason is not None:
                matcher.fail(reason)


def _fill_one(matcher: llguidance.LLMatcher, words: NDArray[np.int32], place: int) -> None:
    import llguidance.numpy as filling

    filling.fill_next_token_bitmask(matcher, words, place)


def _finish(words: NDArray[np.int32], matcher: TokenMatcher, places: Sequence[int]) -> str | None:
    """Finish the first mask, copy it to the other rows of the same place, and return a failure."""
    if not places:
        return None
    reason = matcher.finish_mask(words[places[0]])
    words[list(places[1:])] = words[places[0]]
    return reason


@functools.cache
def _executor() -> llguidance.LLExecutor:
    import llguidance

    return llguidance.LLExecutor()
