"""Time of silu_and_mul against two torch operations.

Run from the repository root: `python -m bench.kernels.bench_silu_and_mul --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.silu_and_mul import silu_and_mul
from extkv.reference.silu_and_mul import silu_and_mul as torch_ops

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser


def run_case(report: Report, num_tokens: int, size: int, rounds: int) -> None:
    """Compare one shape."""
    num_bytes = 3 * num_tokens * size * 2
    num_sets = num_input_sets(num_bytes)
    gate_up = torch.randn((num_sets, num_tokens, 2 * size), dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty((num_sets, num_tokens, size), dtype=torch.bfloat16, device=DEVICE)
    if not torch.allclose(silu_and_mul(gate_up[0]), torch_ops(gate_up[0]), rtol=2e-2, atol=1e-3):
        raise AssertionError("silu_and_mul disagrees with its reference")
    indices = range(num_sets)
    rows = compare(
        report,
        f"tokens={num_tokens} size={size} bf16",
        {
            "torch silu, mul": [lambda i=i: torch_ops(gate_up[i], out=out[i]) for i in indices],
            "extkv": [lambda i=i: silu_and_mul(gate_up[i], out=out[i]) for i in indices],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    ratio = rows["extkv"].time_ratio
    if ratio is not None:
        report.at_most(f"{num_tokens} tokens, time over torch", ratio, 1.0)


def main() -> None:
    """Compare decode and prefill sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_silu_and_mul", arguments)
    for num_tokens in (1, 256) if arguments.quick else (1, 64, 256, 8192):
        run_case(report, num_tokens, 12_288, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
