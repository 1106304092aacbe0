"""What scheduling saves with a weak drafter and keeps with a strong one: a Qwen3-8B shape.

Acceptance is synthetic: weak, middling and strong drafters. The costs are measured at start-up, the
confidences are rates of acceptance. Goals: never below 0.97 of no drafts, never below 0.97 of every
draft verified.

Run from the repository root: `python -m bench.engine.bench_fallback --out FILE`.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from extkv.dspark.schedule import FixedSchedule
from extkv.engine.llm import LLM
from extkv.models import QWEN3_8B, GenerationDefaults, LoadedModel, kernel_ops, random_model
from extkv.models.dspark import drafter_config, random_drafter

from bench.engine.bench_decode import NumberTokenizer
from bench.engine.bench_drafting import NUM_DRAFTS, run_batch
from bench.timing import GIB, Report, argument_parser

if TYPE_CHECKING:
    from extkv.dspark.step_reports import SpeculationReport

RATES = {
    "weak": [0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1],
    "middling": [0.7, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3],
    "strong": [0.9, 0.85, 0.85, 0.8, 0.8, 0.8, 0.8],
}
NUM_TOKENS = {1: 200, 8: 200, 64: 150, 256: 60}
LEAST_RATIO = 0.97


def summary(reports: list[SpeculationReport]) -> dict[str, Any]:
    """Say what the schedule did."""
    decodes = [report for report in reports if report.num_requests and not report.num_other_tokens]
    errors = [
        report.measured_us / report.predicted_us
        for report in decodes
        if report.is_typical and report.predicted_us
    ]
    requests = sum(report.num_requests for report in decodes)
    return {
        "steps": len(decodes),
        "drafted": sum(report.has_drafted for report in decodes) / max(len(decodes), 1),
        "verified_per_request": sum(r.num_verified for r in decodes) / max(requests, 1),
        "accepted_length": sum(r.num_tokens for r in decodes) / max(requests, 1),
        "requested_trim": sum(report.requested_trim for report in decodes),
        "landed_trim": sum(report.landed_trim for report in decodes),
        "padding": sum(report.num_padding_tokens for report in decodes),
        "typical": len(errors),
        "measured_over_predicted": statistics.median(errors) if errors else None,
        "reasons": {
            reason: sum(report.reason.value == reason for report in decodes)
            for reason in {report.reason.value for report in decodes}
        },
    }


def main() -> None:
    """Measure without a drafter, then all three ways with one."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_fallback", arguments)
    torch.ones(1, device="cuda")
    ops = kernel_ops()
    target = random_model(
        QWEN3_8B, dtype=torch.bfloat16, device="cuda", max_model_len=4096, ops=ops
    )
    loaded = LoadedModel(Path("qwen3-8b"), target, NumberTokenizer(), None, GenerationDefaults())
    batches = (1, 64) if arguments.quick else tuple(NUM_TOKENS)
    plain, llm = {}, LLM(loaded, device="cuda", max_num_seqs=256)
    for batch in batches:
        plain[batch], times = run_batch(llm, batch, min(NUM_TOKENS[batch], 80))
        extra = {"tokens_per_second": plain[batch]}
        report.add("no drafter", f"batch {batch}", times, extra=extra)
    llm.close()
    del llm
    torch.cuda.empty_cache()
    draft = random_drafter(
        drafter_config(QWEN3_8B),
        target,
        dtype=torch.bfloat16,
        device="cuda",
        max_model_len=4096,
        ops=ops,
    )
    llm = LLM(
        loaded,
        draft,
        speculative_config={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": RATES["weak"],
            "verification": "scheduled",
            "confidence": "acceptance",
        },
        device="cuda",
        max_num_seqs=256,
    )
    print(llm.sizing_plan)
    print("seconds at start:", llm.startup_s)
    report.add("start", "step cost", [llm.startup_s["step cost"] * 1e6], extra=llm.startup_s)
    drafting = llm.engine.drafting
    assert drafting is not None
    schedules = {
        "none": FixedSchedule(NUM_DRAFTS, 0),
        "all": FixedSchedule(NUM_DRAFTS),
        "scheduled": drafting.schedule,
    }
    for drafter, rates in RATES.items():
        drafting._verifier._rates.copy_(torch.tensor(rates))  # noqa: SLF001 the bench looks inside
        for batch in batches:
            found = {}
            for name, schedule in schedules.items():
                if name == "none" and drafter != "weak":
                    continue
                drafting.schedule = schedule
                run_batch(llm, batch, 30)
                drafting.rounds.reports.clear()
                found[name], times = run_batch(llm, batch, NUM_TOKENS[batch])
                extra = {
                    "tokens_per_second": found[name],
                    "over_plain": found[name] / plain[batch],
                    **summary(list(drafting.rounds.reports)),
                }
                report.add(f"{drafter} drafter, {name}", f"batch {batch}", times, extra=extra)
                print(f"    {drafter} {name} batch {batch}: {extra}", flush=True)
            ours = found["scheduled"]
            label = f"{drafter} drafter, batch {batch}: scheduled over"
            report.at_least(f"{label} no drafts", ours / plain[batch], LEAST_RATIO)
            report.at_least(f"{label} all drafts", ours / found["all"], LEAST_RATIO)
    report.at_least("free after all, GiB", torch.cuda.mem_get_info()[0] / GIB, 0.2)
    report.finish()


if __name__ == "__main__":
    main()
