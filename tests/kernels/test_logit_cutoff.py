"""Cut-offs of top-k, top-p and min-p: kernel and twin against the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import logit_cutoff as kernel
from extkv.reference import logit_cutoff as reference
from placement import with_strides
from sampling_cases import filtered_probabilities

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = pytest.mark.parametrize(
    "cut", [kernel.logit_cutoff, reference.logit_cutoff], ids=["kernel", "reference"]
)
PARAMETERS = [
    {"top_k": [1, 3, 0, 2, 5, 70]},
    {"top_p": [0.5, 0.9, 0.99, 1.0, 0.2, 0.001]},
    {"min_p": [0.1, 0.0, 1.0, 0.5, 0.3, 0.02]},
    {
        "top_k": [1, 30, 20, 2, 0, 4],
        "top_p": [0.5, 0.9, 0.99, 1.0, 0.2, 0.7],
        "min_p": [0.1, 0.0, 0.01, 0.5, 0.3, 0.02],
    },
]


def tensors(parameters: dict[str, list[float]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return per-row parameters as tensors."""
    return {
        name: torch.tensor(
            values, dtype=torch.int32 if name == "top_k" else torch.float32, device=device
        )
        for name, values in parameters.items()
    }


@BOTH
@pytest.mark.parametrize("parameters", PARAMETERS, ids="+".join)
@pytest.mark.parametrize("vocab_size", [1, 7, 100, 2500])
def test_keeps_the_tokens_of_the_definition(
    vocab_size: int,
    parameters: dict[str, list[float]],
    cut: Callable[..., torch.Tensor],
    device: torch.device,
):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((6, vocab_size), generator=generator) * 3
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.2, 2.0, 1.0])
    found = cut(logits.to(device), temperature.to(device), **tensors(parameters, device)).cpu()
    for row in range(6):
        options = {name: values[row] for name, values in parameters.items()}
        wanted = filtered_probabilities(logits[row], float(temperature[row]), **options) > 0
        assert torch.equal(logits[row] >= found[row], wanted), (row, options)


@BOTH
def test_ties_with_the_last_token_stay(cut: Callable[..., torch.Tensor], device: torch.device):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -1.0, -0.0]], device=device)
    ones = torch.ones(2, device=device)
    found = cut(logits, ones, top_k=torch.tensor([2, 1], device=device))
    assert (logits >= found[:, None]).sum(1).tolist() == [3, 4]
    found = cut(logits, ones, top_p=torch.tensor([0.3, 0.1], device=device))
    assert (logits >= found[:, None]).sum(1).tolist() == [3, 4]


@BOTH
def test_nan_counts_as_minus_infinity_and_infinity_as_largest(
    cut: Callable[..., torch.Tensor], device: torch.device
):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[nan, 1.0, 0.0], [-inf, -inf, -inf], [inf, 0.0, inf], [nan, nan, nan], [-inf, 3.0, 2.0]],
        device=device,
    )
    ones = torch.ones(5, device=device)
    found = cut(logits, ones, top_k=torch.full((5,), 2, device=device))
    assert (logits >= found[:, None]).sum(1).tolist() == [2, 3, 2, 0, 2]
    found = cut(logits, ones, top_p=ones * 0.6)
    assert (logits >= found[:, None]).sum(1).tolist() == [1, 3, 2, 0, 1]


@BOTH
def test_rows_without_filters_and_greedy_rows_have_none(
    cut: Callable[..., torch.Tensor], device: torch.device
):
    logits = torch.randn(4, 9, device=device)
    temperature = torch.tensor([0.0, 1e-6, 1.0, 1.0], device=device)
    found = cut(
        logits,
        temperature,
        top_k=torch.tensor([1, 1, 0, -1], device=device),
        top_p=torch.tensor([0.1, 0.1, 1.0, 2.0], device=device),
        min_p=torch.tensor([0.5, 0.5, 0.0, 0.0], device=device),
    )
    assert found.tolist() == [-torch.inf] * 4
    assert cut(logits, temperature).tolist() == [-torch.inf] * 4
    assert cut(logits[:0], temperature[:0]).shape == (0,)


