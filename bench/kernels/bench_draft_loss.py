"""Time of draft_loss against its twin in torch, which makes five tensors of the logits' size.

Run from the repository root: `python -m bench.kernels.bench_draft_loss --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.draft_loss import draft_loss
from extkv.reference.draft_loss import draft_loss as torch_ops

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser


def run_case(report: Report, num_rows: int, vocab_size: int, rounds: int) -> None:
    """Compare one shape; gradients take the place of the logits, whose values do not matter."""
    # Each tensor read once and the gradient written once.
    num_bytes = 3 * num_rows * vocab_size * 2
    num_sets = num_input_sets(num_bytes)
    shape = (num_sets, num_rows, vocab_size)
    logits = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    target_logits = torch.randn(shape[1:], dtype=torch.bfloat16, device=DEVICE)
    rows = torch.arange(num_rows, device=DEVICE)
    labels = torch.randint(vocab_size, (num_rows,), device=DEVICE)
    weights = torch.rand(num_rows, device=DEVICE)
    ours = draft_loss(logits[0].clone(), target_logits, rows, labels, weights)
    theirs = torch_ops(logits[0].clone(), target_logits, rows, labels, weights)
    if not torch.allclose(ours.total_variation, theirs.total_variation, rtol=1e-3):
        raise AssertionError("draft_loss disagrees with its reference")
    indices = range(num_sets)
    found = compare(
        report,
        f"rows={num_rows} vocab={vocab_size} bf16",
        {
            "torch": [
                lambda i=i: torch_ops(logits[i], target_logits, rows, labels, weights)
                for i in indices
            ],
            "extkv": [
                lambda i=i: draft_loss(logits[i], target_logits, rows, labels, weights)
                for i in indices
            ],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    ratio = found["extkv"].time_ratio
    if ratio is not None:
        report.at_most(f"{num_rows} rows of {vocab_size}, time over torch", ratio, 0.3)


def main() -> None:
    """Compare the sizes of a chunk of training."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_draft_loss", arguments)
    for num_rows, vocab_size in ((1024, 49_152), (512, 151_936)):
        run_case(report, num_rows, vocab_size, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
