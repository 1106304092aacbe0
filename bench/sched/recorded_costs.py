"""The cost table that the engine's recorded benches add up to.

`bench_decode` has steps without drafts, `bench_drafting` steps that verify 7 drafts of every
request and the draft round alone. θ is a step without drafts, and at 512 tokens the drafting step
less its draft round; what goes with requests is part of θ, since a step without drafts has as many
requests as tokens. Texts are short, so context costs nothing here.

Run from the repository root to make the file again: `python -m bench.sched.recorded_costs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from extkv.dspark.cost import CostTable

RESULTS = Path(__file__).parents[1] / "results"
DECODE = RESULTS / "engine" / "h200_decode.json"
DRAFTING = RESULTS / "engine" / "h200_drafting.json"
OUT = RESULTS / "sched" / "h200_benches_cost.json"
NUM_DRAFTS = 7
# Of the engine's decode graphs without drafts; more tokens run as they are.
TIERS = (1, 2, 4, *range(8, 257, 8))


def table_of(decode: dict[str, Any], drafting: dict[str, Any]) -> CostTable:
    """Return the table of two recorded benches."""
    plain = _medians(decode, "decode step")
    with_drafts = _medians(drafting, "step with drafts")
    rounds = {
        _batch(row): row["extra"]["draft_round_us"]
        for row in drafting["rows"]
        if row["shape"] == "step with drafts"
    }
    largest = max(with_drafts)
    token_us = dict(plain)
    token_us[largest * (1 + NUM_DRAFTS)] = with_drafts[largest] - rounds[largest]
    return CostTable(
        token_us=tuple((at, round(us, 1)) for at, us in sorted(token_us.items())),
        draft_us=tuple((at, round(us, 1)) for at, us in sorted(rounds.items())),
        tiers=TIERS,
        source={
            "kind": "medians of recorded benches, put together by bench.sched.recorded_costs",
            "files": f"{DECODE.name}, {DRAFTING.name}",
            "device": decode["environment"]["gpu"],
            "driver": decode["environment"]["gpu_state_at_start"].split(",")[0],
            "commit": decode["environment"]["commit"],
            "model": "Qwen3-8B shape, random bfloat16 weights",
            "draft": "published drafter shape, random weights",
            "num_drafts": str(NUM_DRAFTS),
        },
    )


def _medians(result: dict[str, Any], shape: str) -> dict[int, float]:
    rows = [row for row in result["rows"] if row["shape"] == shape and "batch" in row["name"]]
    return {_batch(row): row["summary"]["median_us"] for row in rows}


def _batch(row: dict[str, Any]) -> int:
    return int(row["name"].removeprefix("batch "))


def main() -> None:
    """Write the table."""
    decode, drafting = (json.loads(path.read_text("utf-8")) for path in (DECODE, DRAFTING))
    table_of(decode, drafting).save(OUT)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
