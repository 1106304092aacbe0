"""RMS normalisation with and without the residual sum."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels.rms_norm import rms_norm
from extkv.reference import rms_norm as reference
from placement import with_strides

# One unit in the last place of values up to 4: each result is rounded twice, and the interpreter
# rounds bfloat16 towards zero.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 6.3e-2}
DTYPES = tuple(TOLERANCES)


def check(hidden: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """Compare kernel and twin on outputs of random memory, and the residuals they leave."""
    other = None if residual is None else residual.clone()
    expected = reference.rms_norm(hidden, weight, 1e-6, residual=other)
    found = rms_norm(hidden, weight, 1e-6, residual=residual)
    tolerance = TOLERANCES[hidden.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    if residual is not None:
        torch.testing.assert_close(residual, other, atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return standard normal numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 64, 100, 1030])
def test_equals_the_reference(size: int, dtype: torch.dtype, device: torch.device):
    hidden = random(5, size, dtype=dtype, device=device)
    check(hidden, random(size, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adds_the_residual_first(dtype: torch.dtype, device: torch.device):
    hidden = random(3, 576, dtype=dtype, device=device)
    residual = random(3, 577, dtype=dtype, device=device)[:, :576]
    check(hidden, random(576, dtype=dtype, device=device), residual)


def test_normalises_heads_of_packed_projections(device: torch.device):
    packed = random(7, 199, dtype=torch.float32, device=device)
    heads = packed.as_strided((7, 3, 64), (199, 64, 1))
    check(heads, random(64, dtype=torch.float32, device=device))


def test_equals_the_formula(device: torch.device):
    hidden = random(4, 130, dtype=torch.float32, device=device)
    weight = random(130, dtype=torch.float32, device=device)
    wide = hidden.to(torch.float64)
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
    for norm in (rms_norm, reference.rms_norm):
        difference = norm(hidden, weight, 1e-5).to(torch.float64) - expected
        assert float(difference.abs().max()) < 2e-6


def test_may_write_in_place_and_accepts_no_rows(device: torch.device):
    hidden = random(4, 64, dtype=torch.float32, device=device)
    weight = random(64, dtype=torch.float32, device=device)
    expected = rms_norm(hidden, weight, 1e-6)
    assert rms_norm(hidden, weight, 1e-6, out=hidden) is hidden
    assert torch.equal(hidden, expected)
    assert rms_norm(hidden[:0], weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(64)}, r"got \[64\]"),
        ({"hidden": torch.zeros(2, 40_000)}, "32768"),
        ({"hidden": torch.zeros(2, 128)[:, ::2]}, "stride 1"),
        ({"weight": torch.zeros(63)}, r"weight must have shape \[64\], got \[63\]"),
        ({"weight": torch.zeros(64, dtype=torch.float16)}, "weight must be torch.float32"),
        ({"residual": torch.zeros(3, 64)}, r"residual must have shape \[2, 64\]"),
        ({"out": torch.zeros(2, 64, dtype=torch.float16)}, "out must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = {"hidden": torch.zeros(2, 64), "weight": torch.zeros(64), **changes}
    moved = {name: with_strides(tensor, device) for name, tensor in arguments.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        rms_norm(**moved, eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 576, 4096, 8192, 12_288, 32_768])
def test_gpu_equals_the_reference(size: int, dtype: torch.dtype, device: torch.device):
    hidden = random(33, size, dtype=dtype, device=device)
    weight = random(size, dtype=dtype, device=device)
    check(hidden, weight)
    check(hidden, weight, random(33, size, dtype=dtype, device=device))
