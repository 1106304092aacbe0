"""How often the passes of a cost table are timed on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from extkv.dspark import step_profile


class Passes:
    """A clock that only passes move, by the times they are given; the last one stays."""

    def __init__(self, *times_us: float) -> None:
        self.times_us, self.now_us, self.count = times_us, 0.0, 0

    def run(self) -> None:
        self.now_us += self.times_us[min(self.count, len(self.times_us) - 1)]
        self.count += 1


def least_us(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> float:
    clock = SimpleNamespace(perf_counter=lambda: passes.now_us / 1e6)
    monkeypatch.setattr(step_profile, "time", clock)
    return step_profile._least_us(passes.run, torch.device("cpu"), 5)


@pytest.mark.parametrize(
    ("pass_us", "count"),
    [(3_000, 8), (10_000, 6), (39_000, 6), (60_000, 4), (150_000, 2), (700_000, 2)],
)
def test_long_passes_run_less_often(monkeypatch, pass_us, count):
    passes = Passes(pass_us)
    assert least_us(monkeypatch, passes) == pytest.approx(pass_us)
    assert passes.count == count


def test_the_first_of_many_does_not_count(monkeypatch):
    assert least_us(monkeypatch, Passes(7_000, 12_000, 11_000, 13_000)) == pytest.approx(11_000)


def test_the_first_of_few_counts(monkeypatch):
    assert least_us(monkeypatch, Passes(300_000, 350_000)) == pytest.approx(300_000)
