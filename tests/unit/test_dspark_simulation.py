"""Scheduling never loses: simulated loads from 1 to 512 requests, and drift of half."""

from __future__ import annotations

import pytest
from extkv.dspark.cost import CostTable
from extkv.dspark.simulation import Drift, World, compare

# Memory-bound up to a hundred tokens, then compute-bound; graphs in tiers.
TABLE = CostTable(
    token_us=((1, 4100.0), (64, 4500.0), (128, 5200.0), (256, 7600.0), (4096, 116_000.0)),
    bias_us=350.0,
    request_us=((1, 38.0), (512, 19_400.0)),
    draft_us=((1, 900.0), (64, 1000.0), (512, 3600.0)),
    tiers=(1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)),
)

DRIFTS = {
    "none": None,
    "tokens cost half more": Drift(verify=1.5),
    "tokens cost half": Drift(verify=0.5),
    "drafting costs half more": Drift(draft=1.5),
    "all costs half more": Drift(fixed=1.5, verify=1.5, draft=1.5),
    "acceptance halves": Drift(acceptance=0.5),
    "acceptance rises by half": Drift(acceptance=1.5),
}


@pytest.mark.parametrize("num_requests", [1, 8, 64, 512])
@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_a_schedule_keeps_up_with_the_best_other_choice(drift: Drift | None, num_requests: int):
    found = compare(
        TABLE,
        World(),
        num_requests,
        drift=drift,
        num_steps=300,
        num_warmup_steps=150,
        num_drift_steps=400,
    )
    assert found.ratio >= 0.98, found


def test_equal_seeds_give_equal_results():
    def run(seed: int) -> float:
        found = compare(TABLE, World(), 8, num_steps=50, num_warmup_steps=20, seed=seed)
        return found.scheduled

    assert run(1) == run(1)
    assert run(1) != run(2)
