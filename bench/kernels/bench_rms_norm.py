"""Time of rms_norm against torch's own rms_norm, and of the fused residual sum against two steps.

Run from the repository root: `python -m bench.kernels.bench_rms_norm --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.rms_norm import rms_norm
from extkv.reference.rms_norm import rms_norm as torch_ops
from torch.nn import functional

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser

EPS = 1e-6


def run_case(report: Report, num_tokens: int, size: int, rounds: int) -> None:
    """Compare with and without the residual."""
    num_bytes = 2 * num_tokens * size * 2
    num_sets = num_input_sets(num_bytes)
    shape = (num_sets, num_tokens, size)
    hidden, residual, out = torch.randn((3, *shape), dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(size, dtype=torch.bfloat16, device=DEVICE)
    difference = rms_norm(hidden[0], weight, EPS).float() - torch_ops(hidden[0], weight, EPS)
    if not float(difference.abs().max()) < 0.1:
        raise AssertionError("rms_norm disagrees with its reference")

    def add_then_norm(index: int) -> torch.Tensor:
        total = residual[index].add_(hidden[index])
        return functional.rms_norm(total, (size,), weight, EPS)

    def fused(index: int) -> torch.Tensor:
        return rms_norm(hidden[index], weight, EPS, residual=residual[index], out=out[index])

    name = f"tokens={num_tokens} size={size} bf16"
    indices = range(num_sets)
    plain = compare(
        report,
        name,
        {
            "torch rms_norm": [
                lambda i=i: functional.rms_norm(hidden[i], (size,), weight, EPS) for i in indices
            ],
            "torch ops": [lambda i=i: torch_ops(hidden[i], weight, EPS) for i in indices],
            "extkv": [lambda i=i: rms_norm(hidden[i], weight, EPS, out=out[i]) for i in indices],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    both = compare(
        report,
        f"{name} residual",
        {
            "torch add_ + rms_norm": [lambda i=i: add_then_norm(i) for i in indices],
            "extkv fused": [lambda i=i: fused(i) for i in indices],
        },
        num_bytes=2 * num_bytes,
        rounds=rounds,
    )
    for row in (plain["extkv"], both["extkv fused"]):
        if row.time_ratio is not None:
            report.at_most(f"{row.shape}, time over torch", row.time_ratio, 1.0)


def main() -> None:
    """Compare decode and prefill sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_rms_norm", arguments)
    for num_tokens in (1, 256) if arguments.quick else (1, 64, 256, 8192):
        for size in (4096,) if arguments.quick else (576, 4096):
            run_case(report, num_tokens, size, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
