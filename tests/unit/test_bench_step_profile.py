"""Step cost profiles: shapes as asked for, tables that add up, and what is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from extkv.bench.steady_load import SteadyLoad
from extkv.bench.step_profile import ProfileSettings, profile_steps
from extkv.bench.step_table import MeasuredSteps, fit_plain_steps
from extkv.bench.verify_pin import VerifyPin
from extkv.dspark.cost import CostTable, QualityLimits, StepCost, StepSample
from extkv.engine.llm import LLM
from extkv.errors import CostTableError, InvalidArgumentError
from support.drafted_engines import loaded_target, pinned_engine

SHAPES = ProfileSettings(
    num_requests=(1, 2, 4),
    verify_lens=(0, 1, 3),
    context_lens=(5, 40),
    num_warmup_steps=1,
    num_steps=3,
)
SOURCE = {"device": "a test"}


@pytest.fixture(scope="module")
def pin() -> VerifyPin:
    return pinned_engine()


@pytest.fixture(scope="module")
def plain_pin() -> VerifyPin:
    return VerifyPin(LLM(loaded_target(), device="cpu", max_num_seqs=4, max_num_batched_tokens=64))


def fake_times(monkeypatch, step_us, spread: float = 0.01) -> list[tuple[int, int | None]]:
    """Steps take what a formula says, and are not run; return the shapes that were asked for."""
    seen = []

    def timed(pin: VerifyPin, load: SteadyLoad, num_steps: int) -> list[float]:
        verify_len = None
        if pin._schedule is not None:
            verify_len = pin._schedule.pinned.verify_len
        seen.append((load.num_requests, verify_len))
        us = step_us(load.num_requests, verify_len, load.num_context_tokens)
        return [us * (1 + spread * shift) for shift in np.linspace(-1, 1, num_steps)]

    monkeypatch.setattr(VerifyPin, "timed_steps", timed)
    return seen


def additive(requests: int, verify_len: int | None, context: int) -> float:
    tokens = requests * (1 + (verify_len or 0))
    draft_us = 0.0 if verify_len is None else 300.0 + 10.0 * requests + 0.02 * context
    return 1000.0 + 20.0 * requests + 30.0 * tokens + 0.1 * context + draft_us


def test_a_profile_finds_the_costs_of_which_steps_are_made(pin, monkeypatch):
    seen = fake_times(monkeypatch, additive)
    progress = []
    found = profile_steps(pin, SHAPES, SOURCE, lambda *args: progress.append(args))
    assert found.worst_residual_ratio < 0.01
    cost = StepCost(found.table)
    for requests, verify_len, context in ((1, None, 50), (2, 3, 500), (3, 2, 300), (4, 0, 800)):
        us = cost.step_us(
            num_requests=requests,
            num_drafts=requests * (verify_len or 0),
            drafts=verify_len is not None,
            num_context_tokens=context,
        )
        assert us == pytest.approx(additive(requests, verify_len, context), rel=0.02)
    shapes = [(r, v) for _ in (5, 40) for r in (4, 2, 1) for v in (None, 0, 1, 3)]
    assert seen[::2] == seen[1::2] == shapes  # warm-up, then what counts
    assert [sample.drafts for sample in found.samples[:4]] == [False, True, True, True]
    assert [sample.num_tokens for sample in found.samples[:4]] == [4, 4, 8, 16]
    assert progress[-1] == ("measuring steps", 24, 24)
    assert pin.llm.engine.scheduler.stats().num_running == 0


def test_the_file_is_a_table_with_its_source_and_its_steps(pin, monkeypatch, tmp_path):
    fake_times(monkeypatch, additive)
    found = profile_steps(pin, SHAPES, SOURCE)
    path = tmp_path / "cost.json"
    found.save(path)
    values = json.loads(path.read_text())
    assert values["format"] == "extkv.step_cost.v1"
    assert values["source"] == SOURCE
    assert len(values["samples"]) == 24
    assert CostTable.load(path) == found.table
    load = {"num_requests": 3, "num_drafts": 6, "drafts": True, "num_context_tokens": 99}
    assert StepCost.load(path).step_us(**load) == StepCost(found.table).step_us(**load)
    assert "off by" in found.describe()
    assert len(found.describe().splitlines()) == 1 + 24 + 1


def test_steps_come_back_from_their_file_and_make_the_same_table(pin, monkeypatch, tmp_path):
    fake_times(monkeypatch, additive)
    path = tmp_path / "steps.json"
    kept = []
    found = profile_steps(pin, SHAPES, SOURCE, on_steps=kept.append)
    kept[0].save(path)
    assert MeasuredSteps.load(path) == kept[0]
    again = MeasuredSteps.load(path).profile(SHAPES.limits, fit_commit="abc")
    assert again.table.source == {**SOURCE, "fit_commit": "abc"}
    assert again.table.token_us == found.table.token_us
    assert again.samples == found.samples


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"samples": 3, "tiers": [], "source": {}}', '{"samples": [{"x": 1}]}'],
)
def test_a_file_without_steps_is_refused(tmp_path, text: str):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match="cannot read measured steps"):
        MeasuredSteps.load(path)
    with pytest.raises(CostTableError, match="cannot read measured steps"):
        MeasuredSteps.load(tmp_path / "none.json")


def test_windows_of_several_rows_read_their_context_slower(pin, monkeypatch):
    def with_windows(requests: int, verify_len: int | None, context: int) -> float:
        return additive(requests, verify_len, context) + 0.4 * context * bool(verify_len)

    fake_times(monkeypatch, with_windows)
    found = profile_steps(pin, SHAPES, SOURCE)
    assert found.worst_residual_ratio < 0.01
    at, us = found.table.window_context_us[-1]
    assert us / at == pytest.approx(0.4, rel=0.1)


def test_steps_that_spread_are_measured_again_and_then_refused(pin, monkeypatch):
    seen = fake_times(monkeypatch, additive, spread=0.5)
    with pytest.raises(CostTableError, match="spread"):
        profile_steps(pin, SHAPES, SOURCE)
    assert seen[:8] == [(4, None)] * 8  # four trials of warm-up and measurement


def test_the_quietest_trial_counts(pin, monkeypatch):
    fake_times(monkeypatch, additive)
    quiet, count = VerifyPin.timed_steps, iter(range(10_000))

    def sometimes_loud(pin, load, num_steps):
        times = quiet(pin, load, num_steps)
        return [us * (1 + n) for n, us in enumerate(times)] if next(count) % 4 == 1 else times

    monkeypatch.setattr(VerifyPin, "timed_steps", sometimes_loud)
    assert profile_steps(pin, SHAPES, SOURCE).worst_residual_ratio < 0.01


def test_b52_a_flat_table_is_refused(pin, monkeypatch):
    fake_times(monkeypatch, lambda _r, verify_len, _c: 1000.0 + 50.0 * (verify_len is not None))
    kept = []
    with pytest.raises(CostTableError, match="flat"):
        profile_steps(pin, SHAPES, SOURCE, on_steps=kept.append)
    assert len(kept[0].samples) == 24  # what was measured is not lost with it


def test_steps_that_get_faster_with_more_tokens_are_refused(pin, monkeypatch):
    def falling(requests: int, verify_len: int | None, context: int) -> float:
        saved_us = 150.0 * requests * (verify_len or 0)
        return 3000.0 + additive(requests, verify_len, context) - saved_us

    fake_times(monkeypatch, falling)
    with pytest.raises(CostTableError, match="monotone"):
        profile_steps(pin, SHAPES, SOURCE)


def test_steps_that_do_not_add_up_are_refused(pin, monkeypatch):
    def interacting(requests: int, verify_len: int | None, context: int) -> float:
        return additive(requests, verify_len, context) * (
            1 + 0.5 * (requests == 2) * (verify_len == 1)
        )

    fake_times(monkeypatch, interacting)
    with pytest.raises(CostTableError, match=r"off by more|too noisy"):
        profile_steps(pin, SHAPES, SOURCE)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_real_steps_make_a_table_where_noise_is_allowed(is_async):
    pin = pinned_engine(async_scheduling=is_async)
    limits = QualityLimits(-1e9, 1e9, 1e9, 1e9)
    shapes = ProfileSettings((1, 2), (0, 1, 3), (5,), 1, 3, limits)
    found = profile_steps(pin, shapes, SOURCE)
    assert [(s.num_requests, s.num_tokens, s.drafts) for s in found.samples] == [
        (2, 2, False),
        (2, 2, True),
        (2, 4, True),
        (2, 8, True),
        (1, 1, False),
        (1, 1, True),
        (1, 2, True),
        (1, 4, True),
    ]
    assert all(sample.step_us > 0 for sample in found.samples)
    # Acceptance is pinned: each step brings one token to each request.
    contexts = [sample.num_context_tokens for sample in found.samples[:3]]
    assert all(later > earlier for earlier, later in itertools.pairwise(contexts))
    assert pin.llm.draft_counts.accepted_length == 1.0


def test_without_a_drafter_steps_are_plain(plain_pin, monkeypatch):
    fake_times(monkeypatch, lambda requests, _v, context: 900.0 + 50.0 * requests + 0.1 * context)
    shapes = ProfileSettings((1, 2, 4), (), (5, 40), 1, 3)
    found = profile_steps(plain_pin, shapes, SOURCE)
    assert found.table.draft_us == ()
    us = StepCost(found.table).step_us(num_requests=3, num_context_tokens=1000)
    assert us == pytest.approx(1150.0, rel=0.01)


def test_loads_that_the_cache_cannot_hold_are_left_out_and_named(pin, monkeypatch):
    fake_times(monkeypatch, additive)
    monkeypatch.setattr(VerifyPin, "fits", lambda _self, requests, _tokens: requests < 4)
    found = profile_steps(pin, SHAPES, SOURCE)
    assert [requests for requests, _ in found.skipped] == [4, 4]
    assert {sample.num_requests for sample in found.samples} == {1, 2}
    assert "left out: 4 requests" in found.describe()


def sample(requests: int, us: float, spread: float = 0.0, context: int = 0) -> StepSample:
    return StepSample(requests, requests, False, us, spread, context)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no step was measured"),
        ([sample(1, 100.0, spread=30.0)], "spread by 30%"),
        ([sample(1, 100.0), sample(2, 100.5)], "flat"),
        ([sample(1, 100.0), sample(2, 50.0), sample(4, 200.0)], "monotone"),
        ([sample(1, 100.0), sample(1, 200.0), sample(4, 900.0)], "from the table"),
    ],
    ids=["none", "noisy", "flat", "falling", "contradiction"],
)
def test_plain_steps_that_make_no_table_are_refused(samples, words):
    with pytest.raises(CostTableError, match=words):
        fit_plain_steps(samples, (), QualityLimits())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_requests": ()}, "num_requests is"),
        ({"num_requests": (0, 1)}, "num_requests is"),
        ({"context_lens": (0,)}, "context_lens is"),
        ({"verify_lens": (-1,)}, "verify_lens is"),
        ({"num_warmup_steps": 0}, "0 warm-up steps"),
        ({"num_steps": 2}, "and 2 steps"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes, words):
    values = {"num_requests": (1,), "verify_lens": (1,), "context_lens": (4,)}
    with pytest.raises(InvalidArgumentError, match=words):
        ProfileSettings(**(values | changes))


def test_defaults_are_powers_of_two_and_leave_room_to_decode():
    made = ProfileSettings.default(
        max_num_seqs=12, num_drafts=7, max_model_len=4096, is_cuda=True, is_quick=False
    )
    assert made.num_requests == (1, 2, 4, 8, 12)
    assert made.shapes == (None, 0, 1, 3, 7)
    assert made.context_lens == (256, 2048)
    short = ProfileSettings.default(
        max_num_seqs=1, num_drafts=0, max_model_len=200, is_cuda=False, is_quick=True
    )
    assert short.shapes == (None,)
    assert short.context_lens == (16,)
    assert short.num_steps_of_load + short.context_lens[0] < 200


def test_a_length_that_the_drafter_does_not_make_is_refused(pin):
    with pytest.raises(InvalidArgumentError, match=r"5 drafts to verify .* makes 4"):
        pin.set(5)


def test_prompts_and_loads_that_do_not_fit_are_refused(pin):
    with pytest.raises(InvalidArgumentError, match="prompts of 512 tokens leave 0"):
        SteadyLoad(pin.llm, 512)
    with pytest.raises(InvalidArgumentError, match="5 requests, the engine runs 4"):
        SteadyLoad(pin.llm, 4).resize(5)
