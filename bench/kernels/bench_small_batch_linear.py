"""Products of few tokens with what is around them, against cuBLAS and the kernels they replace.

One case is half a decoder layer of the Qwen3-8B shape: a product into the residual stream, the
normalisation after it, and the product that comes next, gated or not.

Run from the repository root: `python -m bench.kernels.bench_small_batch_linear --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.rms_norm import rms_norm
from extkv.kernels.silu_and_mul import silu_and_mul
from extkv.kernels.small_batch_linear import small_batch_add_linear, small_batch_linear
from torch.nn import functional

from bench.kernels.replays import DEVICE, compare, copy_gb_per_s
from bench.timing import Report, argument_parser

EPS = 1e-6
HIDDEN, INTERMEDIATE, QKV = 4096, 12_288, 6144
NUM_SETS = 4
PEER, OURS = "cuBLAS, rms_norm, silu_and_mul", "extkv small_batch_linear"


def run_case(
    report: Report, num_tokens: int, sizes: tuple[int, int], rounds: int, *, is_gated: bool
) -> float:
    """Compare one half of a layer and return the time over the peer's."""
    in_size, out_size = sizes
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    into = torch.randn(NUM_SETS, HIDDEN, in_size, **options) * in_size**-0.5
    after = torch.randn(NUM_SETS, out_size * (2 if is_gated else 1), HIDDEN, **options)
    after *= HIDDEN**-0.5
    residual = torch.randn(num_tokens, HIDDEN, **options)
    values = torch.randn(num_tokens, in_size, **options)
    norm = torch.ones(HIDDEN, **options)

    def ours(index: int, stream: torch.Tensor = residual) -> torch.Tensor:
        rows = small_batch_add_linear(stream, values, into[index], norm=norm, eps=EPS)
        return small_batch_linear(rows, after[index], is_gated=is_gated)

    def theirs(index: int, stream: torch.Tensor = residual) -> torch.Tensor:
        added = functional.linear(values, into[index])
        normed = rms_norm(added, norm, EPS, residual=stream)
        products = functional.linear(normed, after[index])
        return silu_and_mul(products) if is_gated else products

    difference = ours(0, residual.clone()).float() - theirs(0, residual.clone()).float()
    if not float(difference.abs().max()) < 0.1:
        raise AssertionError("small_batch_linear disagrees with cuBLAS")
    shape = (
        f"tokens={num_tokens} {in_size}->{HIDDEN}->{out_size}{' gated' if is_gated else ''} bf16"
    )
    sets = range(NUM_SETS)
    rows = compare(
        report,
        shape,
        {PEER: [lambda i=i: theirs(i) for i in sets], OURS: [lambda i=i: ours(i) for i in sets]},
        num_bytes=(into[0].numel() + after[0].numel()) * 2,
        rounds=rounds,
    )
    ratio = rows[OURS].time_ratio
    return 1.0 if ratio is None else ratio


def main() -> None:
    """Compare both halves of a layer at several batch sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_small_batch_linear", arguments)
    print(f"copy bandwidth {copy_gb_per_s():.0f} GB/s, bytes read plus bytes written")
    rounds = 5 if arguments.quick else 15
    for num_tokens in (1, 16) if arguments.quick else (1, 4, 8, 16):
        for name, sizes, is_gated in (
            ("attention output and MLP input", (HIDDEN, INTERMEDIATE), True),
            ("MLP output and attention input", (INTERMEDIATE, QKV), False),
        ):
            ratio = run_case(report, num_tokens, sizes, rounds, is_gated=is_gated)
            report.at_most(f"{num_tokens} tokens, {name}: time over cuBLAS", ratio, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
