"""Gated activation: SiLU of the first half of each row times the second half."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply SiLU of the gate by the rest; see `extkv.kernels.silu_and_mul.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(functional.silu(gate), up, out=out)
