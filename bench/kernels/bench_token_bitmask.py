"""Time of grammar masks from words of bits, against a mask of booleans spread by torch.

Run from the repository root: `python -m bench.kernels.bench_token_bitmask --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.token_bitmask import apply_token_bitmask

from bench.kernels.replays import DEVICE, compare
from bench.timing import Report, argument_parser

# Shares of allowed tokens: inside a string of JSON nearly all, at its punctuation nearly none.
ALLOWED = {"few": 0.001, "half": 0.5, "most": 0.99}


def spread_mask(logits: torch.Tensor, bitmask: torch.Tensor, lanes: torch.Tensor) -> None:
    """Spread words into booleans and fill."""
    is_allowed = ((bitmask[:, :, None] >> lanes) & 1).bool().flatten(1)
    logits.masked_fill_(~is_allowed[:, : logits.shape[1]], -torch.inf)


def words_of(num_rows: int, vocab_size: int, allowed: float) -> torch.Tensor:
    """Return words (int32, [num_rows, ceil(vocab_size / 32)]) with a share of bits set."""
    lanes = torch.arange(32, device=DEVICE)
    bits = torch.rand((num_rows, -(-vocab_size // 32), 32), device=DEVICE) < allowed
    words = (bits.to(torch.int64) << lanes).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def run_case(report: Report, num_rows: int, vocab_size: int, allowed: str, rounds: int) -> None:
    """Compare one number of rows."""
    share = ALLOWED[allowed]
    logits = torch.randn((num_rows, vocab_size), device=DEVICE)
    bitmask = words_of(num_rows, vocab_size, share)
    rows = torch.arange(num_rows, device=DEVICE)
    lanes = torch.arange(32, dtype=torch.int32, device=DEVICE)
    expected, found = logits.clone(), logits.clone()
    spread_mask(expected, bitmask, lanes)
    apply_token_bitmask(found, bitmask, rows)
    if not torch.equal(found, expected):
        raise AssertionError("apply_token_bitmask disagrees with the mask of booleans")
    measured = compare(
        report,
        f"rows={num_rows} vocab={vocab_size} allowed={allowed}",
        {
            "torch booleans": [lambda: spread_mask(logits, bitmask, lanes)],
            "extkv apply_token_bitmask": [lambda: apply_token_bitmask(logits, bitmask, rows)],
        },
        # Words are read, logits of forbidden tokens written.
        num_bytes=int(num_rows * vocab_size * (1 / 8 + 4 * (1 - share))),
        rounds=rounds,
    )
    row = measured["extkv apply_token_bitmask"]
    if row.time_ratio is not None:
        report.at_most(f"{row.shape}, time over booleans", row.time_ratio, 1.0)


def main() -> None:
    """Compare numbers of rows at Qwen3's vocabulary; 512 are 64 windows of 7 drafts."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_token_bitmask", arguments)
    for num_rows in (1, 64) if arguments.quick else (1, 16, 64, 256, 512):
        for allowed in ("few",) if arguments.quick else ALLOWED:
            run_case(report, num_rows, 151_936, allowed, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
