"""The loop of a served engine: take what clients want, step, send what is new."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from extkv.errors import ExtkvError, NotConnectedError, StalledPeerError
from extkv.serve.outputs import ABORTED, RequestNews
from extkv.serve.stats import Load, LoadStats
from extkv.serve.utilities import UtilityMethods
from extkv.serve.work import EngineWork
from extkv.transport.engine import (
    AbortArrived,
    CallArrived,
    ClientLost,
    CoordinatorLost,
    EngineConnection,
    EngineInput,
    FramesRejected,
    RequestArrived,
    WaveStarted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.engine.llm import LLM

logger = logging.getLogger("extkv.serve")

# Longest sleep of an idle loop, after which signals are looked at.
IDLE_S = 0.2
STATS_EVERY_S = 0.05


class EngineService:
    """Work for the clients of a connection until `stop` is called or the last of them is gone.

    Engines of a dense model work alone, so there are no waves here: a front end's coordinator is
    told of load only, and what it says of waves means nothing. See docs/protocol.md.

    Args:
        llm: A started engine; nobody else may step it meanwhile.
        connection: A connection that was started.
        log_stats: Whether clients get statistics and the events of their requests, for metrics.
    """

    def __init__(self, llm: LLM, connection: EngineConnection, *, log_stats: bool = True) -> None:
        self._connection = connection
        self._work = EngineWork(llm, sends_events=log_stats)
        self._utilities = UtilityMethods(self._work)
        drafting = llm.engine.drafting
        self._stats = LoadStats(
            llm.engine.scheduler,
            None if drafting is None else drafting.counts,
            0 if drafting is None else drafting.num_drafts,
        )
        self._load = Load(0, 0)
        self._log_stats = log_stats
        self._live_clients = set(range(connection.num_clients))
        self._next_stats_s: dict[int, float] = {}
        self._told_load: dict[int, Load] = {}
        self._told_coordinator = Load(0, 0)
        self._is_stopping = False

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self._work.num_requests

    def stop(self) -> None:
        """End the loop soon: abort what runs and refuse the rest. Safe in a signal handler."""
        self._is_stopping = True
        self._connection.refuse_work()
        self._connection.wake()

    def run(self) -> None:
        """Work until the end.

        Raises:
            NotConnectedError: If every client is gone.
            Exception: What a step raises; clients are told that the engine is dead.
        """
        try:
            while not self._is_stopping:
                self._turn()
            self._work.abort_with_news()
            self._send(self._work.take_ended(), is_over_limit=True)
        except NotConnectedError:
            raise
        except BaseException:
            self._connection.send_dead()
            raise
        finally:
            self._connection.close()

    def _turn(self) -> None:
        """Take what came, run one step, send what is new."""
        idle_s = 0.0 if self._work.can_step else IDLE_S
        for received in self._connection.receive(idle_s):
            self._handle(received)
        self._send(self._work.take_ended(), is_over_limit=True)
        if not self._live_clients:
            raise NotConnectedError("every client is gone")
        if self._connection.has_coordinator:
            # Before the step too: it may take long, and load is shared out meanwhile.
            self._look()
            self._tell_coordinator()
        news = self._work.step() if self._work.can_step else {}
        self._look()
        self._send(news)
        self._tell_load()

    def _look(self) -> None:
        self._load = self._stats.look(self._work.num_held)

    def _handle(self, received: EngineInput) -> None:
        match received:
            case RequestArrived(client, request):
                self._work.add(client, request)
            case AbortArrived(request_ids):
                self._work.abort(request_ids)
            case CallArrived():
                self._answer(received)
            case WaveStarted(wave):
                logger.debug("wave %d means nothing to the engine of a dense model", wave)
            case ClientLost(client, reason):
                self._lose(client, reason)
            case CoordinatorLost(reason):
                logger.warning("the coordinator is gone: %s", reason)
            case FramesRejected(source, reason):
                logger.warning("frames of %s were dropped: %s", source, reason)

    def _answer(self, call: CallArrived) -> None:
        try:
            value = self._utilities.call(call.method, call.args)
        except ExtkvError as error:
            logger.info("call to %s failed: %s", call.method, error)
            failure = self._utilities.failure_text(call.method, error)
            self._reply(call, None, failure)
        else:
            self._reply(call, value, None)

    def _reply(self, call: CallArrived, value: object, failure: str | None) -> None:
        try:
            self._connection.answer(call.client, call.call_id, value, failure=failure)
        except NotConnectedError as error:
            self._lose(call.client, str(error))

    def _send(self, news: dict[int, list[RequestNews]], *, is_over_limit: bool = False) -> None:
        for client, batch in news.items():
            if client not in self._live_clients:
                continue
            try:
                self._send_batch(client, batch, is_over_limit=is_over_limit)
            except StalledPeerError as error:
                self._give_up(client, batch, error)
            except NotConnectedError as error:
                self._lose(client, str(error))

    def _send_batch(
        self, client: int, batch: Sequence[RequestNews], *, is_over_limit: bool
    ) -> None:
        now_s = time.monotonic()
        finished = [new.request_id for new in batch if new.finish_reason is not None]
        self._connection.send_outputs(
            client,
            batch,
            timestamp=now_s,
            scheduler_stats=self._stats_for(client, now_s),
            finished_requests=finished or None,
            is_over_limit=is_over_limit,
        )

    def _stats_for(self, client: int, now_s: float) -> dict[str, object] | None:
        """Return statistics, unless the client was told a moment ago or wants none."""
        if not self._log_stats or now_s < self._next_stats_s.get(client, 0.0):
            return None
        self._next_stats_s[client] = now_s + STATS_EVERY_S
        self._told_load[client] = self._load
        return self._stats.take(self._load, num_resets=self._work.num_cache_resets)

    def _give_up(self, client: int, batch: Sequence[RequestNews], error: StalledPeerError) -> None:
        """End the requests of a client that does not read; it learns of it when it reads again."""
        logger.warning("%s; its requests are aborted", error)
        self._work.abort_with_news(client)
        ended = self._work.take_ended()
        told = {new.request_id for new in ended.get(client, [])}
        # Those that ended in the step whose news cannot be sent.
        lost = [new.request_id for new in batch if new.request_id not in told]
        ended.setdefault(client, []).extend(
            RequestNews(request_id, finish_reason=ABORTED) for request_id in lost
        )
        self._send(ended, is_over_limit=True)

    def _lose(self, client: int, reason: str) -> None:
        if client in self._live_clients:
            self._live_clients.discard(client)
            num_aborted = self._work.abort_client(client)
            logger.warning(
                "client %d is gone: %s; %d requests aborted", client, reason, num_aborted
            )

    def _tell_load(self) -> None:
        """Tell clients and the coordinator of a changed load that no output has told."""
        if self._log_stats:
            now_s = time.monotonic()
            for client in sorted(self._live_clients):
                is_due = now_s >= self._next_stats_s.get(client, 0.0)
                if is_due and self._told_load.get(client, Load(0, 0)) != self._load:
                    self._send({client: []})
        if self._connection.has_coordinator:
            self._tell_coordinator()

    def _tell_coordinator(self) -> None:
        if self._load == self._told_coordinator:
            return
        self._told_coordinator = self._load
        try:
            self._connection.send_to_coordinator(
                timestamp=time.monotonic(), scheduler_stats=self._stats.counts(self._load)
            )
        except (NotConnectedError, StalledPeerError) as error:
            logger.warning("the coordinator was not told: %s", error)
