"""Products of few tokens with the operations around them, against the twin and plain torch."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import small_batch_linear as kernel
from extkv.normalized import ScaledRows
from extkv.reference import small_batch_linear as reference
from extkv.reference.rms_norm import rms_norm
from torch.nn import functional

EPS = 1e-5
# Sums of up to 12,288 products, of size one; bfloat16 runs on a GPU only, because
# the interpreter multiplies it wrongly.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def make(num_tokens: int, size: int, num_columns: int, dtype: torch.dtype, device: torch.device):
    """Return residual, values, weight, bias and norm of a projection into the stream."""
    options = {"dtype": dtype, "device": device}
    weight = random(num_columns, size, **options, seed=1) * size**-0.5
    residual = random(num_tokens, num_columns, **options, seed=2)
    values = random(num_tokens, size, **options, seed=3)
    norm = random(num_columns, **options, seed=4).abs() + 0.5
    return residual, values, weight, random(num_columns, **options, seed=5), norm


def check_chain(num_tokens, sizes, dtype, device, *, is_gated, has_bias):
    """Run a projection into the stream and one out of it, by kernels, twins and torch."""
    size, num_columns, out_columns = sizes
    residual, values, weight, bias, norm = make(num_tokens, size, num_columns, dtype, device)
    rows_of_weight = out_columns * (2 if is_gated else 1)
    after = random(rows_of_weight, num_columns, dtype=dtype, device=device) * num_columns**-0.5
    after_bias = random(rows_of_weight, dtype=dtype, device=device) if has_bias else None
    bias = bias if has_bias else None
    found, streams = [], []
    for module in (kernel, reference):
        stream = residual.clone()
        rows = module.small_batch_add_linear(stream, values, weight, bias, norm=norm, eps=EPS)
        found.append(module.small_batch_linear(rows, after, after_bias, is_gated=is_gated))
        streams.append(stream)
    stream = residual + functional.linear(values, weight, bias)
    plain = functional.linear(rms_norm(stream, norm, EPS), after, after_bias)
    if is_gated:
        gate, up = plain.chunk(2, dim=1)
        plain = functional.silu(gate) * up
    tolerance = TOLERANCES[dtype]
    for out, mutated in zip(found, streams, strict=True):
        torch.testing.assert_close(mutated, stream, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(out, plain, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
def test_equals_twin_and_torch_at_odd_sizes(num_tokens, is_gated, has_bias, device):
    sizes = (100, 130, 37)
    check_chain(num_tokens, sizes, torch.float32, device, is_gated=is_gated, has_bias=has_bias)


def test_a_token_does_not_depend_on_its_batch(device):
    residual, values, weight, _, norm = make(16, 96, 64, torch.float32, device)
    options = {"norm": norm, "eps": EPS}
    together = residual.clone()
    rows = kernel.small_batch_add_linear(together, values, weight, **options)
    products = kernel.small_batch_linear(rows, weight[:, :64])
    for token in (0, 5, 15):
        alone = residual[token : token + 1].clone()
        part = slice(token, token + 1)
        row = kernel.small_batch_add_linear(alone, values[part], weight, **options)
        assert torch.equal(alone, together[part])
        assert torch.equal(kernel.small_batch_linear(row, weight[:, :64]), products[part])


def test_takes_strided_rows(device):
    residual, values, weight, _, norm = make(3, 96, 64, torch.float32, device)
    wide = [torch.full((3, 200), torch.nan, device=device) for _ in range(2)]
    wide[0][:, :64], wide[1][:, :96] = residual, values
    expected = kernel.small_batch_add_linear(residual, values, weight, norm=norm, eps=EPS)
    found = kernel.small_batch_add_linear(
        wide[0][:, :64], wide[1][:, :96], weight, norm=norm, eps=EPS
    )
    assert torch.equal(found.values, expected.values)
    assert torch.equal(wide[0][:, :64], residual)
    assert wide[0][:, 64:].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(17, 8)}, "1 to 16 rows, got 17"),
        ({"values": torch.zeros(0, 8)}, "1 to 16 rows, got 0"),
        ({"values": torch.zeros(2, 8, dtype=torch.float16)}, "values must be torch.bfloat16"),
        ({"weight": torch.zeros(6, 9)}, r"weight must have shape \[any, 8\], got \[6, 9\]"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[6\]"),
        ({"residual": torch.zeros(2, 5)}, r"residual must have shape \[2, 6\]"),
        ({"norm": torch.zeros(5)}, r"norm must have shape \[6\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(changes, message, device):
    arguments = {
        "residual": torch.zeros(2, 6),
        "values": torch.zeros(2, 8),
        "weight": torch.zeros(6, 8),
        "norm": torch.zeros(6),
        **changes,
    }
    moved = {name: tensor.to(device) for name, tensor in arguments.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.small_batch_add_linear(**moved, eps=EPS)


def test_gates_come_in_pairs(device):
    rows = ScaledRows(torch.zeros(1, 8, device=device), torch.ones(1, 16, device=device), EPS)
    with pytest.raises(InvalidArgumentError, match="even number of rows, got 5"):
        kernel.small_batch_linear(rows, torch.zeros(5, 8, device=device), is_gated=True)
    short = rows._replace(squares=torch.ones(1, 8, device=device))
    with pytest.raises(InvalidArgumentError, match="squares must have shape"):
        kernel.small_batch_linear(short, torch.zeros(4, 8, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1536, 576, 1536), (12_288, 4096, 6144), (999, 333, 77)], ids=str
)
def test_gpu_equals_torch(sizes, is_gated, dtype, device):
    for num_tokens in (1, 8, 13, 16):
        check_chain(num_tokens, sizes, dtype, device, is_gated=is_gated, has_bias=True)


@pytest.mark.gpu
def test_gpu_replays_in_a_graph_after_other_kernels(device):
    residual, values, weight, _, norm = make(4, 4096, 4096, torch.bfloat16, device)
    options = {"norm": norm, "eps": EPS}

    def chain() -> torch.Tensor:
        stream = residual + 0
        for _ in range(6):
            rows = kernel.small_batch_add_linear(stream, values, weight, **options)
            out = kernel.small_batch_linear(rows, weight)
            values.copy_(out)
        return stream

    start = values.clone()
    expected = chain().clone()
    values.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = chain()
    for _ in range(20):
        values.copy_(start)
        graph.replay()
        assert torch.equal(stream, expected)
