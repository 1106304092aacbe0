"""Windows of drafts for verification: ragged, with a greedy request, a hole and an empty window."""

from __future__ import annotations

from typing import Any

import torch
from extkv.drafting import DraftLaw
from extkv.reference.markov_step import markov_step

NUM_DRAFTS = 3
# Rows of each request; a draft less, except that an empty window is padding.
WINDOWS = (3, 0, 2, 1, 4, 4, 4)
GREEDY_REQUEST, HOLED_REQUEST = 4, 5


def make_windows(
    vocab_size: int,
    device: torch.device,
    *,
    windows: tuple[int, ...] = WINDOWS,
    num_drafts: int = NUM_DRAFTS,
    rank: int = 8,
    base_dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype = torch.float32,
    target_dtype: torch.dtype = torch.float32,
    sharpness: float = 1.0,
) -> dict[str, Any]:
    """Return arguments of `verify_drafts` with drafts drawn from their law.

    The target resembles the draft, so that some drafts are accepted.
    """
    generator = torch.Generator().manual_seed(vocab_size + len(windows))
    num_reqs = len(windows)
    starts = torch.tensor([0, *windows]).cumsum(0)
    request = torch.arange(num_reqs).repeat_interleave(torch.tensor(windows))
    index = torch.arange(len(request)) - starts[request]

    base = (torch.randn(num_reqs, num_drafts, vocab_size, generator=generator) * sharpness).to(
        base_dtype
    )
    projection = (torch.randn(vocab_size, rank, generator=generator) * 0.2).to(head_dtype)
    embedding = torch.randn(vocab_size, rank, generator=generator).to(head_dtype)
    heat = torch.rand(num_reqs, generator=generator) + 0.6
    if num_reqs > GREEDY_REQUEST:
        heat[GREEDY_REQUEST] = 0
    seeds = torch.arange(num_reqs) * 977 + 5
    first = torch.arange(num_reqs) * 10 + 100
    anchors = torch.randint(0, vocab_size, (num_reqs,), generator=generator)

    base, projection, embedding = base.to(device), projection.to(device), embedding.to(device)
    heat, seeds, first, anchors = (t.to(device) for t in (heat, seeds, first, anchors))
    drafts = [anchors]
    values = torch.full((2, num_reqs, num_drafts), torch.nan, device=device)
    for slot in range(num_drafts):
        drawn = markov_step(
            base[:, slot],
            projection,
            heat,
            seeds,
            first + slot + 1,
            slot=slot,
            tokens=drafts[-1],
            embedding=embedding,
        )
        drafts.append(drawn.tokens)
        values[0, :, slot], values[1, :, slot] = drawn.logits, drawn.log_sum_exp
    request, index = request.to(device), index.to(device)
    token_ids = torch.stack(drafts, dim=1)[request, index]
    if num_reqs > HOLED_REQUEST:
        token_ids[int(starts[HOLED_REQUEST]) + 2] = -1
    noise = torch.randn(len(request), vocab_size, generator=generator).to(device) * 0.7
    target = base[request, index.clamp(max=num_drafts - 1)].to(torch.float32) + noise
    return {
        "target_logits": target.to(target_dtype),
        "token_ids": token_ids,
        "window_starts": starts.to(device, torch.int32),
        "temperature": heat[request],
        "seeds": seeds[request],
        "positions": first[request] + index + 1,
        "draft": DraftLaw(base, values[0], values[1], projection, embedding),
        "max_num_drafts": num_drafts,
    }
