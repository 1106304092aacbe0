"""Allowed and bad tokens, bias and penalties: kernel and twin against vLLM's dense formulas."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import penalties as kernel
from extkv.reference import penalties as reference

MODULES = pytest.mark.parametrize("ops", [kernel, reference], ids=["kernel", "reference"])
VOCAB_SIZE = 1500
SIZES = (3, 0, 700, 1, VOCAB_SIZE)  # entries per row


def random_logits(device: torch.device) -> torch.Tensor:
    """Return logits in rows that are wider than the vocabulary."""
    wide = torch.randn(len(SIZES), VOCAB_SIZE + 9, generator=torch.Generator().manual_seed(1))
    wide[0, 5] = -torch.inf
    wide[2, 7] = 0.0
    return wide.to(device)[:, :VOCAB_SIZE]


def entries(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return packed ascending token ids, row offsets, and the ids of each row."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randperm(VOCAB_SIZE, generator=generator)[:size].sort().values for size in SIZES]
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    packed = torch.cat(rows)
    return (
        packed.to(device, torch.int32),
        offsets.to(device, torch.int32),
        [row.to(device) for row in rows],
    )


@MODULES
def test_only_allowed_tokens_keep_their_logit(ops, device: torch.device):
    logits, (ids, offsets, rows) = random_logits(device), entries(device)
    expected = logits.clone()
    for row, tokens in enumerate(rows):
        if len(tokens):
            is_banned = torch.ones(VOCAB_SIZE, dtype=torch.bool, device=device)
            is_banned[tokens] = False
            expected[row, is_banned] = -torch.inf
    ops.mask_allowed_tokens(logits, ids, offsets)
    assert torch.equal(logits, expected)


@MODULES
def test_bad_tokens_lose_their_logit(ops, device: torch.device):
    logits, (ids, offsets, rows) = random_logits(device), entries(device)
    expected = logits.clone()
    for row, tokens in enumerate(rows):
        expected[row, tokens] = -torch.inf
    ops.mask_bad_tokens(logits, ids, offsets)
    assert torch.equal(logits, expected)


@MODULES
def test_bias_is_added_where_it_is_given(ops, device: torch.device):
    logits, (ids, offsets, rows) = random_logits(device), entries(device)
    biases = torch.randn(len(ids), generator=torch.Generator().manual_seed(3)).to(device)
    expected = logits.clone()
    for row, tokens in enumerate(rows):
        begin = sum(SIZES[:row])
        expected[row, tokens] += biases[begin : begin + SIZES[row]]
    ops.add_logit_bias(logits, ids, biases, offsets)
    assert torch.equal(logits, expected)


def packed_counts(
    prompts: list[list[int]], outputs: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return distinct tokens of prompt and output, their counts in the output, and row offsets."""
    ids, counts, offsets = [], [], [0]
    for prompt, output in zip(prompts, outputs, strict=True):
        for token in sorted({*prompt, *output}):
            ids.append(token)
            counts.append(output.count(token))
        offsets.append(len(ids))
    packed = [torch.tensor(numbers, dtype=torch.int32) for numbers in (ids, counts, offsets)]
    return packed[0].to(device), packed[1].to(device), packed[2].to(device)


