"""A data-parallel coordinator in pyzmq and msgspec, written from the protocol, not from our code.

It keeps the rules of vLLM's: statistics in, loads out, and, for engines that work in lockstep
only, waves. What came is kept for a test to look at.
"""

from __future__ import annotations

import threading
from typing import Any

import zmq
from support.zmq_peers import START_DP_WAVE, Peer, pack, unpack

POLL_MS = 10


class CoordinatorPeer(Peer):
    """Runs in a thread of its own until it is closed.

    Args:
        num_engines: Engines that must subscribe before they are told READY.
        has_waves: Whether it starts waves, as for mixture-of-experts models.
    """

    def __init__(self, num_engines: int, *, has_waves: bool) -> None:
        super().__init__()
        self.num_engines = num_engines
        self.has_waves = has_waves
        self.counts = [[0, 0, 0.0] for _ in range(num_engines)]
        self.all_counts: list[tuple[int, int, int]] = []
        self.wave = 0
        self.is_running = False
        self.wave_messages: list[list[Any]] = []
        self.num_started_waves = 0
        self.out_of_order: list[tuple[int, int, int]] = []
        self._last_step = (-1, -1)
        self._to_front_ends, to_front_ends = self.bound(zmq.XPUB, XPUB_VERBOSE=1)
        self._from_engines, from_engines = self.bound(zmq.PULL)
        self._to_engines, to_engines = self.bound(zmq.XPUB, XPUB_VERBOSE=1)
        self.addresses = (to_engines, from_engines, to_front_ends)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close everything."""
        self._is_stopped = True
        self._thread.join()
        super().close()

    def _run(self) -> None:
        num_subscribed, has_changed = 0, False
        poller = zmq.Poller()
        for socket in (self._to_front_ends, self._from_engines, self._to_engines):
            poller.register(socket, zmq.POLLIN)
        while not self._is_stopped:
            ready = dict(poller.poll(POLL_MS))
            if self._to_engines in ready:
                # An engine that ends says 0.
                is_new = self._to_engines.recv() == b"\x01"
                num_subscribed += is_new
                if is_new and num_subscribed >= self.num_engines:
                    self._to_engines.send(b"READY")
            if self._to_front_ends in ready:
                self._hear_front_end(self._to_front_ends.recv())
            if self._from_engines in ready:
                has_changed |= self._hear_engine(unpack(self._from_engines.recv()))
            if not ready and has_changed:
                has_changed = False
                self._publish(self.counts)

    def _publish(self, counts: Any) -> None:
        self._to_front_ends.send(pack([counts, self.wave, self.is_running]))

    def _hear_front_end(self, message: bytes) -> None:
        if message in (b"\x00", b"\x01"):
            return
        excluded, wave = unpack(message)
        if self.has_waves and not self.is_running:
            excluded = None if wave < self.wave else excluded
            self.num_started_waves += 1
            self._to_engines.send_multipart([START_DP_WAVE, pack([self.wave, excluded])])

    def _hear_engine(self, batch: list[Any]) -> bool:
        """Take a message of an engine; return whether the loads changed."""
        engine, outputs, stats, _, utility, _, complete, start, *_ = batch
        assert outputs == []
        assert utility is None
        if complete is not None or start is not None:
            self.wave_messages.append(batch)
            self._hear_wave(engine, complete, start)
        if stats is None:
            return False
        self._check_step(engine, (stats["current_wave"], stats["step_counter"]))
        waiting, running = stats["num_waiting_reqs"], stats["num_running_reqs"]
        self.counts[engine] = [waiting, running, stats["kv_cache_usage"]]
        self.all_counts.append((engine, waiting, running))
        return True

    def _hear_wave(self, engine: int, complete: int | None, start: int | None) -> None:
        if not self.has_waves:
            return
        if complete is not None and self.wave <= complete:
            self.wave, self.is_running = complete + 1, False
            self._publish(None)
        elif start is not None and (
            start > self.wave or (start == self.wave and not self.is_running)
        ):
            self.wave, self.is_running = start, True
            self._to_engines.send_multipart([START_DP_WAVE, pack([start, engine])])
            self._publish(None)

    def _check_step(self, engine: int, step: tuple[int, int]) -> None:
        """Steps of engines in lockstep never go back; vLLM's coordinator warns if they do."""
        if not self.has_waves:
            return
        if step < self._last_step:
            self.out_of_order.append((engine, *step))
        self._last_step = max(self._last_step, step)
