"""No drafts, fixed numbers of them and a schedule, on a Qwen3-8B shape with a random drafter.

Acceptance is synthetic (0.7, 0.5, 0.3, …): the text means nothing, the work is real. One engine
runs all of them in turns; "no drafts" keeps the drafter's context, as an engine must that may draft
again.

Run from the repository root: `python -m bench.engine.bench_schedule --out FILE`. `--points` writes
what `extkv bench schedule --result FILE --plot FILE.png` draws.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from extkv.bench.pairs import PairSettings, open_pair
from extkv.bench.provenance import provenance
from extkv.bench.schedule import SCHEDULED, ScheduleSettings, bench_schedule
from extkv.bench.verify_pin import VerifyPin
from extkv.engine.llm import LLM

from bench.timing import Report, argument_parser

if TYPE_CHECKING:
    import argparse
    from typing import Any

RATES = (0.7, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3)
BATCHES = (1, 8, 32, 128, 256)
FIXED = (1, 3, 5, 7)
LEAST_RATIO = 0.98


def make_pin(step_cost: Path | None) -> tuple[VerifyPin, dict[str, str]]:
    """Make the engine; its own schedule uses a table, or one that it measures as it starts."""
    pair = open_pair(
        PairSettings("qwen3-8b", has_random_drafter=True, device="cuda", max_model_len=4096)
    )
    speculative: dict[str, Any] = {
        "method": "dspark",
        "verification": "scheduled",
        "confidence": "acceptance",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(RATES),
    }
    if step_cost is not None:
        speculative["step_cost"] = step_cost
    llm = LLM(
        pair.target,
        pair.draft,
        speculative_config=speculative,
        device="cuda",
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
    )
    print(llm.sizing_plan)
    return VerifyPin(llm), provenance(pair)


def run(arguments: argparse.Namespace) -> None:
    """Measure every schedule at every batch size."""
    report = Report("bench_schedule", arguments)
    start = time.perf_counter()
    pin, source = make_pin(arguments.step_cost)
    report.add("start-up", "weights, graphs, costs", [(time.perf_counter() - start) * 1e6])

    def show(phase: str, done: int, total: int) -> None:
        if done % 10 == 0 or done == total:
            print(f"    {phase}: {done} of {total}", file=sys.stderr, flush=True)

    result = bench_schedule(
        pin,
        ScheduleSettings(
            num_requests=BATCHES[::2] if arguments.quick else tuple(arguments.batches),
            fixed_lens=FIXED[1::2] if arguments.quick else FIXED,
            num_warmup_steps=40,
            num_steps=60,
            num_rounds=1 if arguments.quick else 2,
            min_seconds=arguments.min_seconds,
            acceptance_rates=RATES,
        ),
        source,
        on_progress=show,
    )
    for point in result.points:
        extra = {
            "tokens_per_second": point.tokens_per_second,
            "tokens_per_second_per_user": point.tokens_per_second_per_user,
            "tokens_per_step": point.tokens_per_step,
            "tokens_per_second_of_rounds": point.rounds,
        }
        shape = f"batch {point.num_requests}, synthetic acceptance"
        report.add(shape, point.schedule, [point.step_us], extra=extra)
    print(result.table())
    for batch, ratio in result.over_best_other().items():
        report.at_least(f"batch {batch}: {SCHEDULED} over the best other", ratio, LEAST_RATIO)
    if arguments.points is not None:
        arguments.points.parent.mkdir(parents=True, exist_ok=True)
        arguments.points.write_text(result.to_json() + "\n", encoding="utf-8")
    report.finish()


def main() -> None:
    """Read the options and run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--step-cost", type=Path, help="table of `extkv profile`")
    parser.add_argument("--points", type=Path, help="write the points as JSON to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--min-seconds", type=float, default=1.5, help="of each measurement")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
