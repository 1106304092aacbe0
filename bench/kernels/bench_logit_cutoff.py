"""Time of logit_cutoff against sorting, which is how vLLM's PyTorch sampler finds top-k and top-p.

Logits are drawn so that a nucleus of 0.95 has some hundred tokens.

Run from the repository root: `python -m bench.kernels.bench_logit_cutoff --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.logit_cutoff import logit_cutoff
from extkv.reference.logit_cutoff import logit_cutoff as torch_ops

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser


def sorted_mask(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask by sorting the whole row: top-k, then top-p, scattered back."""
    ordered, order = logits.sort(dim=-1, descending=False)
    kth = ordered.gather(1, (logits.shape[1] - top_k)[:, None])
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    mass = ordered.softmax(-1).cumsum(-1)
    is_removed = mass <= 1 - top_p[:, None]
    is_removed[:, -1] = False
    return ordered.masked_fill(is_removed, -torch.inf).scatter(1, order, ordered)


def run_case(report: Report, num_rows: int, vocab_size: int, rounds: int) -> None:
    """Compare top-k, top-p and both."""
    num_bytes = num_rows * vocab_size * 4
    num_sets = min(8, num_input_sets(num_bytes))
    logits = torch.randn((num_sets, num_rows, vocab_size), device=DEVICE) * 4
    temperature = torch.full((num_rows,), 0.8, device=DEVICE)
    every = torch.full((num_rows,), vocab_size, device=DEVICE)
    top_k = torch.full((num_rows,), 20, device=DEVICE)
    top_p = torch.full((num_rows,), 0.95, device=DEVICE)
    out = torch.empty(num_rows, device=DEVICE)
    found = logit_cutoff(logits[0], temperature, top_k=top_k)
    expected = torch_ops(logits[0], temperature, top_k=top_k)
    if not torch.equal(logits[0] >= found[:, None], logits[0] >= expected[:, None]):
        raise AssertionError("logit_cutoff disagrees with its reference")
    for name, counts, share in (
        ("top_k=20", top_k, torch.ones_like(top_p)),
        ("top_p=0.95", every, top_p),
        ("top_k=20 top_p=0.95", top_k, top_p),
    ):
        rows = compare(
            report,
            f"rows={num_rows} vocab={vocab_size} {name}",
            {
                "torch sort": [
                    lambda i=i, c=counts, s=share: sorted_mask(logits[i] / 0.8, c, s)
                    for i in range(num_sets)
                ],
                "extkv": [
                    lambda i=i, c=counts, s=share: logit_cutoff(
                        logits[i], temperature, top_k=c, top_p=s, out=out
                    )
                    for i in range(num_sets)
                ],
            },
            num_bytes=num_bytes,
            rounds=rounds,
        )
        ratio = rows["extkv"].time_ratio
        if ratio is not None:
            report.at_most(f"{rows['extkv'].shape}, time over sorting", ratio, 0.5)


def main() -> None:
    """Compare batch sizes at Qwen3's vocabulary."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_logit_cutoff", arguments)
    for num_rows in (1, 64) if arguments.quick else (1, 16, 64, 256):
        run_case(report, num_rows, 151_936, 5 if arguments.quick else 9)
    report.finish()


if __name__ == "__main__":
    main()
