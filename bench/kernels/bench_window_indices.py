"""Time of window index lists in one launch against the plain torch operations.

Run from the repository root: `python -m bench.kernels.bench_window_indices --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.window_indices import window_indices, window_width

from bench.kernels.replays import DEVICE, compare
from bench.timing import Report, argument_parser

WINDOW, NUM_QUERIES, BLOCK_SIZE, MAX_BLOCKS = 128, 5, 64, 128
PEER, OURS = "torch operations", "extkv window_indices"


def run_case(report: Report, num_reqs: int, rounds: int) -> None:
    """Compare one batch size."""
    anchors = torch.randint(0, 8000, (num_reqs,), device=DEVICE)
    table = torch.randperm(num_reqs * MAX_BLOCKS, device=DEVICE).to(torch.int32)
    table = table.view(num_reqs, MAX_BLOCKS)
    index = torch.arange(window_width(WINDOW, NUM_QUERIES), device=DEVICE)
    options = {
        "window": WINDOW,
        "num_queries": NUM_QUERIES,
        "block_size": BLOCK_SIZE,
        "max_position": MAX_BLOCKS * BLOCK_SIZE,
    }
    out = window_indices(anchors, table, **options)

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        first = (anchors - WINDOW).clamp(min=0)
        lengths = anchors + NUM_QUERIES - first
        seen = first[:, None] + index
        slots = table.gather(1, (seen // BLOCK_SIZE).clamp_(max=MAX_BLOCKS - 1)) * BLOCK_SIZE
        slots = torch.where(index < lengths[:, None], slots + seen % BLOCK_SIZE, -1)
        return (
            slots.to(torch.int32).repeat_interleave(NUM_QUERIES, 0),
            lengths.to(torch.int32).repeat_interleave(NUM_QUERIES),
        )

    for have, want in zip(out, theirs(), strict=True):
        if not torch.equal(have, want):
            raise AssertionError("window_indices disagrees with torch")
    rows = compare(
        report,
        f"reqs={num_reqs} window={WINDOW} queries={NUM_QUERIES}",
        {PEER: [theirs], OURS: [lambda: window_indices(anchors, table, **options, out=out)]},
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in out),
        rounds=rounds,
    )
    ratio = rows[OURS].time_ratio
    if ratio is not None:
        report.at_most(f"reqs={num_reqs}: time over torch", ratio, 0.5)


def main() -> None:
    """Compare batch sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_window_indices", arguments)
    for num_reqs in (1, 256) if arguments.quick else (1, 16, 64, 256):
        run_case(report, num_reqs, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
