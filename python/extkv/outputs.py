"""What a request gives back: vLLM's field names and meanings, with timings.

Objects are plain and hold no tensor. A streamed request gives one per step, with everything so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FinishReason = Literal["stop", "length", "abort", "error"]
SchedulingEvent = Literal["scheduled", "preempted"]


@dataclass(frozen=True)
class Logprob:
    """Say how likely a token was, before penalties, masks and temperature.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 plus the number of tokens that were likelier; equal ones share a rank.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# The token that was chosen first, then the likeliest ones.
LogprobEntry = dict[int, Logprob]


@dataclass(frozen=True)
class RowLogprobs:
    """Hold the numbers behind one `LogprobEntry`.

    Attributes:
        token_id: The token that was chosen.
        logprob: Its logarithm of probability.
        rank: Its rank.
        top_token_ids: The likeliest tokens, the likeliest first.
        top_logprobs: Theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]

    def to_entry(self, decode: Callable[[int], str] | None = None) -> LogprobEntry:
        """Return the entry, with texts where `decode` is given."""
        entry: LogprobEntry = {}

        def add(token_id: int, logprob: float, rank: int) -> None:
            text = None if decode is None else decode(token_id)
            entry.setdefault(token_id, Logprob(logprob, rank, text))

        add(self.token_id, self.logprob, self.rank)
        rank, last = 0, None
        for place, token_id in enumerate(self.top_token_ids):
            logprob = self.top_logprobs[place]
            rank = rank if logprob == last else place + 1
            last = logprob
            add(token_id, logprob, rank)
        return entry


@dataclass
class CompletionOutput:
    """Hold one output of a request.

    Attributes:
        index: Which of the `n` outputs.
        text: Its text so far, whole characters only.
        token_ids: Its tokens so far, with the one that ended it.
        cumulative_logprob: Sum of the tokens' log-probabilities, if `logprobs` was asked for.
        logprobs: One entry per token, if asked for.
        finish_reason: Why it ended: a stop token or string, a length limit, an abort, or because no
            token could be chosen; None while it goes on.
        stop_reason: The stop token or stop string; None for end-of-sequence and other reasons.
        error: Why no token could be chosen; None if it did not end so.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    cumulative_logprob: float | None = None
    logprobs: list[LogprobEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Return whether this output has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Hold when a request passed its stations, in seconds of `time.monotonic`.

    Attributes:
        arrival_s: It was handed to the engine.
        first_scheduled_s: Its first step began.
        first_token_s: Its first token was there.
        last_token_s: Its latest token was there.
        events: Each time that it was scheduled to run, and preempted, in order.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    events: list[tuple[SchedulingEvent, float]] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step; None before."""
        return _difference(self.arrival_s, self.first_scheduled_s)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first step to the first token; None before."""
        return _difference(self.first_scheduled_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the latest one; None before."""
        return _difference(self.first_token_s, self.last_token_s)

    @property
    def num_preemptions(self) -> int:
        """How often it lost its blocks to others and had to be computed again."""
        return sum(kind == "preempted" for kind, _ in self.events)

    def note_scheduled(self, now_s: float) -> None:
        """Note that it got blocks and a place in the batch."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
        self.events.append(("scheduled", now_s))

    def note_preempted(self, now_s: float) -> None:
        """Note that it lost them."""
        self.events.append(("preempted", now_s))

    def add_token(self, now_s: float) -> None:
        """Note that a token came."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s


@dataclass
class RequestOutput:
    """Hold what a request has given so far.

    Attributes:
        request_id: Its id.
        prompt: Its prompt as text; None if it was given as tokens.
        prompt_token_ids: Its prompt.
        prompt_logprobs: One entry per prompt token, None for the first, if asked for.
        outputs: Its `n` outputs.
        finished: Whether all of them have ended.
        num_cached_tokens: Prompt tokens that the prefix cache saved.
        metrics: When it passed its stations; of the first output where there are several.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[LogprobEntry | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None


def _difference(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
