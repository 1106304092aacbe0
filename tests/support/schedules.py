"""Schedules that no cost decides: random lengths, random pauses."""

from __future__ import annotations

import numpy as np
from extkv.dspark.plans import Decision, DecisionReason
from extkv.dspark.schedule import Judgement


class RandomSchedule:
    """Drafts in most rounds, and verifies a random number of drafts of each request.

    Lengths depend on the seed, the round and the place in the batch, never on a draft.
    """

    waits = False

    def __init__(self, num_drafts: int, seed: int = 0, skip: float = 0.3) -> None:
        self.num_drafts, self.skip = num_drafts, skip
        self.random = np.random.default_rng(seed)
        self.lens_seen: list[int] = []
        self.num_skipped = self.num_resumed = 0
        self._newest = self._running = Decision(False, None, None, DecisionReason.STATIC, None)
        self._lens = np.zeros(0, np.int32)

    def decide(self, draft_round):
        drafts = bool(self.random.random() >= self.skip)
        self.num_skipped += not drafts
        self.num_resumed += drafts and not self._newest.drafts
        self._newest = Decision(drafts, None, None, DecisionReason.STATIC, None)
        lens = self.random.integers(0, self.num_drafts + 1, len(draft_round.slots))
        self._lens = np.minimum(lens, draft_round.limits).astype(np.int32) * drafts
        return self._newest

    def lens(self, is_alive, signals):
        del signals
        lens = np.where(is_alive, self._lens, 0).astype(np.int32)
        self.lens_seen += lens.tolist()
        return lens

    def start(self):
        self._running = self._newest

    def observe(self, num_verified, num_accepted, measured_us):
        del measured_us
        assert (num_accepted <= num_verified).all()
        return Judgement(self._running)

    def reset(self):
        pass
