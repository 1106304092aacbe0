"""Cost tables, temperatures and acceptance models from Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from extkv.dspark.calibration import (
    FitSettings,
    OnlineSettings,
    OnlineTemperatures,
    Rounds,
    Temperatures,
    check_pairing,
    fit_temperatures,
)
from extkv.dspark.cost import CostTable, QualityLimits, StepCost, StepSample, fit_step_cost
from extkv.dspark.estimation import AcceptanceModel, Features
from extkv.errors import CalibrationError, CostTableError, SpeculationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TABLE = CostTable(
    token_us=((1, 10.0), (8, 12.0), (16, 20.0)),
    bias_us=100.0,
    request_us=((1, 0.0), (8, 7.0)),
    draft_us=((1, 50.0),),
    context_us=((0, 0.0), (1000, 10.0)),
    tiers=(1, 8, 16),
    source={"device": "a card"},
)
TRUE = np.asarray([2.5, 1.5, 0.7])


def test_a_table_comes_back_from_its_file(tmp_path: Path):
    path = tmp_path / "cost.json"
    StepCost(TABLE).save(path)
    cost = StepCost.load(path)
    assert json.loads(cost.to_json())["source"] == {"device": "a card"}
    us = cost.step_us(
        num_requests=8, num_drafts=3, drafts=True, num_other_tokens=2, num_context_tokens=500
    )
    assert us == pytest.approx(100 + 7 + 50 + 5 + 20)
    assert [cost.num_executed_tokens(tokens) for tokens in (1, 2, 9, 17)] == [1, 8, 16, 17]


REFUSED_TABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: StepCost(CostTable(token_us=())), "curve token_us has no knots"),
    "order": (lambda: StepCost(CostTable(((2, 1.0), (1, 2.0)))), "knots must rise"),
    "falls": (lambda: StepCost(CostTable(((1, 2.0), (2, 1.0)))), "falls from 2 us to 1 us"),
    "nan": (lambda: StepCost(CostTable(((1, float("nan")),))), "not readable"),
    "json": (lambda: StepCost.from_json("{"), "not readable"),
    "kind": (lambda: StepCost.from_json('{"token_us": []}'), "extkv.step_cost.v1"),
    "file": (lambda: StepCost.load("/nonexistent/cost.json"), "cannot read the cost table"),
    "flat": (
        lambda: StepCost.measured(CostTable(((1, 10.0), (64, 10.01)))),
        "below 0.02 the table is flat",
    ),
    "flat when asked": (lambda: StepCost(CostTable(((1, 10.0),))).check_rise(), "is flat"),
    "noisy": (
        lambda: StepCost.measured(CostTable(((1, 10.0), (2, 20.0), (3, 12.0), (4, 30.0)))),
        "too noisy",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED_TABLES.values(), ids=REFUSED_TABLES)
def test_tables_that_cannot_be_are_refused(call: Callable[[], Any], message: str):
    with pytest.raises(CostTableError, match=message):
        call()


def test_a_fit_recovers_a_known_cost():
    truth = StepCost(CostTable(((1, 10.0), (64, 136.0)), 100.0, ((1, 0.0), (8, 7.0)), ((1, 50.0),)))
    samples = [
        StepSample(
            num_requests=requests,
            num_tokens=requests * (1 + length),
            drafts=drafts,
            step_us=truth.step_us(
                num_requests=requests, num_drafts=requests * length, drafts=drafts
            ),
        )
        for requests in (1, 2, 4, 8)
        for length in range(8)
        for drafts in (False, True)
    ]
    fit = fit_step_cost(samples, tiers=(8, 16))
    assert fit.worst_residual_ratio < 0.15
    assert fit.mean_residual_ratio < 0.06
    exact = fit_step_cost(samples).cost.step_us(num_requests=3, num_drafts=6, drafts=True)
    assert exact == pytest.approx(truth.step_us(num_requests=3, num_drafts=6, drafts=True), 0.05)
    with pytest.raises(CostTableError, match="32 of 32 measured steps draft"):
        fit_step_cost([sample for sample in samples if sample.drafts])
    with pytest.raises(CostTableError, match="too noisy"):
        fit_step_cost([StepSample(1, 1, drafts=False, step_us=1.0, spread_us=1.0)])
    with pytest.raises(CostTableError, match="off by more than"):
        fit_step_cost([*samples[:-1], StepSample(8, 64, drafts=True, step_us=600.0)])
    assert QualityLimits().max_residual_ratio == 0.15


def synthetic(num_rounds: int, *, shift: int = 0) -> Rounds:
    random = np.random.default_rng(3)
    logits = TRUE * (1.0 + 1.5 * random.normal(size=(num_rounds, 3)))
    chance = 1.0 / (1.0 + np.exp(-logits / TRUE))
    rejected = random.random((num_rounds, 3)) >= chance
    accepted = np.where(rejected.any(axis=1), rejected.argmax(axis=1), 3)
    steps = np.arange(num_rounds) // 4
    return Rounds(
        request_ids=np.arange(num_rounds) % 4,
        logits_steps=steps,
        outcome_steps=steps,
        logits=logits.astype(np.float32),
        num_verified=np.full(num_rounds, 3),
        num_accepted=np.roll(accepted, 4 * shift),
    )


def test_temperatures_are_recovered_and_error_falls(tmp_path: Path):
    fit = fit_temperatures(synthetic(30_000))
    np.testing.assert_allclose(fit.temperatures.values, TRUE, rtol=0.3)
    assert (fit.ece_after <= fit.ece_before).all()
    assert fit.ece_before[0] > 0.05
    assert (fit.ece_after < 0.02).all()
    assert fit.num_rounds_by_position.tolist() == [30_000] * 3
    path = tmp_path / "temperatures.json"
    path.write_text(fit.json, encoding="utf-8")
    assert Temperatures.load(path).values.tolist() == fit.temperatures.values.tolist()


def test_pairs_off_by_one_round_are_detected():
    before, own, after = check_pairing(synthetic(4_000))
    assert before is not None
    assert own is not None
    assert after is not None
    assert own > max(before, after) + 0.1
    with pytest.raises(CalibrationError, match="check how rounds are paired"):
        check_pairing(synthetic(4_000, shift=1))


@pytest.mark.parametrize("key", ["temperatures", "sts_temperatures"])
def test_files_of_other_engines_are_read(key: str):
    text = json.dumps({key: [2.0, 1.0], "num_samples": 3, "other": None})
    assert Temperatures.from_json(text).values.tolist() == [2.0, 1.0]


def test_confidences_of_logits():
    temperatures = Temperatures([2.0, 1.0, 1.0])
    found = temperatures.of_first(2).confidences([[2.0, np.nan], [np.inf, -np.inf]])
    np.testing.assert_allclose(found, [[0.7310586, 0.0], [1.0, 0.0]], atol=1e-6)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: Temperatures([]), "neither"),
    "negative": (lambda: Temperatures([1.0, -1.0]), "temperature 2 is -1"),
    "file": (lambda: Temperatures.load("/nonexistent/t.json"), "cannot read the temperatures"),
    "conflict": (
        lambda: Temperatures.from_json('{"temperatures": [1], "sts_temperatures": [2]}'),
        "differ",
    ),
    "few": (lambda: Temperatures([1.0]).of_first(2), "1 temperatures for 2 drafts"),
    "rounds": (lambda: fit_temperatures(synthetic(10)), "has 10 rounds: at least 1000"),
    "bins": (lambda: fit_temperatures(synthetic(10), FitSettings(num_bins=0)), "num_bins is 0"),
    "trimmed": (
        lambda: fit_temperatures(Rounds([1], [1], [1], [[0.0]], [0], [0])),
        "verified 0 of 1 drafts",
    ),
    "tags": (
        lambda: fit_temperatures(Rounds([1], [1], [2], [[0.0]], [1], [0])),
        "logits of step 1 with the outcome of step 2",
    ),
    "end": (
        lambda: fit_temperatures(Rounds([1], [1], [1], [[0.0]], [1], [0], [0])),
        "end of sequence is draft 0 of 0",
    ),
    "decay": (
        lambda: OnlineTemperatures(Temperatures([1.0]), OnlineSettings(decay=2.0)),
        "decay is 2",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_calibration_that_cannot_be_is_refused(call: Callable[[], Any], message: str):
    with pytest.raises(CalibrationError, match=message):
        call()


def test_online_temperatures_count_what_is_not_censored():
    online = OnlineTemperatures(Temperatures([1.0, 1.0, 1.0]))
    online.observe_step(Rounds([1, 2], [1, 1], [1, 1], np.ones((2, 3)), [2, 3], [2, 0]))
    assert online.num_trials == [2.0, 1.0, 0.0]
    rounds = synthetic(400)
    for _ in range(60):
        online.observe_step(rounds)
    np.testing.assert_allclose(online.refit().values, TRUE, rtol=0.3)
    assert online.temperatures.values.tolist() == online.refit().values.tolist()


def test_an_acceptance_model_learns_from_margins():
    model = AcceptanceModel(2, ["margin"], refit_interval=50)
    random = np.random.default_rng(1)
    refits = []
    for _ in range(100):
        margins = random.uniform(0, 4, (8, 2)).astype(np.float32)
        rejected = random.random((8, 2)) >= 1 / (1 + np.exp(2.0 - 1.5 * margins))
        accepted = np.where(rejected.any(axis=1), rejected.argmax(axis=1), 2)
        model.observe(Features(8, margins=margins), np.full(8, 2), accepted)
        refits.append(model.end_step())
    assert sum(refit is not None for refit in refits) == 2
    intercept, _, slope, _, _ = model.coefficients
    assert (intercept, slope) == (pytest.approx(-2.0, abs=0.5), pytest.approx(1.5, abs=0.35))
    low, high = model.confidences(Features(1, margins=[[0.0, 4.0]]))[0]
    assert low < 0.25
    assert high > 0.9
    assert model.num_trials > 800
    with pytest.raises(SpeculationError, match="margins are missing"):
        model.confidences(Features(1))
    with pytest.raises(SpeculationError, match="features must be one of"):
        AcceptanceModel(2, ["token"])  # type: ignore[list-item]
