"""Schedules side by side: what runs, what is counted, the file, the figure, and refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from extkv.bench import schedule
from extkv.bench.plots import SYNTHETIC, plot_reliability, plot_schedule, require_matplotlib
from extkv.bench.reliability import ReliabilityBin
from extkv.bench.schedule import (
    SchedulePoint,
    ScheduleResult,
    ScheduleSettings,
    bench_schedule,
)
from extkv.bench.steady_load import SteadyLoad
from extkv.bench.verify_pin import VerifyPin
from extkv.errors import InvalidArgumentError, MissingPackageError
from support.drafted_engines import drafted_engine

RATES = (1.0, 1.0, 0.0, 0.0)
SETTINGS = ScheduleSettings(
    num_requests=(1, 3),
    fixed_lens=(1, 4),
    context_len=6,
    num_warmup_steps=2,
    num_steps=4,
    num_rounds=2,
    acceptance_rates=RATES,
)
SOURCE = {"model": "tiny", "device": "a test"}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def pin(request) -> VerifyPin:
    speculative = {
        "verification": "scheduled",
        "confidence": "acceptance",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(RATES),
    }
    # On CUDA the host works a step ahead.
    options = {"enable_prefix_caching": False, "async_scheduling": request.param}
    return VerifyPin(drafted_engine(speculative=speculative, **options))


@pytest.fixture(scope="module")
def result(pin) -> ScheduleResult:
    progress = []
    found = bench_schedule(pin, SETTINGS, SOURCE, on_progress=lambda *args: progress.append(args))
    assert progress[-1] == ("measuring schedules", 16, 16)
    return found


def test_each_schedule_verifies_what_it_says(result):
    assert result.schedules == ("no drafts", "fixed 1", "fixed 4", "scheduled")
    assert [point.num_requests for point in result.points] == [1] * 4 + [3] * 4
    per_step = {}
    for point in result.points:
        per_step.setdefault(point.schedule, []).append(point.tokens_per_step)
    # The first two drafts are always accepted, no other is.
    assert per_step["no drafts"] == [1.0, 1.0]
    assert per_step["fixed 1"] == [2.0, 2.0]
    assert per_step["fixed 4"] == [3.0, 3.0]
    assert all(1.0 <= count <= 3.0 for count in per_step["scheduled"])


def test_throughput_per_user_is_a_share_of_the_total(result):
    for point in result.points:
        shares = point.tokens_per_second_per_user * point.num_requests
        assert shares == pytest.approx(point.tokens_per_second)
        assert len(point.rounds) == 2


def test_the_engine_s_own_schedule_is_back_in_charge(pin, result):
    del result
    assert pin._schedule is not None
    assert not pin._schedule.is_pinned
    assert not pin.llm.engine.has_unfinished


def test_prompts_of_a_file_are_taken_in_turns(pin):
    settings = replace(SETTINGS, num_requests=(3,), fixed_lens=(), num_rounds=1)
    found = bench_schedule(pin, settings, SOURCE, prompts=[[5, 6], [7, 8, 9]])
    assert found.schedules == ("no drafts", "scheduled")
    for point in found.points:
        expected = point.tokens_per_step * point.num_requests / point.step_us * 1e6
        assert point.tokens_per_second == pytest.approx(expected)


def made(**rates: float) -> ScheduleResult:
    points = tuple(
        SchedulePoint(8, name.replace("_", " "), rate, 100.0, 2.0, (rate,))
        for name, rate in rates.items()
    )
    return ScheduleResult(points, SOURCE, (0.5,))


def test_the_schedule_is_compared_with_the_best_other():
    found = made(no_drafts=100.0, fixed_1=120.0, fixed_3=80.0, scheduled=118.8)
    assert found.over_best_other() == {8: pytest.approx(0.99)}
    assert "scheduled over best other 0.990" in found.table()
    assert "synthetic acceptance: not lossless" in found.table()
    assert made(no_drafts=1.0).over_best_other() == {}
    assert "not lossless" not in replace(found, acceptance_rates=None).table()


def test_a_file_brings_back_the_result(result, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(result.to_json())
    assert ScheduleResult.load(path) == result
    values = json.loads(path.read_text())
    assert values["is_synthetic"] is True
    assert values["points"][0]["tokens_per_second_per_user"] > 0


@pytest.mark.parametrize("text", [None, "[", "[]", '{"points": [{}]}', '{"points": []}'])
def test_files_that_hold_no_result_are_refused(tmp_path, text):
    path = tmp_path / "schedule.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="cannot read the schedules"):
        ScheduleResult.load(path)


def texts_of(monkeypatch) -> list[str]:
    """Collect the titles of figures."""
    from matplotlib.axes import Axes

    titles, real = [], Axes.set_title

    def set_title(self, label, **options):
        titles.append(label)
        return real(self, label, **options)

    monkeypatch.setattr(Axes, "set_title", set_title)
    return titles


def test_a_figure_says_that_acceptance_was_synthetic(result, tmp_path, monkeypatch):
    titles = texts_of(monkeypatch)
    path = tmp_path / "schedule.png"
    plot_schedule(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_schedule(replace(result, acceptance_rates=None), path)
    assert SYNTHETIC in titles[0]
    assert "1, 1, 0, 0" in titles[0]
    assert SYNTHETIC not in titles[1]


def test_a_reliability_diagram_names_positions_and_errors(tmp_path, monkeypatch):
    titles = texts_of(monkeypatch)
    before = [[ReliabilityBin(0.9, 0.5, 100)], [ReliabilityBin(0.4, 0.5, 10)]]
    after = [[ReliabilityBin(0.5, 0.5, 100)], []]
    path = tmp_path / "reliability.png"
    plot_reliability(before, after, path, title="a drafter")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert titles == [
        "before, draft 1\nECE 0.400",
        "before, draft 2\nECE 0.100",
        "after, draft 1\nECE 0.000",
        "after, draft 2\nECE 0.000",
    ]


def test_steps_go_on_for_the_least_seconds_while_there_is_room(pin):
    counts = []

    class CountingLoad(SteadyLoad):
        def step_us(self):
            counts[-1] += 1
            return super().step_us()

        def resize(self, num_requests):
            if num_requests:
                counts.append(0)
            super().resize(num_requests)

    settings = replace(SETTINGS, num_requests=(1,), num_rounds=1, fixed_lens=(4,))
    least = settings.num_warmup_steps + settings.num_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SteadyLoad", CountingLoad)
        found = bench_schedule(pin, replace(settings, min_seconds=0.5), SOURCE)
        assert min(counts) > least
        counts.clear()
        crowded = replace(settings, context_len=440, min_seconds=1e9)
        endless = bench_schedule(pin, crowded, SOURCE)
        # No request was ended for want of room, and none could have gone on.
        assert 512 - 440 - 3 * 5 <= counts[0] <= 512 - 440
    for result in (found, endless):
        assert [point.schedule for point in result.points] == ["no drafts", "fixed 4", "scheduled"]
        assert result.points[0].tokens_per_step == pytest.approx(1)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"run `pip install 'extkv\[plot\]'`"):
        require_matplotlib()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_requests": ()}, "num_requests is"),
        ({"fixed_lens": (0,)}, "fixed_lens is"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"context_len": 0}, "context_len is 0"),
        ({"min_seconds": -1.0}, "min_seconds is -1.0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidArgumentError, match=words):
        ScheduleSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fixed_lens": (5,)}, r"fixed_lens is \[5\], the drafter makes 4"),
        ({"num_requests": (5,)}, "5 requests .* it runs 4 at once"),
        ({"num_steps": 100}, "may come to 526 tokens, max_model_len is 512"),
    ],
    ids=str,
)
def test_loads_that_do_not_fit_the_engine_are_refused(pin, changes, words):
    with pytest.raises(InvalidArgumentError, match=words):
        bench_schedule(pin, replace(SETTINGS, **changes), SOURCE)


def test_an_engine_without_a_drafter_is_refused():
    from extkv.engine.llm import LLM
    from support.drafted_engines import loaded_target

    plain = VerifyPin(LLM(loaded_target(), device="cpu", max_num_seqs=2, max_num_batched_tokens=32))
    with pytest.raises(InvalidArgumentError, match="no drafter"):
        bench_schedule(plain, SETTINGS, SOURCE)
