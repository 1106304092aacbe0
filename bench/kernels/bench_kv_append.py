"""Time of kv_append against torch's index_put into the same paged cache.

Run from the repository root: `python -m bench.kernels.bench_kv_append --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.kv_append import kv_append
from extkv.reference.kv_append import kv_append as index_put

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser

NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16


def main() -> None:
    """Compare decode and prefill sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_kv_append", arguments)
    for num_tokens in (1, 256) if arguments.quick else (1, 16, 64, 256, 2048, 8192):
        num_bytes = 4 * num_tokens * NUM_HEADS * HEAD_DIM * 2 + 8 * num_tokens
        num_sets = num_input_sets(num_bytes)
        num_blocks = 2 * num_tokens // BLOCK_SIZE + 64
        caches = torch.zeros(
            (num_sets, 2, num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_DIM),
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        tokens = torch.randn(
            (num_sets, 2, num_tokens, NUM_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE
        )
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[:num_tokens]
        blocks, positions = slots // BLOCK_SIZE, slots % BLOCK_SIZE

        def put(
            index: int,
            tokens: torch.Tensor = tokens,
            caches: torch.Tensor = caches,
            blocks: torch.Tensor = blocks,
            positions: torch.Tensor = positions,
        ) -> None:
            caches[index, 0].index_put_((blocks, positions), tokens[index, 0])
            caches[index, 1].index_put_((blocks, positions), tokens[index, 1])

        def append(
            index: int,
            tokens: torch.Tensor = tokens,
            caches: torch.Tensor = caches,
            slots: torch.Tensor = slots,
        ) -> None:
            kv_append(*tokens[index], *caches[index], slots)

        append(0)
        expected = torch.zeros_like(caches[0])
        index_put(*tokens[0], *expected, slots)
        if not torch.equal(caches[0], expected):
            raise AssertionError("kv_append disagrees with its reference")
        rows = compare(
            report,
            f"tokens={num_tokens} heads={NUM_HEADS}x{HEAD_DIM} bf16",
            {
                "torch index_put": [lambda i=i: put(i) for i in range(num_sets)],
                "extkv kv_append": [lambda i=i: append(i) for i in range(num_sets)],
            },
            num_bytes=num_bytes,
            rounds=5 if arguments.quick else 15,
        )
        ratio = rows["extkv kv_append"].time_ratio
        if ratio is not None:
            report.at_most(f"{num_tokens} tokens, time over index_put", ratio, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
