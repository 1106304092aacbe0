"""Time of rotary_embedding on queries and keys against torch operations.

Run from the repository root: `python -m bench.kernels.bench_rotary_embedding --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.rotary_embedding import rotary_embedding
from extkv.reference.rotary_embedding import rotary_embedding as torch_ops

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_POSITIONS = 32, 8, 128, 8192


def run_case(report: Report, num_tokens: int, rounds: int) -> None:
    """Compare one number of tokens, on the packed output of a projection."""
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    num_bytes = 2 * num_tokens * (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM * 2
    num_sets = num_input_sets(num_bytes)
    packed = torch.randn((num_sets, num_tokens, width), dtype=torch.bfloat16, device=DEVICE)
    heads = packed.unflatten(2, (-1, HEAD_DIM))
    query = heads[:, :, :NUM_HEADS]
    key = heads[:, :, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]
    angles = torch.rand((NUM_POSITIONS, HEAD_DIM // 2), device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,), device=DEVICE)
    mine, theirs = packed[0].clone(), packed[0].clone()
    for rotate, copy in ((rotary_embedding, mine), (torch_ops, theirs)):
        parts = copy.unflatten(1, (-1, HEAD_DIM))
        rotate(
            parts[:, :NUM_HEADS],
            parts[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS],
            cos,
            sin,
            positions,
        )
    if not float((mine - theirs).abs().max()) < 0.1:
        raise AssertionError("rotary_embedding disagrees with its reference")
    indices = range(num_sets)
    rows = compare(
        report,
        f"tokens={num_tokens} heads={NUM_HEADS}+{NUM_KV_HEADS}x{HEAD_DIM} bf16",
        {
            "torch ops": [
                lambda i=i: torch_ops(query[i], key[i], cos, sin, positions) for i in indices
            ],
            "extkv": [
                lambda i=i: rotary_embedding(query[i], key[i], cos, sin, positions) for i in indices
            ],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    ratio = rows["extkv"].time_ratio
    if ratio is not None:
        report.at_most(f"{num_tokens} tokens, time over torch ops", ratio, 0.5)


def main() -> None:
    """Compare decode and prefill sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_rotary_embedding", arguments)
    for num_tokens in (1, 256) if arguments.quick else (1, 64, 256, 8192):
        run_case(report, num_tokens, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
