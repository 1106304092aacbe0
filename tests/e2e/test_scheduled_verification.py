"""Scheduled verification in the engine: the text is that without drafts, whatever is scheduled."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from extkv.dspark.calibration import Temperatures
from extkv.dspark.cost import CostTable, StepCost
from extkv.errors import CostTableError, InvalidArgumentError
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from support.schedules import RandomSchedule
from support.tiny_bigrams import (
    CONFIG,
    GREEDY,
    NUM_DRAFTS,
    VOCAB_SIZE,
    assert_idle,
    engine,
    knowing_drafter,
    load,
    prompts,
    tokens,
)

if TYPE_CHECKING:
    from extkv.models import LoadedModel

CHEAP = StepCost(CostTable(token_us=((1, 500.0), (30, 700.0)), draft_us=((1, 50.0),)))
MIDDLING = StepCost(
    CostTable(token_us=((1, 100.0), (8, 120.0), (30, 300.0)), draft_us=((1, 50.0),))
)
# A token costs as much as a step of one: drafts never pay.
COMPUTE_BOUND = StepCost(CostTable(token_us=((1, 100.0), (30, 3000.0)), draft_us=((1, 50.0),)))
# Probes come however expensive they are.
INTERVALS = {
    "probe_interval": 3,
    "max_probe_interval": 6,
    "max_probe_share": 1.0,
    "explore_interval": 7,
}
NUM_ENDS = 200
PRESSURE = [
    {},
    {"num_gpu_blocks_override": 14},
    {"async_scheduling": True},
    {"async_scheduling": True, "num_gpu_blocks_override": 14},
    {"max_num_seqs": 2, "max_num_batched_tokens": 10},
    {"enable_prefix_caching": False},
]
PRESSURE_NAMES = ["plain", "preemption", "async", "async-preemption", "chunked", "no-prefix-cache"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load()


@pytest.fixture(scope="module")
def expected(loaded) -> list[list[int]]:
    return tokens(engine(loaded))


def scheduled(cost: StepCost = MIDDLING, **options):
    return {"verification": "scheduled", "step_cost": cost, **INTERVALS, **options}


def reasons(llm) -> Counter:
    return Counter(report.reason.value for report in llm.step_reports)


@pytest.mark.parametrize("options", PRESSURE, ids=PRESSURE_NAMES)
def test_windows_of_any_length_skips_and_returns_keep_greedy_text(loaded, expected, options):
    llm = engine(loaded, knowing_drafter(loaded), **options)
    schedule = llm.engine.drafting.schedule = RandomSchedule(NUM_DRAFTS, seed=4)
    assert tokens(llm) == expected
    assert tokens(llm) == expected  # from cached prefixes, written by steps with and without drafts
    assert set(schedule.lens_seen) == set(range(NUM_DRAFTS + 1))
    assert min(schedule.num_skipped, schedule.num_resumed) > 5
    counts = llm.draft_counts
    # The drafter knows the text: its context was complete whenever it came back.
    assert counts.accepted_length > 1.5
    assert counts.num_accepted[0] > 0.4 * counts.num_drafted[0]
    if "num_gpu_blocks_override" in options:
        assert llm.engine.scheduler.stats().num_preemptions > 0
    assert_idle(llm)


def test_a_drafter_that_comes_back_drafts_as_if_it_had_never_paused(loaded):
    """With the context of skipped steps missing, drafts after a pause would differ."""
    drafter = knowing_drafter(loaded, "gated")
    drafts = {}
    for name, pauses in (("never", set()), ("paused", {2, 3, 4, 5})):
        llm = engine(loaded, drafter, speculative={"draft_sample_method": "greedy"})
        seen, rounds = {}, itertools.count()
        schedule = llm.engine.drafting.schedule
        speculator = llm.engine.runner.speculator
        propose = speculator.propose

        def noted(inputs, requests, *, propose=propose, seen=seen):
            found = propose(inputs, requests)
            position = int(inputs.positions[inputs.query_start_loc[1] - 1])
            seen[position - int(requests.num_rejected[0]) + 1] = found[0].tolist()
            return found

        speculator.propose = noted
        decide = schedule.decide

        def paused(draft_round, *, rounds=rounds, decide=decide, pauses=pauses, schedule=schedule):
            # Nothing is verified, so both runs stand at the same positions.
            schedule.verify_len = 0 if next(rounds) in pauses else NUM_DRAFTS
            decision = decide(draft_round)
            schedule._limits = np.zeros_like(schedule._limits)
            return decision

        schedule.decide = paused
        llm.generate([prompts()[4]], GREEDY, use_tqdm=False)
        drafts[name] = seen
    missing = drafts["never"].keys() - drafts["paused"].keys()
    assert len(missing) == 4
    assert drafts["paused"] == {
        position: found for position, found in drafts["never"].items() if position not in missing
    }


@pytest.mark.parametrize("planner", ["lagged", "greedy"])
@pytest.mark.parametrize("confidence", ["head", "margin", "both", "acceptance"])
def test_every_planner_and_confidence_keeps_greedy_text(loaded, expected, planner, confidence):
    speculative = scheduled(planner=planner, confidence=confidence)
    options = {"async_scheduling": confidence != "margin", "num_gpu_blocks_override": 14}
    llm = engine(loaded, knowing_drafter(loaded), speculative=speculative, **options)
    assert tokens(llm) == expected
    assert reasons(llm)["gain"] > 0
    for report in llm.step_reports:
        assert report.num_accepted <= report.num_verified <= report.num_available
        assert report.budget is None or report.num_verified <= report.budget
        assert report.requested_trim == report.num_available - report.num_verified
        assert 0 <= report.landed_trim <= report.requested_trim
        assert report.predicted_us > 0
        assert report.measured_us > 0
    assert_idle(llm)


def test_growth_and_shrink_in_the_middle_keep_text(loaded, expected):
    llm = engine(
        loaded, knowing_drafter(loaded), speculative=scheduled(), num_gpu_blocks_override=20
    )
    step, sizes, count = llm.engine.step, {3: 40, 6: 14, 10: 42}, itertools.count(1)

    def disturbed():
        size = sizes.get(next(count))
        if size is not None:
            llm.engine.resize_cache(size)
        return step()

    llm.engine.step = disturbed
    assert tokens(llm) == expected
    assert_idle(llm)


@pytest.mark.parametrize("is_random", [True, False])
def test_a_sequence_may_end_at_the_context_limit(loaded, is_random):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = prompts()[7]
    (plain,) = engine(loaded).generate([prompt], params, use_tqdm=False)
    llm = engine(loaded, knowing_drafter(loaded), speculative=scheduled(CHEAP))
    if is_random:
        llm.engine.drafting.schedule = RandomSchedule(NUM_DRAFTS, seed=9, skip=0.1)
    (found,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(found.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    assert len(prompt) + len(found.outputs[0].token_ids) == CONFIG.context_length
    # No draft is planned past the limit.
    assert llm.step_reports[-1].num_available < NUM_DRAFTS
    assert_idle(llm)


def test_an_abort_and_a_failing_step_leave_nothing_behind(loaded, expected):
    llm = engine(
        loaded, knowing_drafter(loaded), speculative=scheduled(CHEAP), async_scheduling=True
    )
    stream = llm.stream(prompts()[3], GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()
    assert_idle(llm)
    run, count = llm.engine.runner.run, itertools.count()

    def failing(*arguments, **options):
        if next(count) == 5:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    llm.engine.runner.run = failing
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    assert tokens(llm) == expected
    assert_idle(llm)


def test_64_equal_prompts_agree(loaded):
    for speculative in (scheduled(), scheduled(confidence="acceptance", planner="greedy")):
        llm = engine(
            loaded,
            knowing_drafter(loaded),
            speculative=speculative,
            max_num_seqs=64,
            max_num_batched_tokens=320,
        )
        outputs = llm.generate([prompts()[5]] * 64, GREEDY, use_tqdm=False)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_ends_of_sequence_come_as_often_as_without_drafts(loaded):
    """A window that is not what the device computed once raised throughput and ended nothing."""
    stops = [3, 5]
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True, stop_token_ids=stops
        )
        for seed in range(NUM_ENDS)
    ]
    lengths, ended = {}, {}
    arms = {
        "none": {"fixed_verify_len": 0},
        "scheduled": scheduled(),
        "greedy": scheduled(planner="greedy"),
    }
    for name, speculative in arms.items():
        llm = engine(
            loaded,
            knowing_drafter(loaded),
            speculative=speculative,
            max_num_seqs=64,
            max_num_batched_tokens=320,
        )
        outputs = [o.outputs[0] for o in llm.generate([[9, 4]] * NUM_ENDS, params, use_tqdm=False)]
        found = np.array([len(output.token_ids) for output in outputs])
        ended[name] = sum(output.finish_reason == "stop" for output in outputs) / NUM_ENDS
        lengths[name] = found.mean()
        spread = found.std() / NUM_ENDS**0.5  # of the mean
        assert all(o.token_ids[-1] in stops for o in outputs if o.finish_reason == "stop")
        assert not any(set(o.token_ids[:-1]) & set(stops) for o in outputs)
    for name in ("scheduled", "greedy"):
        # Four standard deviations of a difference of two means, and of two shares.
        assert abs(lengths[name] - lengths["none"]) < 4 * 2**0.5 * spread
        share = ended["none"]
        assert abs(ended[name] - share) < 4 * (2 * share * (1 - share) / NUM_ENDS) ** 0.5 + 1e-9


def test_b53_where_tokens_cost_what_they_yield_drafting_stops_and_is_tried_again(loaded, expected):
    speculative = scheduled(COMPUTE_BOUND)
    llm = engine(loaded, knowing_drafter(loaded, "gated"), speculative=speculative)
    assert tokens(llm) == expected
    assert tokens(llm) == expected
    found = reasons(llm)
    assert found["no_gain"] > 3 * (found["gain"] + found["probe"])
    assert found["probe"] > 3
    skipped = [report for report in llm.step_reports if report.reason.value == "no_gain"]
    assert not any(report.has_drafted or report.num_verified for report in skipped)
    stats = llm.engine.drafting.schedule.controller.stats
    assert stats.num_fallbacks >= 1
    assert not llm.engine.drafting.schedule.controller.is_drafting


def test_drafting_returns_when_the_load_falls(loaded):
    """64 requests are compute bound, one is not; the drafter is nearly always right."""
    cost = StepCost(
        CostTable(token_us=((1, 1000.0), (16, 1001.0), (320, 60000.0)), draft_us=((1, 50.0),))
    )
    speculative = scheduled(cost, confidence="acceptance")
    speculative |= {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.6] * NUM_DRAFTS,
    }
    llm = engine(
        loaded,
        knowing_drafter(loaded),
        speculative=speculative,
        max_num_seqs=64,
        max_num_batched_tokens=320,
    )
    generator = torch.Generator().manual_seed(3)
    crowd = torch.randint(1, VOCAB_SIZE, (64, 2), generator=generator).tolist()
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # Times of this machine are not the table's: without them the table stands.
    schedule = llm.engine.drafting.schedule
    schedule.controller = _Untimed(schedule.controller)
    llm.generate(crowd, [GREEDY] * 63 + [long], use_tqdm=False)
    reports = llm.step_reports
    full = [report.has_drafted for report in reports if report.num_requests == 64]
    alone = [report.has_drafted for report in reports if report.num_requests == 1]
    assert sum(full) / len(full) < 0.6
    assert sum(alone) / len(alone) > 0.7


class _Untimed:
    """A controller that learns no times."""

    def __init__(self, controller) -> None:
        self._controller = controller

    def observe(self, num_accepted=(), measured_us=None):
        del measured_us
        return self._controller.observe(num_accepted, None)

    def __getattr__(self, name):
        return getattr(self._controller, name)


def test_a_slot_s_next_occupant_starts_without_confidences(loaded):
    """One request after the other in the same slot; each begins as if it were the first."""
    llm = engine(
        loaded,
        knowing_drafter(loaded),
        speculative=scheduled(confidence="acceptance"),
        max_num_seqs=1,
    )
    rates = llm.engine.drafting.schedule._confidences
    seen = []
    of_round = rates.of_round

    def noted(draft_round, signals):
        found = of_round(draft_round, signals)
        seen.append((int(draft_round.request_ids[0]), found[0] / rates.rates))
        return found

    rates.of_round = noted
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate(prompts()[:6], params, use_tqdm=False)
    firsts = {}
    for request_id, scale in seen:
        firsts.setdefault(request_id, scale)
    assert len(firsts) == 6
    for scale in firsts.values():
        assert scale == pytest.approx(1.0, abs=1e-6)
    assert any(abs(scale - 1).max() > 0.05 for _, scale in seen)


def test_b26_a_drafter_with_fewer_positions_than_the_engine_stops_at_its_own(loaded):
    target = loaded.model
    config = drafter_config(
        CONFIG, num_layers=1, block_size=NUM_DRAFTS, markov_rank=CONFIG.hidden_size
    )
    drafter = random_drafter(config, target, seed=1, max_model_len=40)
    assert drafter.num_positions == 40
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    texts = [prompts()[7], prompts()[1]]
    plain = engine(loaded).generate(texts, long, use_tqdm=False)
    llm = engine(loaded, drafter)
    found = llm.generate(texts, long, use_tqdm=False)
    for one, other in zip(plain, found, strict=True):
        assert list(other.outputs[0].token_ids) == list(one.outputs[0].token_ids)
    # The long one has no draft from position 38 on; the short one still has.
    reports = [report for report in llm.step_reports if report.num_requests == 2]
    assert any(0 < report.num_available <= NUM_DRAFTS for report in reports)
    assert llm.step_reports[-1].num_available == 0


def test_b52_without_a_table_the_start_measures_and_a_flat_one_is_said_once(loaded, monkeypatch):
    from extkv.dspark import step_profile

    times = iter([{1: 900.0, 5: 950.0, 30: 1500.0}, {1: 900.0, 5: 900.1, 30: 900.2}])

    def measured(runner, speculator):
        del runner, speculator
        return step_profile.PassTimes(next(times), {1: 50.0, 6: 60.0}, ())

    monkeypatch.setattr(step_profile, "measure_passes", measured)
    llm = engine(loaded, knowing_drafter(loaded), speculative={"verification": "scheduled"})
    assert "step cost" in llm.startup_s
    tokens(llm)
    assert reasons(llm).keys() & {"gain", "no_gain"}
    with pytest.warns(UserWarning, match="so every draft is verified") as warned:
        llm = engine(loaded, knowing_drafter(loaded), speculative={"verification": "scheduled"})
    assert len(warned) == 1
    tokens(llm)
    assert set(reasons(llm)) == {"no_cost_table"}
    assert llm.draft_counts.num_drafted[-1] == llm.draft_counts.num_rounds


def test_costs_measured_at_start_say_what_passes_take(loaded):
    llm = engine(loaded, knowing_drafter(loaded))
    from extkv.dspark.step_profile import measure_passes

    times = measure_passes(llm.engine.runner, llm.engine.runner.speculator, num_repeats=1)
    assert list(times.target_us) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 30]
    assert list(times.draft_us) == [1, 2, 3, 4, 6]
    cost = StepCost(times.table())
    alone = cost.step_us(num_requests=1)
    assert alone == pytest.approx(min(times.target_us.values()))
    drafted = cost.step_us(num_requests=6, num_drafts=24, drafts=True)
    assert drafted == pytest.approx(times.target_us[30] + times.draft_us[6])
    assert tokens(llm) == tokens(engine(loaded))  # nothing is left of it


def test_pinned_lengths_verify_that_many(loaded, expected):
    for length in (0, 1, 3):
        llm = engine(loaded, knowing_drafter(loaded), speculative={"fixed_verify_len": length})
        assert tokens(llm) == expected
        assert len(llm.draft_counts.num_drafted) == length
        assert all(report.has_drafted == (length > 0) for report in llm.step_reports)


def test_reports_reach_a_callback_and_add_up(loaded, expected):
    llm = engine(loaded, knowing_drafter(loaded), speculative=scheduled())
    found = []
    llm.engine.drafting.rounds.on_report = found.append
    assert tokens(llm) == expected
    assert found == list(llm.step_reports)
    counts = llm.draft_counts
    assert sum(report.num_verified for report in found) == sum(counts.num_drafted)
    assert sum(report.num_accepted for report in found) == sum(counts.num_accepted)
    assert len({report.step_id for report in found}) == len(found)
    assert all(r.num_executed_tokens == r.num_tokens - r.num_accepted + r.num_verified
               + r.num_other_tokens for r in found)  # fmt: skip
    # One number after another, the first of each shape of step left out.
    assert sum(report.is_typical for report in found) > len(found) / 4


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ({"verification": "often"}, "verification is 'often', known: fixed, scheduled"),
        ({"fixed_verify_len": 5}, "fixed_verify_len is 5, each request has 4 drafts"),
        ({"fixed_verify_len": -1}, "fixed_verify_len is -1"),
        ({**scheduled(), "fixed_verify_len": 2}, "needs verification 'fixed'"),
        ({"confidence": "head"}, "confidence needs verification 'scheduled'"),
        (scheduled(confidence="luck"), "known: head, margin, both, acceptance"),
        (scheduled(planner="best"), "known: lagged, greedy"),
        (
            scheduled(confidence="margin", confidence_temperatures=Temperatures([1.0] * 4)),
            "confidence_temperatures are of the head's logits",
        ),
    ],
    ids=["mode", "more", "less", "both", "fixed", "source", "planner", "heat"],
)
def test_options_that_contradict_each_other_are_refused(loaded, speculative, words):
    with pytest.raises(InvalidArgumentError, match=words):
        engine(loaded, knowing_drafter(loaded), speculative=speculative)


def test_files_of_costs_and_temperatures_are_read(loaded, expected, tmp_path):
    (tmp_path / "cost.json").write_text(MIDDLING.to_json())
    (tmp_path / "heat.json").write_text('{"temperatures": [2.0, 1.5, 1.0, 1.0, 1.0]}')
    speculative = scheduled(confidence_temperatures=tmp_path / "heat.json")
    speculative["step_cost"] = str(tmp_path / "cost.json")
    llm = engine(loaded, knowing_drafter(loaded), speculative=speculative)
    assert tokens(llm) == expected
    speculative["step_cost"] = str(tmp_path / "missing.json")
    with pytest.raises(CostTableError, match=r"missing\.json"):
        engine(loaded, knowing_drafter(loaded), speculative=speculative)


def test_a_head_is_asked_only_of_a_drafter_that_has_one(loaded):
    config = drafter_config(
        CONFIG, num_layers=1, block_size=2, markov_rank=8, has_confidence_head=False
    )
    drafter = random_drafter(config, loaded.model, seed=1)
    for confidence in ("head", "both"):
        with pytest.raises(InvalidArgumentError, match="the drafter has no confidence head"):
            engine(loaded, drafter, speculative=scheduled(confidence=confidence))
    llm = engine(loaded, drafter, speculative=scheduled())
    assert not llm.engine.drafting.schedule._confidences.needs_signals
