"""Draft blocks: both layouts, limits, rejected rows, padding, and the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from extkv.drafting import DraftBlock
from extkv.errors import InvalidArgumentError
from extkv.kernels import draft_block_inputs as kernel
from extkv.reference import draft_block_inputs as reference
from hypothesis import given, settings
from hypothesis import strategies as st

MODULES = pytest.mark.parametrize("module", [kernel, reference], ids=["kernel", "reference"])
MASK = 99


def make(
    rows: list[tuple[int, int, int]], device: torch.device, *, num_padding_rows: int = 0, **changes
) -> dict[str, Any]:
    """Return arguments for requests of (first position, rows, rejected rows)."""
    counts = [count for _, count, _ in rows]
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat(
        [torch.arange(first, first + count) for first, count, _ in rows]
        + [torch.full((num_padding_rows,), torch.iinfo(torch.int64).min // 2)]
    )
    table = torch.randperm(len(rows) * 8, generator=torch.Generator().manual_seed(1))
    arguments = {
        "anchors": torch.arange(len(rows)) + 10,
        "positions": positions,
        "query_start_loc": starts.to(torch.int32),
        "num_rejected": torch.tensor([rejected for *_, rejected in rows], dtype=torch.int32),
        "block_table": table.to(torch.int32).view(len(rows), 8),
        "block_size": 16,
        "num_drafts": 7,
        "mask_token_id": MASK,
        "vocab_size": 100,
        "max_position": 128,
    }
    moved = arguments | changes
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in moved.items()}


def equal(found: DraftBlock, expected: DraftBlock) -> None:
    """Compare all fields."""
    for name, have, want in zip(DraftBlock._fields, found, expected, strict=True):
        assert have.dtype == want.dtype, name
        assert torch.equal(have, want), (name, have, want)


@MODULES
def test_b38_anchor_follows_twelve_committed_rows(module, device: torch.device):
    arguments = make([(0, 12, 0)], device)
    block = module.draft_block_inputs(**arguments)
    assert block.token_ids.tolist() == [[10] + [MASK] * 6]
    assert block.anchor_positions.tolist() == [12]
    assert block.positions.tolist() == [list(range(12, 19))]
    assert block.sample_positions.tolist() == [list(range(13, 20))]
    assert block.sample_rows.tolist() == [list(range(7))]
    assert block.context_positions.tolist() == list(range(12))
    assert block.seq_lens.tolist() == [19]
    slots = block.context_slots.tolist() + block.slots[0].tolist()
    assert len(set(slots)) == 19
    first, second = arguments["block_table"][0, :2].tolist()
    assert slots == [first * 16 + i for i in range(16)] + [second * 16 + i for i in range(3)]


@MODULES
def test_fill_in_layout_predicts_at_the_masks_own_places(module, device: torch.device):
    arguments = make([(5, 4, 1), (0, 1, 0)], device, sample_from_anchor=False, num_drafts=3)
    block = module.draft_block_inputs(**arguments)
    assert block.token_ids.tolist() == [[10, MASK, MASK, MASK], [11, MASK, MASK, MASK]]
    assert block.positions.tolist() == [[8, 9, 10, 11], [1, 2, 3, 4]]
    assert block.sample_rows.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert block.sample_positions.tolist() == [[9, 10, 11], [2, 3, 4]]
    assert block.seq_lens.tolist() == [12, 5]


@MODULES
def test_rejected_rows_write_no_context(module, device: torch.device):
    block = module.draft_block_inputs(**make([(20, 8, 3), (40, 8, 7), (60, 8, 0)], device))
    assert block.anchor_positions.tolist() == [25, 41, 68]
    is_written = (block.context_slots >= 0).view(3, 8).sum(1)
    assert is_written.tolist() == [5, 1, 8]


@MODULES
def test_b26_past_the_limit_positions_are_clamped_and_have_no_slot(module, device: torch.device):
    arguments = make([(90, 6, 0), (20, 6, 0)], device, max_position=100, num_drafts=7)
    block = module.draft_block_inputs(**arguments)
    assert block.positions[0].tolist() == [96, 97, 98, 99, 99, 99, 99]
    assert (block.slots[0] >= 0).tolist() == [True] * 4 + [False] * 3
    assert block.sample_positions[0].tolist() == list(range(97, 104))
    assert block.seq_lens.tolist() == [100, 33]
    assert bool((block.slots[1] >= 0).all())
    past = module.draft_block_inputs(**make([(120, 6, 0)], device, max_position=100))
    assert past.slots.tolist() == [[-1] * 7]
    assert past.context_slots.tolist() == [-1] * 6
    assert past.positions.tolist() == [[99] * 7]
    assert past.context_positions.tolist() == [99] * 6


@MODULES
def test_slots_end_with_the_block_table(module, device: torch.device):
    block = module.draft_block_inputs(**make([(120, 5, 0)], device, max_position=1000))
    assert (block.slots >= 0).tolist() == [[True] * 3 + [False] * 4]


@MODULES
def test_b22_a_placeholder_anchor_never_reaches_the_embedding(module, device: torch.device):
    arguments = make([(3, 2, 0), (9, 2, 0), (1, 1, 0)], device)
    arguments["anchors"] = torch.tensor([-1, 100, -(2**62)], device=device)
    block = module.draft_block_inputs(**arguments)
    assert block.token_ids[:, 0].tolist() == [0, 99, 0]


@MODULES
def test_b33_padding_requests_and_rows_are_neutral(module, device: torch.device):
    arguments = make([(3, 4, 1), (0, 0, 0), (0, 0, 0)], device, num_padding_rows=5)
    arguments["anchors"][1:] = torch.iinfo(torch.int64).min // 2
    arguments["block_table"][1:] = torch.iinfo(torch.int32).min // 2
    block = module.draft_block_inputs(**arguments)
    assert block.slots[1:].unique().tolist() == [-1]
    assert block.positions[1:].unique().tolist() == [0]
    assert block.token_ids[1:].unique().tolist() == [MASK]
    assert block.seq_lens.tolist()[1:] == [0, 0]
    assert block.anchor_positions.tolist()[1:] == [-1, -1]
    assert block.context_slots[4:].tolist() == [-1] * 5
    assert block.context_positions[4:].tolist() == [0] * 5
    alone = module.draft_block_inputs(**make([(3, 4, 1)], device))
    assert torch.equal(block.positions[:1], alone.positions)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_equals_the_reference_on_long_prefills(sample_from_anchor, device: torch.device):
    rows = [(0, 700, 0), (100, 1, 0), (33, 8, 5), (0, 0, 0), (127, 1, 0)]
    arguments = make(rows, device, num_padding_rows=300, sample_from_anchor=sample_from_anchor)
    arguments["positions"][700:] %= 128
    equal(kernel.draft_block_inputs(**arguments), reference.draft_block_inputs(**arguments))


@given(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 6), st.integers(0, 5)), max_size=4))
@settings(max_examples=25)
def test_equals_the_reference_for_any_windows(rows: list[tuple[int, int, int]]):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [(first, count, min(rejected, count)) for first, count, rejected in rows] or [(0, 1, 0)]
    arguments = make(rows, device, num_drafts=3)
    equal(kernel.draft_block_inputs(**arguments), reference.draft_block_inputs(**arguments))


@MODULES
def test_takes_strided_inputs_and_writes_out(module, device: torch.device):
    arguments = make([(3, 4, 1), (7, 2, 0)], device)
    expected = module.draft_block_inputs(**arguments)
    out = DraftBlock(*(torch.full_like(tensor, -77) for tensor in expected))
    for name in ("anchors", "positions", "num_rejected"):
        arguments[name] = torch.stack([arguments[name]] * 3, dim=1)[:, 1]
    wide = torch.cat([arguments["block_table"]] * 2, dim=1)
    arguments["block_table"] = wide[:, :8]
    found = module.draft_block_inputs(**arguments, out=out)
    assert all(have is want for have, want in zip(found, out, strict=True))
    equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": torch.zeros(2, dtype=torch.int32)}, "anchors must be torch.int64"),
        ({"positions": torch.zeros(2, 2, dtype=torch.int64)}, r"positions must have shape \[any\]"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"shape \[3\], got \[2\]"),
        ({"num_rejected": torch.zeros(2, dtype=torch.int64)}, "num_rejected must be torch.int32"),
        ({"block_table": torch.zeros(8, 2, dtype=torch.int32).T}, "stride 1"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_drafts": 0}, "num_drafts must be at least 1, got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"max_position": 0}, "max_position must be at least 1, got 0"),
        ({"mask_token_id": 100}, r"mask_token_id must be in \[0, 100\), got 100"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(changes, message: str, device: torch.device):
    arguments = make([(3, 4, 1), (7, 2, 0)], device, **changes)
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.draft_block_inputs(**arguments)


def test_rejects_out_that_does_not_fit(device: torch.device):
    arguments = make([(3, 4, 1), (7, 2, 0)], device)
    out = kernel.draft_block_inputs(**arguments)
    with pytest.raises(InvalidArgumentError, match=r"out\.seq_lens must be torch.int32"):
        kernel.draft_block_inputs(**arguments, out=out._replace(seq_lens=out.anchor_positions))
    with pytest.raises(InvalidArgumentError, match=r"out\.slots must be contiguous"):
        kernel.draft_block_inputs(
            **arguments, out=out._replace(slots=torch.zeros_like(out.slots.T.contiguous()).T)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 16, 64, 256])
def test_gpu_equals_the_reference(num_reqs: int, device: torch.device):
    rows = [(i % 100, i % 9, min(i % 9, i % 4)) for i in range(num_reqs)]
    arguments = make(rows, device, num_padding_rows=13)
    equal(kernel.draft_block_inputs(**arguments), reference.draft_block_inputs(**arguments))