@MODULES
def test_penalties_equal_vllms_dense_formula(ops, device: torch.device):
    prompts = [[3, 7, 7, 9], [], [0, 1499], [5]]
    outputs = [[7, 7, 7, 11, 3], [1], [], [5, 5, 6, 5]]
    logits = random_logits(device)[:4]
    repetition = torch.tensor([1.3, 1.0, 0.8, 2.0], device=device)
    frequency = torch.tensor([0.5, 0.1, 0.0, -0.4], device=device)
    presence = torch.tensor([[0.0, 0.7], [0.0, 0.0], [0.0, 0.2], [0.0, -1.0]], device=device)[:, 1]
    expected = logits.clone()
    for row in range(4):
        counts = torch.bincount(
            torch.tensor(outputs[row], dtype=torch.int64), minlength=VOCAB_SIZE
        ).to(device)
        is_in_prompt = torch.zeros(VOCAB_SIZE, dtype=torch.bool, device=device)
        is_in_prompt[prompts[row]] = True
        is_seen = is_in_prompt | (counts > 0)
        factor = torch.where(is_seen, repetition[row], 1.0)
        values = expected[row]
        values = torch.where(values > 0, values / factor, values * factor)
        expected[row] = values - frequency[row] * counts - presence[row] * (counts > 0)
    ids, output_counts, offsets = packed_counts(prompts, outputs, device)
    ops.apply_penalties(
        logits,
        ids,
        output_counts,
        offsets,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@MODULES
def test_rows_without_entries_stay(ops, device: torch.device):
    logits = random_logits(device)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int32, device=device)
    offsets = torch.zeros(len(SIZES) + 1, dtype=torch.int32, device=device)
    ops.mask_allowed_tokens(logits, none, offsets)
    ops.mask_bad_tokens(logits, none, offsets)
    ops.add_logit_bias(logits, none, torch.zeros(0, device=device), offsets)
    ones = torch.ones(len(SIZES), device=device)
    ops.apply_penalties(
        logits, none, none, offsets, repetition=ones * 2, frequency=ones, presence=ones
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float16)}, "logits must be torch.float32"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "token_ids must be torch.int32"),
        ({"row_offsets": torch.zeros(2, dtype=torch.int32)}, r"shape \[3\], got \[2\]"),
        ({"output_counts": torch.zeros(4, dtype=torch.int32)}, r"shape \[3\], got \[4\]"),
        ({"repetition": torch.zeros(3)}, r"repetition must have shape \[2\]"),
        ({"presence": torch.zeros(2, dtype=torch.float64)}, "presence must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, torch.Tensor], message: str, device: torch.device
):
    arguments = {
        "logits": torch.zeros(2, 5),
        "token_ids": torch.zeros(3, dtype=torch.int32),
        "output_counts": torch.zeros(3, dtype=torch.int32),
        "row_offsets": torch.zeros(3, dtype=torch.int32),
        "repetition": torch.ones(2),
        "frequency": torch.zeros(2),
        "presence": torch.zeros(2),
        **changes,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.apply_penalties(**{name: value.to(device) for name, value in arguments.items()})


def test_rejects_biases_of_another_length(device: torch.device):
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(InvalidArgumentError, match=r"biases must have shape \[3\], got \[2\]"):
        kernel.add_logit_bias(
            torch.zeros(2, 5, device=device), ids, torch.zeros(2, device=device), ids
        )


@pytest.mark.gpu
def test_gpu_full_vocabulary_equals_the_reference(device: torch.device):
    num_rows, vocab_size = 64, 151_936
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(0, 3000, (num_rows,), generator=generator)
    ids = torch.cat(
        [torch.randperm(vocab_size, generator=generator)[:n].sort().values for n in sizes.tolist()]
    ).to(torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)
    counts = torch.randint(0, 3, ids.shape, generator=generator, dtype=torch.int32)
    biases = torch.randn(ids.shape, generator=generator)
    rows = [torch.rand(num_rows, generator=generator) + 0.5 for _ in range(3)]
    logits = torch.randn((num_rows, vocab_size), generator=generator)
    for name, extra, penalties in (
        ("mask_allowed_tokens", (), {}),
        ("mask_bad_tokens", (), {}),
        ("add_logit_bias", (biases,), {}),
        (
            "apply_penalties",
            (counts,),
            dict(zip(("repetition", "frequency", "presence"), rows, strict=True)),
        ),
    ):
        expected, found = logits.clone(), logits.to(device)
        getattr(reference, name)(expected, ids, *extra, offsets, **penalties)
        getattr(kernel, name)(
            found,
            ids.to(device),
            *(tensor.to(device) for tensor in extra),
            offsets.to(device),
            **{key: value.to(device) for key, value in penalties.items()},
        )
        torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)
