"""Random numbers that are a function of (seed, position, stream, lane): Philox4x32-10.

The key is the 64-bit seed. The counter is (lane, stream, low half of the position, high half), each
32 bits. So a draw does not depend on batch, slot, order or other requests, and no draw is used
twice. The generator is the one of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011); Triton's `tl.philox` gives the same words.
"""

from __future__ import annotations

import enum

import torch

_ROUNDS = 10
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_MASK = 0xFFFFFFFF
# On the host, so few rows take Python's integers less time than as many calls of tensor operations.
_FEW_ROWS = 24


class Stream(enum.IntEnum):
    """What a draw is for; draws of different streams are independent.

    Draws of `DRAFT` and `ACCEPT` have the draft's slot in its round as their lane, since the next
    round comes back to the same positions. `RESIDUAL` and `BONUS` have lane 0: a token of a
    position is emitted once.
    """

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def philox_words(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    lanes: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return four 32-bit words per row; see `extkv.kernels.philox.philox_words`."""
    if seeds.device.type == "cpu" and seeds.dim() == 1 and len(seeds) <= _FEW_ROWS:
        rows = zip(seeds.tolist(), positions.tolist(), lanes.tolist(), strict=True)
        words = [_words_of_row(seed, position, stream, lane) for seed, position, lane in rows]
        few = torch.tensor(words, dtype=torch.int64).view(-1, 4)
        return few if out is None else out.copy_(few)
    # 64-bit products wrap, and an arithmetic shift followed by the mask is a logical one.
    counter = [lanes & _MASK, torch.full_like(lanes, stream)]
    counter += [positions & _MASK, (positions >> 32) & _MASK]
    low_key, high_key = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(_ROUNDS):
        first, third = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            ((third >> 32) & _MASK) ^ counter[1] ^ low_key,
            third & _MASK,
            ((first >> 32) & _MASK) ^ counter[3] ^ high_key,
            first & _MASK,
        ]
        low_key = (low_key + _KEY_STEPS[0]) & _MASK
        high_key = (high_key + _KEY_STEPS[1]) & _MASK
    return torch.stack(counter, dim=1, out=out)


def _words_of_row(seed: int, position: int, stream: int, lane: int) -> tuple[int, int, int, int]:
    """Return the words of one row."""
    first, second, third, fourth = lane & _MASK, stream, position & _MASK, (position >> 32) & _MASK
    low_key, high_key = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (other >> 32) ^ second ^ low_key,
            other & _MASK,
            (one >> 32) ^ fourth ^ high_key,
            one & _MASK,
        )
        low_key, high_key = (low_key + _KEY_STEPS[0]) & _MASK, (high_key + _KEY_STEPS[1]) & _MASK
    return first, second, third, fourth


def philox_uniforms(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    lanes: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return four numbers in (0, 1) per row; see `extkv.kernels.philox.philox_uniforms`."""
    words = philox_words(seeds, positions, stream, lanes)
    return torch.mul((words >> 9).to(torch.float32) + 0.5, 2.0**-23, out=out)
