"""Recorded rounds: pairs that cannot slip, ends of sequences, files, and their reliability."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from extkv.bench.recording import (
    RecordedRound,
    Recording,
    RecordingSchedule,
    record_rounds,
    select_rounds,
)
from extkv.bench.reliability import calibration_error, measure_temperatures, reliability
from extkv.dspark.calibration import FitSettings, Temperatures, fit_temperatures
from extkv.errors import CalibrationError, InvalidArgumentError
from extkv.sampling_params import SamplingParams
from support.drafted_engines import NUM_DRAFTS, drafted_engine


def recorded(request_id: int, number: int, accepted: int, verified: int = 2) -> RecordedRound:
    return RecordedRound(request_id, number, number, (0.5, -1.0), verified, accepted)


def sequence(sequence_id: int, num_tokens: int, finish: str = "length", stop=None):
    output = SimpleNamespace(
        token_ids=list(range(num_tokens)), finish_reason=finish, stop_reason=stop
    )
    return SimpleNamespace(sequence_id=sequence_id, output=output)


@pytest.mark.parametrize("source", ["head", "both"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_engine_s_rounds_are_recorded_whole_and_paired(source, is_async):
    speculative = {"verification": "scheduled", "confidence": source}
    llm = drafted_engine(speculative=speculative, async_scheduling=is_async)
    schedule = llm.engine.drafting.schedule
    prompts = [[3, 4, 5], [7], [8, 9], [1, 2, 3, 4], [5, 6]]
    params = [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)] * len(prompts)
    progress = []
    found = record_rounds(llm, prompts, params, {"model": "tiny"}, lambda *a: progress.append(a))
    assert llm.engine.drafting.schedule is schedule
    assert not llm.engine.has_unfinished
    assert progress[-1] == ("recording rounds", 5, 5)
    assert len(found.rounds) > 5
    assert found.num_drafts == NUM_DRAFTS
    assert {one.request_id for one in found.rounds} == set(range(5))
    for one in found.rounds:
        assert one.logits_round == one.outcome_round
        assert one.num_verified == NUM_DRAFTS == len(one.logits)
        assert 0 <= one.num_accepted <= NUM_DRAFTS
    # Answers of 30 tokens: every round but those near the limit is whole.
    brought = sum(1 + one.num_accepted for one in found.rounds)
    assert brought >= 5 * (30 - 2 * (NUM_DRAFTS + 1))
    assert len({one.logits for one in found.rounds}) == len(found.rounds)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_recorded_logits_are_those_of_the_drafts_that_were_verified(is_async):
    """A slip by one round would show against what the engine itself reports."""
    speculative = {"verification": "scheduled", "confidence": "head"}
    llm = drafted_engine(speculative=speculative, async_scheduling=is_async)
    rounds, seen = llm.engine.drafting.rounds, []
    real = RecordingSchedule.lens

    def spy(self, is_alive, signals):
        lens = real(self, is_alive, signals)
        if signals is not None:
            seen.append((self._newest[0].number, signals.head_logits().copy()))
        return lens

    RecordingSchedule.lens = spy
    try:
        params = [SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)]
        found = record_rounds(llm, [[3, 4, 5]], params, {})
    finally:
        RecordingSchedule.lens = real
    by_number = dict(seen)
    reports = dict(enumerate(rounds.reports, start=1))
    for one in found.rounds:
        np.testing.assert_array_equal(one.logits, by_number[one.logits_round][0])
        assert reports[one.outcome_round].num_accepted == one.num_accepted


def test_an_engine_without_a_drafter_or_a_head_cannot_record():
    from extkv.engine.llm import LLM
    from support.drafted_engines import loaded_target

    plain = LLM(loaded_target(), device="cpu", max_num_seqs=2, max_num_batched_tokens=32)
    with pytest.raises(InvalidArgumentError, match="no drafter"):
        record_rounds(plain, [[1]], [SamplingParams()], {})
    headless = drafted_engine(
        drafter={"has_confidence_head": False},
        speculative={"verification": "scheduled", "confidence": "margin"},
    )
    params = [SamplingParams(max_tokens=5, ignore_eos=True)]
    with pytest.raises(CalibrationError, match="no confidence head"):
        record_rounds(headless, [[1, 2]], params, {})
    assert not headless.engine.has_unfinished


@pytest.mark.parametrize(
    ("num_tokens", "finish", "stop", "ends"),
    [
        (6, "length", None, [-1, -1]),  # 1 + 3 + 2: nothing was cut
        (6, "stop", 0, [-1, -1]),  # the end is the token after the accepted drafts
        (5, "stop", 0, [-1, 0]),  # the end is the first draft of the last round
        (4, "stop", "word", [-1, -1]),  # a stop string says nothing about drafts
        (4, "stop", 0, [-1]),  # the account does not close
        (9, "stop", 0, [-1]),
    ],
)
def test_the_account_of_tokens_shows_where_a_sequence_ended(num_tokens, finish, stop, ends):
    rounds = [recorded(4, 1, 2), recorded(4, 2, 1)]
    found = select_rounds(rounds, [sequence(4, num_tokens, finish, stop)], 2, {})
    assert list(found.ends) == ends
    assert found.num_left_out == 2 - len(ends)


def test_trimmed_rounds_and_rounds_without_drafts_are_left_out():
    blank = RecordedRound(1, 2, 2, None, 0, 0)
    rounds = [recorded(1, 1, 1), blank, recorded(1, 3, 1, verified=1), recorded(2, 3, 0)]
    found = select_rounds(rounds, [sequence(1, 9), sequence(2, 9)], 2, {"a": "b"})
    assert found.rounds == (rounds[0], rounds[3])
    assert (found.num_left_out, found.source) == (2, {"a": "b"})


def world(num_rounds: int = 1500, temperature: float = 2.0, seed: int = 5) -> Recording:
    """Rounds of a head whose logits are too large by a factor."""
    random = np.random.default_rng(seed)
    truth = random.normal(0.7, 1.2, (num_rounds, 3))
    rejected = random.random(truth.shape) >= 1 / (1 + np.exp(-truth))
    accepted = np.where(rejected.any(1), rejected.argmax(1), 3)
    rounds = tuple(
        RecordedRound(n % 7, n, n, tuple((truth[n] * temperature).tolist()), 3, int(accepted[n]))
        for n in range(num_rounds)
    )
    ends = tuple(0 if n % 50 == 0 and accepted[n] > 0 else -1 for n in range(num_rounds))
    return Recording(3, rounds, ends, 11, {"draft": "d", "model": "m"})


def test_a_file_brings_back_the_rounds(tmp_path):
    recording = world(20)
    recording.save(tmp_path / "rounds.jsonl")
    found = Recording.load(tmp_path / "rounds.jsonl")
    assert (found.num_drafts, found.num_left_out, found.ends) == (3, 11, recording.ends)
    assert found.source == recording.source
    for one, expected in zip(found.rounds, recording.rounds, strict=True):
        assert one.num_accepted == expected.num_accepted
        assert one.logits == pytest.approx(expected.logits, abs=1e-4)


HEAD = '{"format": "extkv.rounds.v1", "num_drafts": 2, "num_left_out": 0, "source": {}}\n'
ROUND = {
    "request_id": 5,
    "logits_round": 1,
    "outcome_round": 1,
    "logits": [0.5],
    "num_verified": 2,
    "num_accepted": 0,
    "end": -1,
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the rounds"),
        ("", "cannot read the rounds"),
        ("[1]\n", "cannot read the rounds"),
        ('{"format": "other"}\n', "has format 'other', expected 'extkv.rounds.v1'"),
        ('{"format": "extkv.rounds.v1"}\n', "cannot read the rounds"),
        (HEAD + json.dumps(ROUND), "request 5 has 1 logits, expected 2"),
        (HEAD + '{"request_id": 5, "logits": [0.5, 1], "end": -1}', "cannot read the rounds"),
    ],
    ids=["missing", "empty", "array", "format", "no-drafts", "logits", "fields"],
)
def test_files_that_are_no_rounds_are_refused(tmp_path, text, words):
    path = tmp_path / "rounds.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalibrationError, match=words):
        Recording.load(path)


def test_a_slipped_pair_is_refused_by_the_fit(tmp_path):
    recording = world(1200)
    recording.save(tmp_path / "rounds.jsonl")
    head, first, *lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    slipped = json.loads(first) | {"outcome_round": 99}
    (tmp_path / "rounds.jsonl").write_text("\n".join([head, json.dumps(slipped), *lines]))
    rounds = Recording.load(tmp_path / "rounds.jsonl").to_rounds()
    with pytest.raises(CalibrationError):
        fit_temperatures(rounds)


def test_bins_have_the_calibration_error_of_the_fit():
    rounds = world().to_rounds()
    fit = fit_temperatures(rounds, FitSettings(num_bins=15))
    for temperatures, errors in (
        (Temperatures([1.0] * 3), fit.ece_before),
        (fit.temperatures, fit.ece_after),
    ):
        positions = reliability(rounds, temperatures)
        for bins, error, count in zip(positions, errors, fit.num_rounds_by_position, strict=True):
            total = sum(one.num_rounds for one in bins)
            gap = sum(one.num_rounds * abs(one.promised - one.observed) for one in bins)
            assert total == count
            assert gap / total == pytest.approx(error, abs=2e-3)
    assert fit.temperatures.values == pytest.approx([2.0] * 3, rel=0.5)
    assert max(fit.ece_after) < min(fit.ece_before)


def test_temperatures_are_measured_on_other_rounds():
    fit = fit_temperatures(world().to_rounds())
    other = world(seed=8).to_rounds()
    found = measure_temperatures(other, fit.temperatures)
    refit = fit_temperatures(other)
    assert found["num_rounds"] == refit.num_rounds_by_position.tolist()
    assert found["accepted_ratio"] == pytest.approx(refit.accepted_ratio.tolist())
    assert found["ece_before"] == pytest.approx(refit.ece_before.tolist(), abs=2e-3)
    assert found["mean_before"] == pytest.approx(refit.mean_before.tolist(), abs=1e-5)
    assert max(found["ece_after"]) < min(found["ece_before"])
    # Not those of the rounds themselves.
    assert found["temperature"] != refit.temperatures.values.tolist()


def test_no_rounds_have_no_error():
    assert calibration_error([]) == 0.0
