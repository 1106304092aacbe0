"""Token bitmasks: kernel and twin against bits read one by one."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import token_bitmask as kernel
from extkv.reference import token_bitmask as reference

MODULES = pytest.mark.parametrize("ops", [kernel, reference], ids=["kernel", "reference"])
VOCAB_SIZES = (1, 7, 31, 32, 33, 64, 1000, 2048, 2049, 32_000)


def random_bitmask(num_masks: int, vocab_size: int) -> torch.Tensor:
    """Return words with random bits, also past the vocabulary; the first row allows nothing."""
    num_words = -(-vocab_size // 32)
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (num_masks, num_words), generator=generator)
    words[0] = 0
    return words.to(torch.int32)


def expected_of(logits: torch.Tensor, bitmask: torch.Tensor, row_ids: list[int]) -> torch.Tensor:
    """Read each bit on its own."""
    expected = logits.clone()
    for words, row in zip(bitmask.tolist(), row_ids, strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] % 2**32 >> token % 32 & 1:
                expected[row, token] = -torch.inf
    return expected


@MODULES
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_whose_bit_is_0_lose_their_logit(ops, vocab_size: int, device: torch.device):
    # Rows are wider than the vocabulary; what lies between them is NaN and stays NaN.
    wide = torch.empty(5, vocab_size + 3)
    generator = torch.Generator().manual_seed(1)
    wide[:, :vocab_size] = torch.randn(5, vocab_size, generator=generator)
    wide = wide.to(device)
    logits = wide[:, :vocab_size]
    row_ids = [4, 1, 2]
    bitmask = random_bitmask(3, vocab_size)
    expected = expected_of(logits.cpu(), bitmask, row_ids)
    ops.apply_token_bitmask(logits, bitmask.to(device), torch.tensor(row_ids, device=device))
    assert torch.equal(logits.cpu(), expected)
    assert bool(wide[:, vocab_size:].isnan().all())


@MODULES
def test_masks_of_any_stride_are_those_of_their_copies(ops, device: torch.device):
    vocab_size = 100
    words = torch.empty(4, 9, dtype=torch.int32)
    words[:, :4] = random_bitmask(4, vocab_size)
    words = words.to(device)
    rows = torch.arange(4, device=device)
    logits = torch.randn(4, vocab_size, device=device)
    dense = logits.clone()
    ops.apply_token_bitmask(logits, words[:, :4], rows)
    ops.apply_token_bitmask(dense, words[:, :4].contiguous(), rows)
    assert torch.equal(logits, dense)


@MODULES
def test_nan_and_infinities_of_allowed_tokens_stay(ops, device: torch.device):
    logits = torch.tensor([[torch.nan, torch.nan, torch.inf, -torch.inf]], device=device)
    bitmask = torch.tensor([[0b1101]], dtype=torch.int32, device=device)
    ops.apply_token_bitmask(logits, bitmask, torch.tensor([0], device=device))
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == [-torch.inf, torch.inf, -torch.inf]


@MODULES
@pytest.mark.parametrize(("num_rows", "num_masks"), [(0, 0), (2, 0)])
def test_no_masks_change_nothing(ops, num_rows: int, num_masks: int, device: torch.device):
    logits = torch.randn(num_rows, 40, device=device)
    before = logits.clone()
    bitmask = torch.zeros(num_masks, 2, dtype=torch.int32, device=device)
    rows = torch.zeros(num_masks, dtype=torch.int64, device=device)
    ops.apply_token_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_reached(device: torch.device):
    vocab_size, num_rows = 151_936, 14_136
    wide = torch.zeros(num_rows, vocab_size, device=device)
    # Bit 0 of every word of the second mask is 0.
    bitmask = torch.zeros(2, vocab_size // 32, dtype=torch.int32, device=device)
    bitmask[1] = -2
    kernel.apply_token_bitmask(wide, bitmask, torch.tensor([0, num_rows - 1], device=device))
    assert bool(wide[0].isneginf().all())
    assert wide[-1].isneginf().nonzero()[:, 0].tolist() == list(range(0, vocab_size, 32))
    assert not bool(wide[1:-1].any())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(2, 40, dtype=torch.bfloat16)}, "logits must be torch.float32"),
        ({"bitmask": torch.zeros(1, 2, dtype=torch.int64)}, "bitmask must be torch.int32"),
        ({"bitmask": torch.zeros(1, 3, dtype=torch.int32)}, r"shape \[any, 2\], got \[1, 3\]"),
        ({"row_ids": torch.zeros(2, dtype=torch.int64)}, r"row_ids must have shape \[1\]"),
        ({"row_ids": torch.zeros(1, dtype=torch.int32)}, "row_ids must be torch.int64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, words: str, device: torch.device):
    arguments = {
        "logits": torch.zeros(2, 40),
        "bitmask": torch.zeros(1, 2, dtype=torch.int32),
        "row_ids": torch.zeros(1, dtype=torch.int64),
    } | change
    on_device = {name: tensor.to(device) for name, tensor in arguments.items()}
    with pytest.raises(InvalidArgumentError, match=words):
        kernel.apply_token_bitmask(**on_device)
