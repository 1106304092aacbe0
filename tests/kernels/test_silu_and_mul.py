"""Gated SiLU activation."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels.silu_and_mul import silu_and_mul
from extkv.reference import silu_and_mul as reference

# Relative to values up to 16: two roundings; the interpreter rounds bfloat16 towards zero.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normal numbers, some of them large."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 4).to(device, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("size", [1, 64, 1030])
def test_equals_the_reference(size: int, dtype: torch.dtype, device: torch.device):
    gate_up = random(3, 2 * size, dtype=dtype, device=device)
    found, expected = silu_and_mul(gate_up), reference.silu_and_mul(gate_up)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=TOLERANCES[dtype])


def test_equals_the_formula(device: torch.device):
    gate_up = random(5, 200, dtype=torch.float32, device=device)
    gate, up = gate_up.to(torch.float64).chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    for op in (silu_and_mul, reference.silu_and_mul):
        assert float((op(gate_up).to(torch.float64) - expected).abs().max()) < 1e-5


def test_extreme_gates_stay_finite(device: torch.device):
    gate_up = torch.tensor([[-1e4, 1e4, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    expected = torch.tensor([[0.0, 1e4, 0.0, 0.0]], device=device)
    for op in (silu_and_mul, reference.silu_and_mul):
        torch.testing.assert_close(op(gate_up), expected, atol=1e-30, rtol=1e-6)


def test_takes_strided_rows_and_writes_out(device: torch.device):
    wide = random(4, 140, dtype=torch.float32, device=device)
    out = torch.full((4, 70), torch.nan, device=device)[:, :64]
    assert silu_and_mul(wide[:, :128], out=out) is out
    torch.testing.assert_close(out, reference.silu_and_mul(wide[:, :128]))
    assert silu_and_mul(wide[:0]).shape == (0, 70)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up": torch.zeros(2, 7)}, "even number of columns, got 7"),
        ({"gate_up": torch.zeros(8)}, "any, any"),
        ({"gate_up": torch.zeros(2, 8, dtype=torch.int64)}, "gate_up must be"),
        ({"out": torch.zeros(2, 8)}, r"out must have shape \[2, 4\], got \[2, 8\]"),
    ],
    ids=str,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = {"gate_up": torch.zeros(2, 8), **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        silu_and_mul(**{name: value.to(device) for name, value in arguments.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("size", [1536, 12_288])
def test_gpu_equals_the_reference(size: int, dtype: torch.dtype, device: torch.device):
    gate_up = random(130, 2 * size, dtype=dtype, device=device)
    found, expected = silu_and_mul(gate_up), reference.silu_and_mul(gate_up)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=TOLERANCES[dtype])
