"""Throughput of a schedule against no drafts and fixed numbers of them, simulated, load by load.

No device is measured: costs are the tables of `cost_tables.py`, some of them recorded. Times in the
rows are simulated microseconds per generated token. Run from the repository root:
`python -m bench.sched.bench_simulation --out FILE`.
"""

from __future__ import annotations

from extkv.dspark.simulation import Comparison, Drift, World, compare

from bench.sched.cost_tables import TABLES
from bench.timing import Report, argument_parser

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
}


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
                        num_steps=400,
                        num_warmup_steps=200,
                        num_drift_steps=400,
                    )
                    shape = f"{table_name}, {drift_name}, requests={num_requests}"
                    add_rows(report, shape, planner, found)
                    worst = min(worst, found.ratio)
                name = f"{table_name}, {drift_name}, {planner}: worst scheduled / best other"
                report.at_least(name, worst, LEAST_RATIO)
    report.finish()


if __name__ == "__main__":
    main()
