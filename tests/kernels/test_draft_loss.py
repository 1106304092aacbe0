"""Loss of draft tokens against the target's law, and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels.draft_loss import draft_loss
from extkv.reference import draft_loss as reference

# Of numbers up to about 10, from logits that are the same in both.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return arguments; two rows are to match one row of the target."""
    generator = torch.Generator().manual_seed(num_rows + vocab_size)

    def logits(count: int) -> torch.Tensor:
        drawn = torch.randn((count, vocab_size), generator=generator) * 3
        return drawn.to(device, dtype)

    num_targets = max(num_rows // 2, 1)
    rows = torch.randint(num_targets, (num_rows,), generator=generator)
    labels = torch.randint(vocab_size, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    return {
        "logits": logits(num_rows),
        "target_logits": logits(num_targets),
        "target_rows": rows.to(device),
        "label_ids": labels.to(device),
        "row_weights": weights.to(device),
    }


def check(arguments: dict[str, torch.Tensor], tolerance: float, **options: Any) -> None:
    """Compare figures and gradients with the twin's."""
    ours, theirs = arguments["logits"].clone(), arguments["logits"].clone()
    found = draft_loss(**arguments | {"logits": ours}, **options)
    expected = reference.draft_loss(**arguments | {"logits": theirs}, **options)
    for name, value in found._asdict().items():
        torch.testing.assert_close(
            value, getattr(expected, name), atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    # Gradients of a row are at most its weight. Where q and p are equal but for rounding, the sign
    # of their difference is open, and with it q's own share.
    torch.testing.assert_close(ours, theirs, atol=tolerance / 3, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("vocab_size", [1, 29, 4096, 5003])
def test_equals_the_reference(vocab_size: int, dtype: torch.dtype, device: torch.device):
    check(case(5, vocab_size, dtype, device), TOLERANCES[dtype])


def test_weights_of_the_terms_scale_the_gradient(device: torch.device):
    arguments = case(4, 50, torch.float32, device)
    check(arguments, 1e-5, ce_weight=1.0, tv_weight=0.0)
    check(arguments, 1e-5, ce_weight=0.0, tv_weight=2.0)


def test_gradient_is_that_of_autograd(device: torch.device):
    arguments = case(6, 37, torch.float32, device)
    leaf = arguments["logits"].double().requires_grad_()
    q = torch.softmax(leaf, dim=-1)
    p = torch.softmax(arguments["target_logits"].double()[arguments["target_rows"]], dim=-1)
    entropy = -q.gather(1, arguments["label_ids"][:, None])[:, 0].log()
    per_row = 0.3 * entropy + 0.7 * (q - p).abs().sum(dim=1)
    (per_row * arguments["row_weights"]).sum().backward()
    for op in (draft_loss, reference.draft_loss):
        logits = arguments["logits"].clone()
        op(**arguments | {"logits": logits}, ce_weight=0.3, tv_weight=0.7)
        assert leaf.grad is not None
        torch.testing.assert_close(logits.double(), leaf.grad, atol=1e-6, rtol=1e-4)


def test_leaves_logits_alone_without_weights(device: torch.device):
    arguments = case(3, 40, torch.float32, device) | {"row_weights": None}
    for op in (draft_loss, reference.draft_loss):
        logits = arguments["logits"].clone()
        found = op(**arguments | {"logits": logits})
        assert torch.equal(logits, arguments["logits"])
        assert torch.equal(found.argmax, logits.argmax(dim=1))


def test_equal_laws_are_at_distance_zero(device: torch.device):
    arguments = case(2, 30, torch.float32, device)
    arguments["target_logits"] = arguments["logits"].clone()
    arguments["target_rows"] = torch.arange(2, device=device)
    for op in (draft_loss, reference.draft_loss):
        found = op(**arguments | {"logits": arguments["logits"].clone()})
        assert found.total_variation.tolist() == [0.0, 0.0]
        torch.testing.assert_close(found.cross_entropy, -found.target_logprob)


def test_the_first_of_equal_tokens_is_the_likeliest(device: torch.device):
    arguments = case(2, 5000, torch.float32, device)
    arguments["logits"].zero_()
    arguments["logits"][0, [7, 4500]] = 2.0
    for op in (draft_loss, reference.draft_loss):
        found = op(**arguments | {"logits": arguments["logits"].clone(), "row_weights": None})
        assert found.argmax.tolist() == [7, 0]


def test_logits_far_apart_stay_finite(device: torch.device):
    arguments = case(2, 20, torch.float32, device)
    arguments["logits"] *= 1e4
    arguments["target_logits"] *= 1e4
    for op in (draft_loss, reference.draft_loss):
        logits = arguments["logits"].clone()
        found = op(**arguments | {"logits": logits})
        assert bool(logits.isfinite().all())
        assert bool(found.cross_entropy.isfinite().all())


def test_takes_strided_rows_and_none(device: torch.device):
    arguments = case(4, 64, torch.float32, device)
    wide = torch.full((4, 100), 5.0, device=device)
    wide[:, :64] = arguments["logits"]
    dense = arguments["logits"].clone()
    draft_loss(**arguments | {"logits": wide[:, :64]})
    draft_loss(**arguments | {"logits": dense})
    assert torch.equal(wide[:, :64], dense)
    assert bool((wide[:, 64:] == 5.0).all())
    none = {name: value[:0] for name, value in arguments.items() if name != "target_logits"}
    assert draft_loss(**arguments | none).argmax.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4, 64, dtype=torch.int64)}, "logits must be"),
        ({"target_logits": torch.zeros(2, 63)}, r"target_logits must have shape \[any, 64\]"),
        ({"target_rows": torch.zeros(3, dtype=torch.int64)}, r"target_rows must have shape \[4\]"),
        ({"label_ids": torch.zeros(4)}, "label_ids must be torch.int64"),
        ({"row_weights": torch.zeros(4, dtype=torch.float64)}, "row_weights must be"),
    ],
    ids=str,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = case(4, 64, torch.float32, device)
    moved = {name: value.to(device) for name, value in changes.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        draft_loss(**arguments | moved)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_gpu_equals_the_reference(vocab_size: int, dtype: torch.dtype, device: torch.device):
    check(case(300, vocab_size, dtype, device), TOLERANCES[dtype])
