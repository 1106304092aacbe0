"""Time of preparing draft blocks in one launch against the plain torch operations.

Run from the repository root: `python -m bench.kernels.bench_draft_block_inputs --out FILE`.
"""

from __future__ import annotations

import torch
from extkv.kernels.draft_block_inputs import draft_block_inputs

from bench.kernels.replays import DEVICE, compare
from bench.timing import Report, argument_parser

BLOCK_SIZE, NUM_DRAFTS, MAX_BLOCKS, MAX_POSITION = 16, 7, 512, 8192
PEER, OURS = "torch operations", "extkv draft_block_inputs"


def run_case(report: Report, num_reqs: int, rounds: int) -> None:
    """Compare one batch size of full windows."""
    rows = NUM_DRAFTS + 1
    first = torch.randint(0, 8000, (num_reqs,), device=DEVICE)
    positions = (first[:, None] + torch.arange(rows, device=DEVICE)).flatten()
    starts = torch.arange(0, num_reqs * rows + 1, rows, dtype=torch.int32, device=DEVICE)
    rejected = torch.randint(0, rows, (num_reqs,), dtype=torch.int32, device=DEVICE)
    anchors = torch.randint(0, 1000, (num_reqs,), device=DEVICE)
    table = torch.randperm(num_reqs * MAX_BLOCKS, device=DEVICE).to(torch.int32)
    table = table.view(num_reqs, MAX_BLOCKS)
    query = torch.arange(NUM_DRAFTS, device=DEVICE)
    options = {
        "block_size": BLOCK_SIZE,
        "num_drafts": NUM_DRAFTS,
        "mask_token_id": 5,
        "vocab_size": 151_936,
        "max_position": MAX_POSITION,
    }
    out = draft_block_inputs(anchors, positions, starts, rejected, table, **options)

    def theirs() -> tuple[torch.Tensor, ...]:
        last = positions[starts[1:] - 1 - rejected]
        block = last[:, None] + 1 + query
        slots = table.gather(1, (block // BLOCK_SIZE).clamp_(max=MAX_BLOCKS - 1)) * BLOCK_SIZE
        slots = torch.where(block < MAX_POSITION, slots + block % BLOCK_SIZE, -1)
        tokens = torch.full_like(block, 5)
        tokens[:, 0] = anchors
        context = table.gather(1, positions.view(num_reqs, rows) // BLOCK_SIZE) * BLOCK_SIZE
        context = context + positions.view(num_reqs, rows) % BLOCK_SIZE
        kept = torch.arange(rows, device=DEVICE) < rows - rejected[:, None]
        return slots, tokens, block.clamp(max=MAX_POSITION - 1), torch.where(kept, context, -1)

    slots, tokens, clamped, context = theirs()
    found = (out.slots, out.token_ids, out.positions, out.context_slots.view(num_reqs, rows))
    for have, want in zip(found, (slots, tokens, clamped, context), strict=True):
        if not torch.equal(have, want):
            raise AssertionError("draft_block_inputs disagrees with torch")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in out)
    rows_of = compare(
        report,
        f"reqs={num_reqs} drafts={NUM_DRAFTS}",
        {
            PEER: [theirs],
            OURS: [
                lambda: draft_block_inputs(
                    anchors, positions, starts, rejected, table, **options, out=out
                )
            ],
        },
        num_bytes=num_bytes,
        rounds=rounds,
    )
    ratio = rows_of[OURS].time_ratio
    if ratio is not None:
        report.at_most(f"reqs={num_reqs}: time over torch", ratio, 0.5)


def main() -> None:
    """Compare batch sizes."""
    arguments = argument_parser(__doc__).parse_args()
    report = Report("bench_draft_block_inputs", arguments)
    for num_reqs in (1, 256) if arguments.quick else (1, 16, 64, 256):
        run_case(report, num_reqs, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
