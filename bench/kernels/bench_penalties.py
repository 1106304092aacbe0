"""Time of penalties from packed entries against dense counts, which is what vLLM's sampler builds.

Run from the repository root: `python -m bench.kernels.bench_penalties --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.penalties import apply_penalties, mask_allowed_tokens

from bench.kernels.replays import DEVICE, compare
from bench.timing import Report, argument_parser

ENTRIES_PER_ROW = 1000


def dense_penalties(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor, penalty: torch.Tensor
) -> None:
    """Scatter counts into [num_rows, vocab_size] and change every logit."""
    dense = torch.zeros(logits.shape, dtype=torch.int64, device=DEVICE)
    dense.scatter_(1, token_ids, counts)
    is_seen = torch.zeros(logits.shape, dtype=torch.bool, device=DEVICE)
    is_seen.scatter_(1, token_ids, value=True)
    factor = torch.where(is_seen, penalty[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= penalty[:, None] * dense
    logits -= penalty[:, None] * (dense > 0)


def dense_mask(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Build the mask of tokens not allowed and fill it."""
    is_banned = torch.ones(logits.shape, dtype=torch.bool, device=DEVICE)
    is_banned.scatter_(1, token_ids, value=False)
    logits.masked_fill_(is_banned, -torch.inf)


def run_case(report: Report, num_rows: int, vocab_size: int, rounds: int) -> None:
    """Compare one number of rows."""
    logits = torch.randn((num_rows, vocab_size), device=DEVICE)
    chosen = torch.stack(
        [torch.randperm(vocab_size, device=DEVICE)[:ENTRIES_PER_ROW] for _ in range(num_rows)]
    )
    token_ids = chosen.sort(dim=1).values
    counts = torch.randint(0, 3, token_ids.shape, device=DEVICE)
    penalty = torch.full((num_rows,), 1.1, device=DEVICE)
    offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE) * ENTRIES_PER_ROW
    packed = token_ids.flatten().to(torch.int32)
    packed_counts = counts.flatten().to(torch.int32)

    def sparse(target: torch.Tensor) -> None:
        apply_penalties(
            target,
            packed,
            packed_counts,
            offsets,
            repetition=penalty,
            frequency=penalty,
            presence=penalty,
        )

    expected, found = logits.clone(), logits.clone()
    dense_penalties(expected, token_ids, counts, penalty)
    sparse(found)
    if not torch.allclose(found, expected, atol=1e-5):
        raise AssertionError("apply_penalties disagrees with the dense formula")
    shape = f"rows={num_rows} vocab={vocab_size} entries={ENTRIES_PER_ROW}"
    rows = compare(
        report,
        f"{shape} penalties",
        {
            "torch dense counts": [lambda: dense_penalties(logits, token_ids, counts, penalty)],
            "extkv apply_penalties": [lambda: sparse(logits)],
        },
        num_bytes=num_rows * ENTRIES_PER_ROW * (4 + 4 + 2 * 4),
        rounds=rounds,
    )
    masked = compare(
        report,
        f"{shape} allowed",
        {
            "torch dense mask": [lambda: dense_mask(logits, token_ids)],
            "extkv mask_allowed_tokens": [lambda: mask_allowed_tokens(logits, packed, offsets)],
        },
        num_bytes=num_rows * vocab_size * 4,
        rounds=rounds,
    )
    for row in (rows["extkv apply_penalties"], masked["extkv mask_allowed_tokens"]):
        if row.time_ratio is not None:
            report.at_most(f"{row.shape}, time over dense", row.time_ratio, 1.0)


def main() -> None:
    """Compare batch sizes at Qwen3's vocabulary."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_penalties", arguments)
    for num_rows in (1, 64) if arguments.quick else (1, 16, 64, 256):
        run_case(report, num_rows, 151_936, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
