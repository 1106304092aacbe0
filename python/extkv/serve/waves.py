"""Data-parallel waves as one engine sees them.

Engines of a mixture-of-experts model run and pause together; each pause raises the wave's number.
An engine of a dense model works alone, so it runs when it has requests. It follows the numbers,
because front ends and coordinators send and compare them.
"""

from __future__ import annotations


class WaveState:
    """Hold the number of the wave and whether engines are said to run.

    Attributes:
        wave: Number of the wave.
        is_running: Whether the coordinator believes that engines run.
    """

    def __init__(self) -> None:
        self.wave = 0
        self.is_running = False

    def start(self, wave: int, *, is_excluded: bool) -> None:
        """Take the coordinator's word that a wave starts; an older one means nothing."""
        if wave < self.wave:
            return
        self.wave = wave
        if not is_excluded:
            self.is_running = True

    def take_request(self, wave: int) -> int | None:
        """Take a request of the wave that its client knew.

        Returns:
            The wave that the coordinator must start, because the request is of one that is over;
            else None.
        """
        must_start = wave < self.wave and not self.is_running
        self.wave = max(self.wave, wave)
        self.is_running = True
        return self.wave if must_start else None

    def finish(self) -> int:
        """End the wave and return its number."""
        ended = self.wave
        self.wave += 1
        self.is_running = False
        return ended
