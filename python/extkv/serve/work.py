"""The requests that a served engine works on: added, stepped, aborted, paused.

Knows the engine and no connection: every method that makes news returns it by client.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from extkv.errors import ExtkvError, SchedulerError, UnsupportedRequestError
from extkv.resolved_sampling import ModelLimits
from extkv.sampling_params import request_seed
from extkv.serve.outputs import ABORTED, FAILED, RequestNews, ServedSequence
from extkv.serve.sampling import fit_sampling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extkv import protocol
    from extkv.engine.core import EngineCore
    from extkv.engine.llm import LLM

    NewsByClient = dict[int, list[RequestNews]]

logger = logging.getLogger("extkv.serve")

# Fields of a request that change what must be computed, and that this engine does not know.
_UNSUPPORTED_FIELDS = (
    "mm_features",
    "pooling_params",
    "lora_request",
    "prompt_embeds",
    "resumable",
)


class EngineWork:
    """Hold what clients have asked an engine for.

    Args:
        llm: The engine.
        sends_events: Whether clients are told when requests were queued, scheduled and preempted.

    Attributes:
        engine: Its core.
        ended: News of requests that ended outside a step, by client; `take_ended` empties it.
        num_cache_resets: How often the prefix cache was forgotten.
    """

    def __init__(self, llm: LLM, *, sends_events: bool = True) -> None:
        self.engine: EngineCore = llm.engine
        self.ended: NewsByClient = {}
        self.num_cache_resets = 0
        self._sends_events = sends_events
        config = llm.config
        self._cached_block_size = config.block_size if config.enable_prefix_caching else None
        self._seed = llm.config.seed
        self._limits = ModelLimits(
            vocab_size=llm.model.config.vocab_size,
            max_model_len=llm.config.max_model_len,
            compile_grammar=llm.grammars.compile,
        )
        self._by_request: dict[str, ServedSequence] = {}
        self._by_sequence: dict[int, ServedSequence] = {}
        self._held: dict[str, tuple[int, protocol.EngineCoreRequest]] = {}
        self._is_held = False
        self._is_frozen = False
        self._clears_cache = False

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, those held back by a pause included."""
        return len(self._by_request) + len(self._held)

    @property
    def num_held(self) -> int:
        """Requests held back by a pause."""
        return len(self._held)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something."""
        return self.engine.has_unfinished and not self._is_frozen

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held back."""
        return self._is_held

    def add(self, client: int, request: protocol.EngineCoreRequest) -> None:
        """Take a request, or hold it back during a pause. What cannot work ends with an error."""
        if request.abort_immediately:
            return
        request_id = request.request_id
        if request_id in self._by_request or request_id in self._held:
            self._end(client, request_id, FAILED, "the request id is in use")
        elif self._is_held:
            self._held[request_id] = (client, request)
        else:
            self._start(client, request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop requests without a word: clients end their streams themselves."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            served = self._by_request.pop(request_id, None)
            if served is not None:
                del self._by_sequence[served.sequence.sequence_id]
                self.engine.abort(served.sequence)

    def abort_with_news(self, client: int | None = None) -> None:
        """Stop the requests of a client, or of all, and tell them."""
        mine = [
            (served.client, request_id)
            for request_id, served in self._by_request.items()
            if client in (None, served.client)
        ]
        mine += [
            (owner, request_id)
            for request_id, (owner, _) in self._held.items()
            if client in (None, owner)
        ]
        self.abort([request_id for _, request_id in mine])
        for owner, request_id in mine:
            self._end(owner, request_id, ABORTED, None)

    def abort_client(self, client: int) -> int:
        """Stop the requests of a client that is gone; return how many."""
        ids = [
            request_id for request_id, served in self._by_request.items() if served.client == client
        ]
        ids += [request_id for request_id, (owner, _) in self._held.items() if owner == client]
        self.abort(ids)
        return len(ids)

    def step(self) -> NewsByClient:
        """Run a step and return what it brought."""
        news: NewsByClient = {}
        for sequence in self.engine.step():
            served = self._by_sequence.get(sequence.sequence_id)
            if served is None:
                continue
            new = served.take_news()
            if new is not None:
                news.setdefault(served.client, []).append(new)
            if sequence.output.finish_reason is not None:
                del self._by_sequence[sequence.sequence_id]
                del self._by_request[served.request_id]
        if not self._by_request:
            self._clear_cache_if_asked()
        return news

    def take_ended(self) -> NewsByClient:
        """Return news of requests that ended outside a step."""
        ended, self.ended = self.ended, {}
        return ended

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Hold new requests back.

        Args:
            mode: What happens to those that run: ``"abort"`` ends them, ``"wait"`` lets them end,
                ``"keep"`` stops them where they are.
            clear_cache: Whether to forget cached prefixes when nothing runs any more.
        """
        if mode == "abort":
            self.abort_with_news()
        self._is_held = True
        self._is_frozen = mode == "keep"
        self._clears_cache = clear_cache
        if not self._by_request:
            self._clear_cache_if_asked()

    def resume(self) -> None:
        """Go on with everything that was held back."""
        self._is_held = self._is_frozen = self._clears_cache = False
        held, self._held = self._held, {}
        for client, request in held.values():
            self._start(client, request)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if requests hold blocks and may not be disturbed."""
        try:
            self.engine.scheduler.reset_prefix_cache()
        except SchedulerError:
            return False
        self.num_cache_resets += 1
        return True

    def _start(self, client: int, request: protocol.EngineCoreRequest) -> None:
        try:
            served = self._sequence_of(client, request)
        except ExtkvError as error:
            # Older wires have no field for it, so this is where an operator finds it.
            logger.warning("request %s was refused: %s", request.request_id, error)
            self._end(client, request.request_id, FAILED, str(error))
            return
        self._by_request[request.request_id] = served
        self._by_sequence[served.sequence.sequence_id] = served

    def _sequence_of(self, client: int, request: protocol.EngineCoreRequest) -> ServedSequence:
        unsupported = [name for name in _UNSUPPORTED_FIELDS if _is_set(getattr(request, name))]
        if unsupported:
            raise UnsupportedRequestError(f"{', '.join(unsupported)} not supported by extkv")
        token_ids, params = request.prompt_token_ids, request.sampling_params
        if token_ids is None or params is None:
            raise UnsupportedRequestError("a request without tokens or sampling parameters")
        prompt = token_ids.tolist()
        sampling = fit_sampling(
            params.changed_fields(),
            self._limits,
            num_prompt_tokens=min(len(prompt), self._limits.max_model_len),
        )
        seed = request_seed(sampling.params, engine_seed=self._seed, request_id=request.request_id)
        sequence = self.engine.add(
            prompt,
            sampling,
            seed=seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        return ServedSequence(
            request.request_id,
            client,
            sequence,
            cached_block_size=self._cached_block_size,
            sends_events=self._sends_events,
        )

    def _end(self, client: int, request_id: str, reason: int, error: str | None) -> None:
        news = RequestNews(request_id, finish_reason=reason, error=error)
        self.ended.setdefault(client, []).append(news)

    def _clear_cache_if_asked(self) -> None:
        if self._clears_cache:
            # If a request came first, its blocks are its own: later.
            self._clears_cache = not self.reset_prefix_cache()


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != []
