"""Time of greedy and random sampling against torch on the same logits.

The random peer is what vLLM's PyTorch sampler does: softmax, exponential noise per logit, arg-max.

Run from the repository root: `python -m bench.kernels.bench_sampling --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.sampling import argmax_tokens, sample_tokens, sampling_workspace_size
from extkv.reference.sampling import argmax_tokens as torch_argmax

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser


def exponential_race(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Draw a token per row with one random number per logit."""
    probabilities = (logits / temperature[:, None]).softmax(-1, dtype=torch.float32)
    noise = torch.empty_like(probabilities).exponential_()
    return probabilities.div_(noise).argmax(-1)


def run_case(report: Report, num_rows: int, vocab_size: int, rounds: int) -> None:
    """Compare one shape."""
    num_bytes = num_rows * vocab_size * 4
    num_sets = num_input_sets(num_bytes)
    logits = torch.randn((num_sets, num_rows, vocab_size), device=DEVICE) * 3
    temperature = torch.full((num_rows,), 0.8, device=DEVICE)
    seeds = torch.arange(num_rows, device=DEVICE)
    size = sampling_workspace_size(num_rows, vocab_size)
    workspace = torch.empty(size, dtype=torch.float32, device=DEVICE)
    out = (
        torch.empty(num_rows, dtype=torch.int64, device=DEVICE),
        torch.empty(num_rows, dtype=torch.int32, device=DEVICE),
    )
    if not torch.equal(argmax_tokens(logits[0])[0], torch_argmax(logits[0])[0]):
        raise AssertionError("argmax_tokens disagrees with its reference")

    def draw(index: int) -> object:
        return sample_tokens(logits[index], temperature, seeds, seeds, workspace=workspace, out=out)

    shape = f"rows={num_rows} vocab={vocab_size} fp32"
    indices = range(num_sets)
    greedy = compare(
        report,
        f"{shape} greedy",
        {
            "torch argmax": [lambda i=i: logits[i].argmax(-1) for i in indices],
            "extkv argmax_tokens": [
                lambda i=i: argmax_tokens(logits[i], workspace=workspace, out=out) for i in indices
            ],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    drawn = compare(
        report,
        f"{shape} T=0.8",
        {
            "torch softmax, noise, argmax": [
                lambda i=i: exponential_race(logits[i], temperature) for i in indices
            ],
            "extkv sample_tokens": [lambda i=i: draw(i) for i in indices],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    for row in (greedy["extkv argmax_tokens"], drawn["extkv sample_tokens"]):
        if row.time_ratio is not None:
            report.at_most(f"{row.shape}, time over torch", row.time_ratio, 1.0)


def main() -> None:
    """Compare batch sizes at Qwen3's vocabulary."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_sampling", arguments)
    for num_rows in (1, 64) if arguments.quick else (1, 16, 64, 256):
        run_case(report, num_rows, 151_936, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
