"""Follows one output through its grammar: which tokens may come next, and what has come.

The state is that of the tokens that were appended. To look ahead along drafts the matcher is moved
and moved back, so nothing of a draft is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extkv.structured_outputs.compiler import guarded, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import llguidance
    from numpy.typing import NDArray

    from extkv.resolved_sampling import ResolvedSampling
    from extkv.structured_outputs.compiler import Grammar


class TokenMatcher:
    """The place of one output in its grammar.

    A text is over for the grammar once nothing can follow, or after a token that ends the output.
    From then on only such tokens may come: those that end this request, or the model's
    end-of-sequence tokens where none does. They may come too wherever the text is complete, but
    before `min_tokens` only if nothing else can.

    Attributes:
        failure: Why the grammar cannot be followed any more; None while it can.
    """

    def __init__(self, grammar: Grammar, sampling: ResolvedSampling) -> None:
        """Begin a text.

        Args:
            grammar: The compiled constraint; shared.
            sampling: Says which tokens end the output, and `min_tokens`.
        """
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._min_tokens = sampling.params.min_tokens
        self._ends = _ends_of(grammar, sampling)
        self._end_bits = _TokenBits(self._ends)
        self._late_bits = _TokenBits({*self._ends, *sampling.late_token_ids})
        self._eos_bits = _TokenBits(grammar.eos_token_ids)
        self._token_ids: list[int] = []
        # Drafts past the output, how many of them the grammar has taken, and whether the text is
        # over there and at the end of the output.
        self._num_ahead = self._num_taken = 0
        self._is_over = self._was_over = False
        self.failure: str | None = None

    @property
    def unfilled(self) -> llguidance.LLMatcher | None:
        """What fills the next mask before `finish_mask`; None if nothing has to or can."""
        return None if self._is_over or self.failure is not None else self._matcher

    def append(self, token_ids: Sequence[int]) -> None:
        """Move on by output tokens; a token that may not follow is a failure."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self.failure is None and not self._take(token_id):
                place = len(self._token_ids) - 1
                reason = reason_of(self._matcher) or "the grammar does not allow it"
                self.failure = f"token {token_id} at place {place} of the output: {reason}"
        self._num_taken = 0

    def look_ahead(self, token_id: int) -> bool:
        """Move on by a draft; return whether the grammar lets it follow. See `look_back`."""
        if self._num_ahead == 0:
            self._was_over = self._is_over
        self._num_ahead += 1
        return self._take(token_id)

    def look_back(self) -> None:
        """Go back to the end of the output."""
        if self._num_ahead > 0:
            self._is_over = self._was_over
            is_back = self._num_taken == 0 or self._matcher.rollback(self._num_taken)
            self._num_ahead = self._num_taken = 0
            if not is_back or self._matcher.is_error():
                self._begin_again()

    def fail(self, reason: str) -> None:
        """Note that the grammar cannot be followed any more."""
        self.failure = self.failure or reason

    def finish_mask(self, words: NDArray[np.int32]) -> str | None:
        """Set and clear the bits of tokens that end the output.

        Args:
            words (int32, [ceil(vocab_size / 32)]): As `unfilled` filled it; mutated.

        Returns:
            Why there is no mask: then every token is allowed. None if all is well.
        """
        reason = self.failure or reason_of(self._matcher)
        if reason is not None:
            words[:] = -1
            return reason
        if self._is_over:
            words[:] = 0
            self._end_bits.set_in(words)
            return None
        if self._matcher.is_accepting():
            self._eos_bits.clear_in(words)
            self._end_bits.set_in(words)
        if len(self._token_ids) + self._num_ahead < self._min_tokens:
            others = words.copy()
            self._late_bits.clear_in(others)
            if others.any():
                words[:] = others
        return None

    def _take(self, token_id: int) -> bool:
        """Move on by one token; return whether it may follow."""
        is_end = token_id in self._ends
        if self._is_over:
            return is_end
        taken: list[int] = []
        matcher = self._matcher
        panic = guarded(lambda: taken.append(matcher.try_consume_tokens([token_id])))
        if panic is not None:
            self.fail(panic)
            return False
        if taken == [1]:
            self._num_taken += 1
            return True
        # A token that ends the output need not be one that the grammar knows.
        self._is_over = is_end and not matcher.is_error() and matcher.is_accepting()
        return self._is_over

    def _begin_again(self) -> None:
        """Follow the output anew: an error that a draft led to is no error of the output."""
        self._matcher = self._grammar.matcher.deep_copy()
        token_ids, self._token_ids, self._is_over = self._token_ids, [], False
        self.append(token_ids)


class _TokenBits:
    """The bits of some tokens in a mask, one entry per word that has any."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        by_word: dict[int, int] = {}
        for token_id in token_ids:
            by_word[token_id // 32] = by_word.get(token_id // 32, 0) | 1 << token_id % 32
        self._words = np.array(list(by_word), np.int64)
        self._bits = np.array(list(by_word.values()), np.uint32).view(np.int32)

    def set_in(self, words: NDArray[np.int32]) -> None:
        """Allow the tokens."""
        words[self._words] |= self._bits

    def clear_in(self, words: NDArray[np.int32]) -> None:
        """Forbid the tokens."""
        words[self._words] &= ~self._bits


def _ends_of(grammar: Grammar, sampling: ResolvedSampling) -> frozenset[int]:
    ends = set(sampling.stop_token_ids)
    if sampling.eos_token_id is not None and not sampling.params.ignore_eos:
        ends.add(sampling.eos_token_id)
    return frozenset(ends or grammar.eos_token_ids)
