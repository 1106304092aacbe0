"""Time of philox_uniforms against torch.rand of the same count, whose numbers depend on the batch.

Run from the repository root: `python -m bench.kernels.bench_philox --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.philox import Stream, philox_uniforms
from extkv.reference.philox import philox_uniforms as torch_ops

from bench.kernels.replays import DEVICE, compare
from bench.timing import Report, argument_parser


def run_case(report: Report, num_rows: int, rounds: int) -> None:
    """Compare one number of rows, four numbers each."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=DEVICE)
    positions = torch.randint(0, 2**20, (num_rows,), device=DEVICE)
    lanes = torch.arange(num_rows, device=DEVICE)
    out = torch.empty((num_rows, 4), device=DEVICE)
    arguments = (seeds, positions, Stream.DRAFT, lanes)
    if not torch.equal(philox_uniforms(*arguments), torch_ops(*arguments)):
        raise AssertionError("philox_uniforms disagrees with its reference")
    rows = compare(
        report,
        f"rows={num_rows}x4 fp32",
        {
            "torch rand": [lambda: torch.rand((num_rows, 4), device=DEVICE)],
            "extkv": [lambda: philox_uniforms(*arguments, out=out)],
        },
        num_bytes=num_rows * (3 * 8 + 4 * 4),
        rounds=rounds,
    )
    ratio = rows["extkv"].time_ratio
    if ratio is not None:
        report.at_most(f"{num_rows} rows, time over torch.rand", ratio, 2.0)


def main() -> None:
    """Compare few and many rows."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_philox", arguments)
    for num_rows in (256, 2**20) if arguments.quick else (1, 256, 2**16, 2**20):
        run_case(report, num_rows, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
