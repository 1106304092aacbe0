"""Throughput of a schedule against no drafts and fixed numbers of them, simulated, load by load.

Besides: what probes cost in a short run where no drafts are best, and how many steps pass until
drafting is taken up again when acceptance has recovered.

No device is measured: costs are the tables of `cost_tables.py`, some of them recorded. Times in the
rows are simulated microseconds per generated token. Run from the repository root:
`python -m bench.sched.bench_simulation --out FILE`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.dspark.simulation import Comparison, Drift, World, compare, steps_until_return

from bench.sched.cost_tables import TABLES
from bench.timing import Report, argument_parser

if TYPE_CHECKING:
    from extkv.dspark.cost import CostTable

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_LOADS = (1, 16, 128, 512)
LEAST_RATIO = 0.98

DRIFTS: dict[str, Drift | None] = {
    "as measured": None,
    "verify +50 %": Drift(verify=1.5),
    "verify -50 %": Drift(verify=0.5),
    "draft +50 %": Drift(draft=1.5),
    "draft -50 %": Drift(draft=0.5),
    "fixed +50 %": Drift(fixed=1.5),
    "fixed -50 %": Drift(fixed=0.5),
    "all +50 %": Drift(fixed=1.5, verify=1.5, draft=1.5),
    "all -50 %": Drift(fixed=0.5, verify=0.5, draft=0.5),
    "acceptance -50 %": Drift(acceptance=0.5),
    "acceptance +50 %": Drift(acceptance=1.5),
    "verify +50 %, acceptance -50 %": Drift(verify=1.5, acceptance=0.5),
}
# Acceptance of a typical draft, as a logit, with which no drafts are best from 128 requests on.
POOR_LOGIT = -0.5
SHORT_LOADS = (128, 256, 512)
LEAST_SHORT_RATIO = 0.985
RETURN_LOADS = (4, 32, 64)
MOST_STEPS_TO_RETURN = 512 + 16 * 8


def add_rows(report: Report, shape: str, planner: str, found: Comparison) -> None:
    """Add the best of the others and the schedule."""
    others = {"no drafts": found.no_drafts}
    others |= {f"fixed {k}": rate for k, rate in enumerate(found.fixed, start=1)}
    best = max(others, key=lambda name: others[name])
    peer = report.add(shape, f"best other: {best}", [1e6 / others[best]])
    stats = found.stats
    extra = {
        "tokens_per_s": {**others, "scheduled": found.scheduled},
        "drafting_steps": stats.num_drafting_steps / stats.num_steps,
        "accepted_per_verified": stats.num_accepted / max(stats.num_verified, 1),
        "fallbacks": stats.num_fallbacks,
        "returns": stats.num_returns,
        "probes": stats.num_probes,
        "requested_trim": stats.requested_trim,
        "landed_trim": stats.landed_trim,
        "padding_tokens": stats.num_padding_tokens,
    }
    report.add(shape, f"scheduled: {planner}", [1e6 / found.scheduled], peer=peer, extra=extra)


def add_short_runs(report: Report, table_name: str, table: CostTable) -> None:
    """Add runs of 160 steps after 40, with few probes."""
    worst = float("inf")
    for num_requests in SHORT_LOADS:
        world = World(mean_logit=POOR_LOGIT)
        found = compare(table, world, num_requests, num_steps=160, num_warmup_steps=40)
        add_rows(report, f"{table_name}, 160 steps, requests={num_requests}", "lagged", found)
        worst = min(worst, found.ratio)
    name = f"{table_name}, 160 steps of poor drafts: worst scheduled / best other"
    report.at_least(name, worst, LEAST_SHORT_RATIO)


def add_returns(report: Report, table_name: str, table: CostTable, num_seeds: int) -> None:
    """Add the steps until drafting is taken up again."""
    for num_requests in RETURN_LOADS:
        found = [
            steps_until_return(table, World(), num_requests, acceptance=0.1, seed=seed)
            for seed in range(num_seeds)
        ]
        steps = [number for number in found if number is not None]
        if not steps:
            continue
        name = f"{table_name}, acceptance back from a tenth, requests={num_requests}"
        print(f"    {name}: {sorted(steps)} steps")
        report.at_most(f"{name}: most steps to return", max(steps), MOST_STEPS_TO_RETURN)


def main() -> None:
    """Sweep loads and drifts; the target is the worst ratio of each sweep."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_simulation", arguments)
    loads = QUICK_LOADS if arguments.quick else LOADS
    for table_name, table in TABLES.items():
        for planner in ("lagged", "greedy"):
            for drift_name, drift in DRIFTS.items():
                if planner == "greedy" and drift is not None:
                    continue
                worst = float("inf")
                for num_requests in loads:
                    found = compare(
                        table(),
                        World(),
                        num_requests,
                        drift=drift,
                        planner=planner,
                        # Tokens of few requests vary much: they need more steps.
                        num_steps=max(400, 2000 // num_requests),
                        num_warmup_steps=200,
                        num_drift_steps=400,
                    )
                    shape = f"{table_name}, {drift_name}, requests={num_requests}"
                    add_rows(report, shape, planner, found)
                    worst = min(worst, found.ratio)
                name = f"{table_name}, {drift_name}, {planner}: worst scheduled / best other"
                report.at_least(name, worst, LEAST_RATIO)
        if table_name.startswith("h200"):
            add_short_runs(report, table_name, table())
            add_returns(report, table_name, table(), 2 if arguments.quick else 6)
    report.finish()


if __name__ == "__main__":
    main()
