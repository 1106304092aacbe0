"""Cost tables that the simulations use.

The two made here were not measured by this project; `recorded` are those under bench/results.

`roofline_8b`: an 8-billion-parameter dense model in bf16 on one H200, by arithmetic: 16.4 GB of
weights at 4.0 TB/s, 16.4 GFLOP per token at 600 TFLOP/s, 1,024 tokens of context per request at
147 KB each, a five-layer draft pass.

`trtllm_log`: a large mixture-of-experts model as TensorRT-LLM's experiment log of August 2026
decomposes it: a step of 64 requests with 5 drafts takes 60 ms, of which 29.5 are fixed and 6.9 go
with requests; 320 and 384 tokens cost the same; a third fewer tokens save 8 %. Points below 256
tokens are assumed. The draft pass is taken out of the fixed part.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from extkv.dspark.cost import CostTable

if TYPE_CHECKING:
    from collections.abc import Callable

_RESULTS = Path(__file__).parents[1] / "results" / "sched"

_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


def roofline_8b() -> CostTable:
    """Return the dense model's table."""

    def token_us(tokens: int) -> float:
        memory_us, compute_us = 4100.0, 27.3 * tokens
        # The two overlap, but not fully.
        return float(round(max(memory_us, compute_us) + 0.15 * min(memory_us, compute_us), 1))

    return CostTable(
        token_us=tuple((tokens, token_us(tokens)) for tokens in _TOKENS),
        bias_us=350.0,
        request_us=((1, 38.0), (512, 19_400.0)),
        draft_us=((1, 900.0), (64, 1000.0), (512, 3600.0)),
        tiers=(1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)),
        source={"kind": "roofline arithmetic, not measured", "model": "8B dense, bf16, H200"},
    )


def trtllm_log() -> CostTable:
    """Return the mixture-of-experts model's table."""
    return CostTable(
        token_us=(
            (1, 3000.0),
            (64, 11_000.0),
            (128, 14_500.0),
            (256, 18_800.0),
            (320, 23_600.0),
            (384, 23_600.0),
            (768, 41_000.0),
            (3072, 160_000.0),
        ),
        bias_us=24_500.0,
        request_us=((1, 100.0), (64, 6900.0), (512, 55_000.0)),
        draft_us=((1, 4500.0), (64, 5000.0), (512, 9000.0)),
        tiers=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096),
        source={"kind": "after TensorRT-LLM's log, partly assumed", "model": "MoE, 8 GPUs"},
    )


def recorded() -> dict[str, Callable[[], CostTable]]:
    """Return the tables put together from benches, and those that `extkv profile` wrote."""
    paths = sorted(_RESULTS.glob("*_cost.json"))
    return {path.stem: (lambda path=path: CostTable.load(path)) for path in paths}


TABLES = {"roofline_8b": roofline_8b, "trtllm_log": trtllm_log, **recorded()}
