"""Rotary embedding in place: Hugging Face's order, partial rotation, padded rows."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import rotary_embedding as kernel
from extkv.normalized import HeadNorms
from extkv.reference import rotary_embedding as reference
from extkv.reference.rms_norm import rms_norm

BOTH = pytest.mark.parametrize(
    "rotate",
    [kernel.rotary_embedding, reference.rotary_embedding],
    ids=["kernel", "reference"],
)
# Results up to 4 are rounded once; the interpreter rounds bfloat16 towards zero.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3.2e-2}


def angles(num_positions: int, half: int, device: torch.device) -> torch.Tensor:
    """Return the usual angles [num_positions, half]."""
    frequencies = 1e4 ** (-torch.arange(half) / half)
    return (torch.arange(num_positions)[:, None] * frequencies).to(device)


def heads(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return random heads."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def rotated(tensor: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Return the rotation written as a complex product, in float64."""
    half = angle.shape[1]
    wide = tensor.to(torch.float64)
    numbers = torch.complex(wide[..., :half], wide[..., half : 2 * half])
    turned = numbers * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]
    return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1)


@BOTH
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (96, 16), (2, 1)], ids=str)
def test_equals_the_complex_product(
    head_dim: int, half: int, dtype: torch.dtype, rotate, device: torch.device
):
    query = heads(4, 5, head_dim, dtype=dtype, device=device)
    key = heads(4, 2, head_dim, dtype=dtype, device=device)
    angle = angles(50, half, device)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    expected = [rotated(tensor, angle[positions]) for tensor in (query, key)]
    rotate(query, key, angle.cos(), angle.sin(), positions)
    for found, wanted in zip((query, key), expected, strict=True):
        assert float((found.to(torch.float64) - wanted).abs().max()) <= TOLERANCES[dtype]


@BOTH
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_normalises_heads_first(dtype: torch.dtype, rotate, device: torch.device):
    query = heads(3, 5, 40, dtype=dtype, device=device) * 3
    key = heads(3, 2, 40, dtype=dtype, device=device)
    weights = [heads(40, dtype=dtype, device=device).abs() + shift for shift in (0.1, 0.6)]
    angle = angles(9, 20, device)
    positions = torch.tensor([8, -1, 3], device=device)
    before = query.clone(), key.clone()
    expected = [
        rotated(rms_norm(tensor, weight, 1e-6), angle[positions])
        for tensor, weight in zip(before, weights, strict=True)
    ]
    norms = HeadNorms(*weights, eps=1e-6)
    rotate(query, key, angle.cos(), angle.sin(), positions, norms=norms)
    for found, wanted, old in zip((query, key), expected, before, strict=True):
        assert torch.equal(found[1], old[1])
        difference = (found.to(torch.float64) - wanted)[[0, 2]].abs().max()
        assert float(difference) <= 4 * TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("half", "size", "message"), [(16, 40, "head_dim / 2 = 20"), (20, 39, "norms.query")]
)
def test_rejects_norms_that_do_not_fit(half, size, message, device: torch.device):
    head, angle = torch.zeros(1, 1, 40, device=device), angles(4, half, device)
    norm = torch.ones(size, device=device)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.rotary_embedding(
            head, head, angle, angle, positions, norms=HeadNorms(norm, norm, 1e-6)
        )


@BOTH
def test_takes_packed_projections_and_strided_positions(rotate, device: torch.device):
    packed = heads(3, 10 * 64, dtype=torch.float32, device=device)
    before = packed.clone()
    query, key = packed[:, :384].unflatten(1, (6, 64)), packed[:, 384:512].unflatten(1, (2, 64))
    table = torch.tensor([[5, 0], [1, 0], [30, 0]], dtype=torch.int32, device=device)
    angle = angles(31, 32, device)
    rotate(query, key, angle.cos(), angle.sin(), table[:, 0])
    expected = rotated(before[:, :512].unflatten(1, (8, 64)), angle[[5, 1, 30]])
    assert float((packed[:, :512].unflatten(1, (8, 64)) - expected).abs().max()) < 1e-6
    assert torch.equal(packed[:, 512:], before[:, 512:])


@BOTH
def test_padded_rows_stay(rotate, device: torch.device):
    query = heads(4, 3, 64, dtype=torch.float32, device=device)
    key = heads(4, 1, 64, dtype=torch.float32, device=device)
    before = query.clone(), key.clone()
    angle = angles(8, 32, device)
    positions = torch.tensor([-(2**62), 8, -1, 3], device=device)
    rotate(query, key, angle.cos(), angle.sin(), positions)
    for found, old in zip((query, key), before, strict=True):
        assert torch.equal(found[:3], old[:3])
        assert not torch.equal(found[3], old[3])


@BOTH
def test_accepts_no_tokens_and_many_heads(rotate, device: torch.device):
    angle = angles(8, 32, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    query = heads(1, 150, 64, dtype=torch.float32, device=device)
    rotate(query[:0], query[:0, :2], angle.cos(), angle.sin(), none)
    expected = rotated(query, angle[[3]])
    key = query[:, :100].clone()
    rotate(query, key, angle.cos(), angle.sin(), none.new_full((1,), 3))
    assert float((query - expected).abs().max()) < 1e-6
    assert torch.equal(key, query[:, :100])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 64)}, "any, any, any"),
        ({"key": torch.zeros(2, 1, 32)}, "2, any, 64"),
        ({"key": torch.zeros(2, 1, 64, dtype=torch.float16)}, "key must be torch.float32"),
        ({"cos": torch.zeros(9, 33), "sin": torch.zeros(9, 33)}, "head_dim / 2 = 32"),
        ({"sin": torch.zeros(8, 32)}, r"sin must have shape \[9, 32\]"),
        ({"positions": torch.zeros(2)}, "positions must be torch.int32 or torch.int64"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"shape \[2\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = {
        "query": torch.zeros(2, 3, 64),
        "key": torch.zeros(2, 1, 64),
        "cos": torch.zeros(9, 32),
        "sin": torch.zeros(9, 32),
        "positions": torch.zeros(2, dtype=torch.int64),
        **changes,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.rotary_embedding(**{name: value.to(device) for name, value in arguments.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_equals_the_reference(head_dim: int, dtype: torch.dtype, device: torch.device):
    query = heads(130, 32, head_dim, dtype=dtype, device=device)
    key = heads(130, 8, head_dim, dtype=dtype, device=device)
    angle = angles(4096, head_dim // 2, device)
    positions = torch.arange(130, device=device) * 31
    expected = query.clone(), key.clone()
    kernel.rotary_embedding(query, key, angle.cos(), angle.sin(), positions)
    reference.rotary_embedding(*expected, angle.cos(), angle.sin(), positions)
    for found, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=TOLERANCES[dtype], rtol=0)
