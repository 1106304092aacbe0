"""Scheduled verification on a CUDA device: windows of any length, in graphs keyed by tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from extkv.dspark.cost import CostTable, StepCost
from extkv.sampling_params import SamplingParams
from support.bigrams import CONFIG, GREEDY, NUM_DRAFTS, engine, prompts, tokens
from support.schedules import RandomSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CHEAP = StepCost(CostTable(token_us=((1, 500.0), (96, 900.0)), draft_us=((1, 50.0),)))
# Tokens cost so much that a drafter must be nearly always right.
STEEP = StepCost(CostTable(token_us=((1, 100.0), (96, 9600.0)), draft_us=((1, 100.0),)))


def scheduled(cost=CHEAP, **options):
    return {
        "verification": "scheduled",
        "step_cost": cost,
        "probe_interval": 8,
        "max_probe_interval": 16,
        "max_probe_share": 1.0,
        "explore_interval": 9,
        **options,
    }


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(engine("cpu"))


def num_equal(found: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 50}])
@pytest.mark.parametrize("seed", [1, 2])
def test_windows_of_any_length_give_the_text_without_drafts(expected, options, seed):
    llm = engine("cuda", head="vanilla", **options)
    schedule = llm.engine.drafting.schedule = RandomSchedule(NUM_DRAFTS, seed)
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    # Again, from cached prefixes; their blocks hold the context of steps without a draft pass too.
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    assert set(schedule.lens_seen) == set(range(NUM_DRAFTS + 1))
    assert min(schedule.num_skipped, schedule.num_resumed) > 3
    sizes = {1, 2, 4, 8, 16, *llm.engine.runner.graph_token_sizes}
    for report in llm.step_reports:
        assert report.num_accepted <= report.num_verified
        assert report.measured_us > 0
        if report.num_other_tokens == 0 and not options.get("enforce_eager"):
            assert report.num_executed_tokens in sizes
    assert llm.draft_counts.accepted_length > 1.5
    llm.engine.scheduler.check_integrity()
    llm.close()


def test_graphs_and_eager_windows_give_equal_tokens():
    found = []
    for eager in (True, False):
        llm = engine("cuda", head="vanilla", enforce_eager=eager)
        llm.engine.drafting.schedule = RandomSchedule(NUM_DRAFTS, seed=5)
        found.append(tokens(llm))
        assert bool(llm.engine.runner.graph_token_sizes) != eager
        llm.close()
    assert num_equal(*found) >= len(found[0]) - 1


@pytest.mark.parametrize("planner", ["lagged", "greedy"])
@pytest.mark.parametrize("confidence", ["head", "margin", "both", "acceptance"])
@pytest.mark.parametrize("cost", [CHEAP, STEEP], ids=["cheap", "steep"])
def test_every_planner_keeps_the_text(expected, planner, confidence, cost):
    speculative = scheduled(cost, planner=planner, confidence=confidence)
    llm = engine("cuda", head="vanilla", speculative=speculative)
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    reasons = Counter(report.reason.value for report in llm.step_reports)
    if cost is STEEP:
        assert reasons["no_gain"] > reasons["gain"]
        assert reasons["probe"] > 0
    assert all(report.predicted_us > 0 for report in llm.step_reports)
    llm.engine.scheduler.check_integrity()
    llm.close()


def test_the_heads_logits_and_margins_are_those_of_the_host():
    """Captured in the draft graph, into buffers that every replay writes."""
    found: dict[str, Any] = {}
    head = None
    for device in ("cpu", "cuda"):
        # Else the device is a round ahead of the text.
        llm = engine(
            device, head="vanilla", speculative=scheduled(confidence="both"), async_scheduling=False
        )
        # Costs are measured at start-up: decisions of the two devices would differ.
        llm.engine.drafting.schedule = RandomSchedule(NUM_DRAFTS, seed=3)
        speculator = llm.engine.runner.speculator
        # Random numbers of the two devices differ, and so do their heads.
        weight = speculator.model.weights.confidence_proj
        head = weight.clone() if head is None else head
        weight.copy_(head)
        stream = llm.stream(prompts()[4], GREEDY)
        for _ in range(3):
            next(stream)
        found[device] = (
            speculator.confidence_logits[:1].cpu(),
            speculator.margins[:1].cpu(),
            speculator.tokens[:1].cpu(),
        )
        stream.close()
        llm.close()
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_64_equal_prompts_agree():
    for schedule in (RandomSchedule(NUM_DRAFTS, seed=3), None):
        llm = engine(
            "cuda",
            head="vanilla",
            speculative=scheduled(),
            max_num_seqs=64,
            max_num_batched_tokens=512,
        )
        if schedule is not None:
            llm.engine.drafting.schedule = schedule
        outputs = llm.generate([prompts()[5]] * 64, GREEDY, use_tqdm=False)
        texts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
        # A window's rows are computed in batches of other sizes: float32 may tip a near tie.
        assert texts.most_common(1)[0][1] >= 63
        llm.close()


def test_a_window_never_gives_more_than_it_verified_and_ends_come_as_without():
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            ignore_eos=True,
            stop_token_ids=[3, 5, 7, 11],
        )
        for seed in range(96)
    ]
    lengths = {}
    for name, speculative in (("fixed", None), ("scheduled", scheduled())):
        llm = engine(
            "cuda",
            head="vanilla",
            speculative=speculative,
            max_num_seqs=96,
            max_num_batched_tokens=640,
        )
        outputs = llm.generate([[9, 4, 2]] * 96, params, use_tqdm=False)
        lengths[name] = [len(output.outputs[0].token_ids) for output in outputs]
        for report in llm.step_reports:
            assert report.num_accepted <= report.num_verified <= report.num_available
        llm.close()
    means = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert means["scheduled"] == pytest.approx(means["fixed"], rel=0.35)
    ended = {name: sum(n < 60 for n in found) for name, found in lengths.items()}
    assert abs(ended["scheduled"] - ended["fixed"]) < 20


def test_costs_are_measured_at_start_and_predictions_follow_measured_times():
    llm = engine("cuda", head="vanilla", speculative={"verification": "scheduled"})
    assert 0 < llm.startup_s["step cost"] < 10
    tokens(llm)
    tokens(llm)
    typical = [report for report in llm.step_reports if report.is_typical]
    assert len(typical) > 10
    llm.close()


def test_no_drafts_run_the_plain_graphs_and_keep_the_context(expected):
    llm = engine("cuda", head="vanilla", speculative={"fixed_verify_len": 0})
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    decodes = [report for report in llm.step_reports if report.num_other_tokens == 0]
    assert {report.num_executed_tokens for report in decodes} <= {1, 2, 4, 8, 16}
    assert llm.draft_counts.num_rounds == 0
    llm.engine.drafting.schedule.verify_len = NUM_DRAFTS
    assert num_equal(tokens(llm), expected) >= len(expected) - 1
    assert llm.draft_counts.accepted_length > 2
    assert CONFIG.context_length == llm.config.max_model_len
    llm.close()
