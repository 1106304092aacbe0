"""What an engine tells a client about a request, and how it is made from a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.engine.core import Sequence as EngineSequence
    from extkv.outputs import LogprobEntry

ABORTED = 2
FAILED = 3
_FINISH_REASONS = {"stop": 0, "length": 1, "abort": ABORTED, "error": FAILED}
_QUEUED = 1
_EVENTS = {"scheduled": 2, "preempted": 3}


class LogprobArrays(NamedTuple):
    """Hold log-probabilities of some tokens as bytes in C order.

    Attributes:
        token_ids (int32, [num_tokens, num_columns]): The token itself, then the likeliest ones.
        logprobs (float32, [num_tokens, num_columns]): Theirs.
        ranks (int32, [num_tokens]): Rank of the token itself.
        num_columns: One more than what was asked for.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    num_columns: int


class PrefillCounts(NamedTuple):
    """Count a prompt's tokens when its first output is there.

    Attributes:
        num_prompt_tokens: All of them.
        num_cached_tokens: Those that the prefix cache saved.
        num_cache_creation_tokens: Those that were added to it: in full blocks, and computed.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_cache_creation_tokens: int


@dataclass(slots=True)
class RequestNews:
    """Hold what is new about one request.

    Attributes:
        request_id: The request.
        new_token_ids: New tokens.
        finish_reason: 0 stop, 1 length, 2 abort, 3 error; None while it goes on.
        stop_reason: The stop token that ended it.
        logprobs: Of the new tokens, if asked for.
        prompt_logprobs: Of all prompt tokens but the first, once.
        events: Kind (1 queued, 2 scheduled, 3 preempted) and time of what happened, once each.
        prefill: What became of the prompt's tokens, once.
        error: Why it failed.
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobArrays | None = None
    prompt_logprobs: LogprobArrays | None = None
    events: list[tuple[int, float]] | None = None
    prefill: PrefillCounts | None = None
    error: str | None = None


@dataclass
class ServedSequence:
    """Hold a request that the engine works on.

    Attributes:
        request_id: Its id.
        client: Who waits for it.
        sequence: Its sequence in the engine.
        cached_block_size: Tokens that the prefix cache keeps together; None without one.
        sends_events: Whether the client is told when it was queued, scheduled and preempted.
        num_sent: Tokens that were sent.
        num_events_sent: Events that were sent, without the first, which says that it was queued.
    """

    request_id: str
    client: int
    sequence: EngineSequence
    cached_block_size: int | None = None
    sends_events: bool = True
    num_sent: int = 0
    num_events_sent: int | None = None

    def take_news(self) -> RequestNews | None:
        """Return what was not sent yet; None if there is nothing."""
        sequence = self.sequence
        output = sequence.output
        start, end = self.num_sent, len(sequence.token_ids)
        if start == end and output.finish_reason is None:
            return None
        self.num_sent = end
        params = sequence.sampling.params
        news = RequestNews(self.request_id, list(sequence.token_ids[start:end]))
        if output.finish_reason is not None:
            news.finish_reason = _FINISH_REASONS[output.finish_reason]
            news.stop_reason = output.stop_reason
            news.error = sequence.error
        if params.logprobs is not None and output.logprobs is not None and start < end:
            entries = output.logprobs[start:end]
            news.logprobs = pack_logprobs(entries, params.logprobs)
        if self.sends_events:
            news.events = self._take_events()
        if start == 0:
            self._add_prefill(news)
        return news

    def _take_events(self) -> list[tuple[int, float]] | None:
        metrics = self.sequence.metrics
        if self.num_events_sent == len(metrics.events):
            return None
        found = [(_EVENTS[kind], now_s) for kind, now_s in metrics.events[self.num_events_sent :]]
        if self.num_events_sent is None:
            found.insert(0, (_QUEUED, metrics.arrival_s))
        self.num_events_sent = len(metrics.events)
        return found

    def _add_prefill(self, news: RequestNews) -> None:
        sequence = self.sequence
        num_prompt_tokens = len(sequence.prompt_token_ids)
        num_kept = 0
        if self.cached_block_size is not None:
            num_kept = num_prompt_tokens - num_prompt_tokens % self.cached_block_size
        news.prefill = PrefillCounts(
            num_prompt_tokens,
            sequence.num_cached_tokens,
            max(0, num_kept - sequence.num_cached_tokens),
        )
        num_logprobs = sequence.sampling.params.prompt_logprobs
        if num_logprobs is not None and sequence.prompt_logprobs is not None:
            entries = [entry for entry in sequence.prompt_logprobs if entry is not None]
            news.prompt_logprobs = pack_logprobs(entries, num_logprobs)


def pack_logprobs(entries: Sequence[LogprobEntry], num_logprobs: int) -> LogprobArrays:
    """Return entries as arrays.

    An entry has the token itself first; if that is one of the likeliest it stands there once, and
    is put back at its rank.

    Args:
        entries: One per token.
        num_logprobs: Number of likeliest tokens in each.
    """
    token_ids = np.empty((len(entries), num_logprobs + 1), np.int32)
    logprobs = np.empty((len(entries), num_logprobs + 1), np.float32)
    ranks = np.empty(len(entries), np.int32)
    for row, entry in enumerate(entries):
        items = list(entry.items())
        own = items[0]
        likeliest = items[1:]
        if len(likeliest) < num_logprobs:
            likeliest.insert(min(own[1].rank - 1, len(likeliest)), own)
        line = [own, *likeliest[:num_logprobs]]
        token_ids[row] = [token_id for token_id, _ in line]
        logprobs[row] = [logprob.logprob for _, logprob in line]
        ranks[row] = own[1].rank
    return LogprobArrays(token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes(), num_logprobs + 1)
