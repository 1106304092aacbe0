"""Timers of device work: sums that never wait for the device."""

from __future__ import annotations

import time

import pytest
import torch
from extkv.dspark.timing import SpanTimer
from extkv.dspark.verification import DraftCounts


def test_host_spans_add_up(monkeypatch):
    clock = iter([1.0, 1.5, 2.0, 4.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = SpanTimer(torch.device("cpu"))
    assert timer.total_s == 0
    for _ in range(2):
        with timer.span():
            pass
    assert timer.total_s == 2.75


class FakeEvent:
    """An event whose time is a number, and which passes when the test says so."""

    passed = 0.0
    made = 0

    def __init__(self) -> None:
        self.at = None
        type(self).made += 1

    def record(self, stream) -> None:
        stream.append(self)
        self.at = float(len(stream))

    def query(self) -> bool:
        return self.at <= FakeEvent.passed

    def elapsed_time(self, other) -> float:
        return 1000 * (other.at - self.at)


def test_device_spans_are_read_when_they_have_passed(monkeypatch):
    stream: list[FakeEvent] = []
    monkeypatch.setattr("extkv.dspark.timing._event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    timer = SpanTimer(torch.device("cuda", 0))
    with timer.span():
        stream.append("some work")
    with timer.span():
        pass
    assert timer.total_s == 0  # nothing has passed, and nobody waited
    FakeEvent.passed = 3.0
    assert timer.total_s == 2.0
    FakeEvent.passed = 9.0
    assert timer.total_s == 3.0
    with timer.span():
        pass
    assert timer.total_s == 4.0
    assert FakeEvent.made == 4  # pairs are used again


def test_counts_give_means_and_zero_before_the_first():
    counts = DraftCounts()
    assert counts.draft_ms == counts.verify_ms == 0
    counts = DraftCounts(num_draft_rounds=4, draft_s=0.002, num_verifications=2, verify_s=0.003)
    assert counts.draft_ms == pytest.approx(0.5)
    assert counts.verify_ms == pytest.approx(1.5)


@pytest.mark.gpu
def test_gpu_spans_measure_the_device():
    device = torch.device("cuda", 0)
    timer = SpanTimer(device)
    matrix = torch.randn(4096, 4096, device=device)
    with timer.span():
        for _ in range(20):
            matrix = matrix @ matrix * 1e-3
    torch.cuda.synchronize()
    assert timer.total_s > 1e-3