@BOTH
def test_b103_strided_logits_and_parameters(cut: Callable[..., torch.Tensor], device: torch.device):
    wide = torch.randn(3, 164, device=device)
    table = torch.tensor([[1.0, 5.0, 0.9], [0.5, 3.0, 0.5], [2.0, 7.0, 0.99]], device=device)
    counts = torch.tensor([[5, 0], [3, 0], [7, 0]], device=device)
    found = cut(wide[:, :151], table[:, 0], top_k=counts[:, 0], top_p=table[:, 2])
    expected = cut(
        wide[:, :151].contiguous(),
        table[:, 0].contiguous(),
        top_k=counts[:, 0].contiguous(),
        top_p=table[:, 2].contiguous(),
    )
    assert torch.equal(found, expected)


@BOTH
def test_a_row_does_not_depend_on_its_batch(cut: Callable[..., torch.Tensor], device: torch.device):
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(5)).to(device) * 2
    heat = torch.tensor([1.0, 0.5, 0.0, 2.0], device=device)
    top_k = torch.tensor([50, 0, 3, 4000], device=device)
    top_p = torch.tensor([0.9, 0.99, 0.5, 0.7], device=device)
    together = cut(logits, heat, top_k=top_k, top_p=top_p)
    for row in range(4):
        part = slice(row, row + 1)
        alone = cut(logits[part], heat[part], top_k=top_k[part], top_p=top_p[part])
        assert torch.equal(alone, together[part])


@BOTH
def test_a_flat_row_needs_all_its_tokens(cut: Callable[..., torch.Tensor], device: torch.device):
    logits = torch.arange(2500, 0, -1, device=device)[None] * 1e-6
    found = cut(logits, torch.ones(1, device=device), top_p=torch.full((1,), 0.9, device=device))
    kept = int((logits >= found[:, None]).sum())
    assert abs(kept - 2250) <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "logits must be"),
        ({"logits": torch.zeros(2, 0)}, "vocab_size must be in"),
        ({"logits": torch.zeros(2, 10)[:, ::2]}, "stride 1"),
        ({"temperature": torch.zeros(3)}, r"shape \[2\], got \[3\]"),
        ({"top_k": torch.zeros(2)}, "top_k must be torch.int32 or torch.int64"),
        ({"top_p": torch.zeros(2, dtype=torch.float64)}, "top_p must be torch.float32"),
        ({"min_p": torch.zeros(1)}, r"got \[1\]"),
        ({"out": torch.zeros(2, dtype=torch.float16)}, "out must be torch.float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = {"logits": torch.zeros(2, 5), "temperature": torch.ones(2), **changes}
    moved = {name: with_strides(tensor, device) for name, tensor in arguments.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.logit_cutoff(**moved)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 32_000, 151_936, 262_145])
@pytest.mark.parametrize("parameters", PARAMETERS, ids="+".join)
def test_gpu_b106_keeps_the_tokens_of_the_reference(
    parameters: dict[str, list[float]], vocab_size: int, device: torch.device
):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((6, vocab_size), generator=generator) * 3
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.2, 2.0, 1.0])
    found = kernel.logit_cutoff(
        logits.to(device), temperature.to(device), **tensors(parameters, device)
    )
    expected = reference.logit_cutoff(
        logits, temperature, **tensors(parameters, torch.device("cpu"))
    )
    kept = (logits >= found.cpu()[:, None]).sum(1)
    wanted = (logits >= expected[:, None]).sum(1)
    # The mass at which top-p ends is a float32 sum: a few tokens of hundred thousands may differ.
    allowed = 1 + wanted * 1e-3 if "top_p" in parameters else wanted * 0
    assert bool(((kept - wanted).abs() <= allowed).all()), (kept, wanted)
