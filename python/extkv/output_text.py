"""The text of one output as its tokens come: whole characters, cut at stop strings.

The stop string that is complete first in the text wins, and of those that end together the longest;
so the result depends neither on the order of the list nor on how the text falls into tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extkv.models import IncrementalDetokenizer
    from extkv.resolved_sampling import ResolvedSampling


class OutputText:
    """Build the text of one output.

    Text that may be the beginning of a stop string is held back until it is known not to be one,
    unless the stop string would stay in the text anyway. So `text` is only ever appended to.

    Attributes:
        text: All text released so far.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer | None, resolved: ResolvedSampling
    ) -> None:
        """Start at the beginning of an output.

        Args:
            detokenizer: A fresh one; None makes no text. Whether special tokens have a text is its
                affair.
            resolved: Gives the stop strings, whether they stay in the text, and `min_tokens`.
        """
        params = resolved.params
        self._detokenizer = detokenizer
        self._stop = resolved.stop
        self._keeps_stop = params.include_stop_str_in_output
        self._num_left = params.min_tokens
        # Longest end of the text that begins a stop string, and how much of it was released.
        self._tail = ""
        self._num_released = 0
        self.text = ""
        self._is_finished = False

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add the next token.

        Args:
            token_id: The token.
            is_stop_token: Whether the scheduler ended the output with this token; its text then
                counts only with `include_stop_str_in_output`, and no stop string is looked for.

        Returns:
            The stop string that is now complete, which ends the output; else None.
        """
        assert not self._is_finished
        if self._detokenizer is None or (is_stop_token and not self._keeps_stop):
            return None
        window = self._tail + (new := self._detokenizer.push(token_id))
        is_early = self._num_left > 0
        self._num_left -= is_early
        if self._stop and not is_early and not is_stop_token:
            found = _first_complete(window, len(window) - len(new), self._stop)
            if found is not None:
                start, stop = found
                self._release(window, start + len(stop) if self._keeps_stop else start)
                self._is_finished = True
                return stop
        tail_len = _held_len(window, self._stop)
        self._release(window, len(window) if self._keeps_stop else len(window) - tail_len)
        self._tail = window[len(window) - tail_len :]
        self._num_released = tail_len if self._keeps_stop else 0
        return None

    def finish(self) -> str:
        """End the output, releasing what was held back, and return the whole text.

        A character whose last bytes never came is U+FFFD. After a stop string nothing is added.
        """
        if not self._is_finished and self._detokenizer is not None:
            window = self._tail + self._detokenizer.finish()
            self._release(window, len(window))
        self._is_finished = True
        return self.text

    def _release(self, window: str, end: int) -> None:
        if end > self._num_released:
            self.text += window[self._num_released : end]


def _first_complete(window: str, num_old: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return start and text of the stop string that is complete first, past `num_old` characters.

    Of those that end together it is the longest.
    """
    found = []
    for stop in stops:
        start = window.find(stop, max(0, num_old - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _held_len(window: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of `window` that begins a stop string, not all of it."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(window)), longest, -1):
            if window.endswith(stop[:length]):
                longest = length
                break
    return longest
