"""Window index lists: the set is the block's, not each query's, and nothing past the limit."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import window_indices as kernel
from extkv.reference import window_indices as reference

MODULES = pytest.mark.parametrize("module", [kernel, reference], ids=["kernel", "reference"])


def make(anchors: list[int], device: torch.device, **changes):
    """Return arguments with distinct blocks."""
    generator = torch.Generator().manual_seed(len(anchors))
    table = torch.randperm(len(anchors) * 12, generator=generator).to(torch.int32)
    arguments = {
        "anchor_positions": torch.tensor(anchors, dtype=torch.int64),
        "block_table": table.view(len(anchors), 12),
        "window": 8,
        "num_queries": 4,
        "block_size": 16,
        "max_position": 192,
    } | changes
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@MODULES
def test_every_query_sees_the_window_before_the_anchor_and_the_whole_block(module, device):
    arguments = make([30], device)
    indices, lengths = module.window_indices(**arguments)
    table = arguments["block_table"][0].tolist()
    expected = [table[position // 16] * 16 + position % 16 for position in range(22, 34)]
    assert indices.shape == (4, 128)
    for query in range(4):
        assert indices[query, :12].tolist() == expected
        assert indices[query, 12:].unique().tolist() == [-1]
    assert lengths.tolist() == [12] * 4


@MODULES
@pytest.mark.parametrize(
    ("window", "num_queries", "anchor", "positions", "width"),
    [
        (128, 7, 200, range(72, 207), 256),
        (128, 7, 50, range(57), 256),
        (256, 1, 300, range(44, 301), 384),
    ],
    ids=["late", "early", "wide"],
)
def test_b107_lists_of_published_windows(  # noqa: PLR0917 parameters
    module, window, num_queries, anchor, positions, width, device
):
    arguments = make([anchor], device, window=window, num_queries=num_queries, max_position=4096)
    arguments["block_table"] = torch.arange(40, 0, -1, dtype=torch.int32, device=device)[None]
    indices, lengths = module.window_indices(**arguments)
    table = arguments["block_table"][0].tolist()
    expected = [table[position // 16] * 16 + position % 16 for position in positions]
    assert indices.shape == (num_queries, width)
    assert lengths.tolist() == [len(expected)] * num_queries
    for row in indices.tolist():
        assert row == expected + [-1] * (width - len(expected))


@MODULES
def test_early_anchors_see_all_positions_there_are(module, device):
    indices, lengths = module.window_indices(**make([0, 3, 8], device))
    assert lengths.view(3, 4).tolist() == [[4] * 4, [7] * 4, [12] * 4]
    assert (indices >= 0).sum(1).tolist() == lengths.tolist()


@MODULES
def test_padding_requests_see_nothing(module, device):
    indices, lengths = module.window_indices(**make([-1, 20], device))
    assert lengths.tolist() == [0] * 4 + [12] * 4
    assert indices[:4].unique().tolist() == [-1]


@MODULES
def test_positions_past_the_limit_or_the_table_are_left_out(module, device):
    _, lengths = module.window_indices(**make([98, 100, 300], device, max_position=100))
    assert lengths.view(3, 4)[:, 0].tolist() == [10, 8, 0]
    _, lengths = module.window_indices(**make([190], device, max_position=10_000))
    assert lengths.tolist() == [10] * 4


@pytest.mark.parametrize(
    ("window", "num_queries", "width"), [(8, 4, 128), (128, 5, 256), (0, 1, 128), (121, 7, 128)]
)
def test_equals_the_reference(window, num_queries, width, device):
    anchors = [0, 1, 127, 128, 130, 185, 191, -1]
    arguments = make(anchors, device, window=window, num_queries=num_queries)
    found = kernel.window_indices(**arguments)
    expected = reference.window_indices(**arguments)
    assert found[0].shape[1] == kernel.window_width(window, num_queries) == width
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@MODULES
def test_writes_wider_strided_buffers(module, device):
    arguments = make([30, 40], device)
    buffer = torch.full((8, 512), -5, dtype=torch.int32, device=device)
    out = (buffer[:, :384], torch.full((8,), -5, dtype=torch.int32, device=device))
    indices, lengths = module.window_indices(**arguments, out=out)
    expected = reference.window_indices(**arguments)
    assert indices is out[0]
    assert torch.equal(indices[:, :128], expected[0])
    assert indices[:, 128:].unique().tolist() == [-1]
    assert torch.equal(lengths, expected[1])
    assert buffer[:, 384:].unique().tolist() == [-5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchor_positions": torch.zeros(2, dtype=torch.int32)}, "must be torch.int64"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"shape \[2, any\]"),
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"num_queries": 0}, "num_queries must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_position": 0}, "max_position must be at least 1, got 0"),
        (
            {"out": (torch.zeros(8, 100, dtype=torch.int32), torch.zeros(8, dtype=torch.int32))},
            "at least 128 and a multiple of 128, got 100",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(changes, message: str, device: torch.device):
    arguments = make([1, 2], device, **changes)
    if "out" in arguments:
        arguments["out"] = tuple(tensor.to(device) for tensor in arguments["out"])
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.window_indices(**arguments)


@pytest.mark.gpu
def test_gpu_equals_the_reference(device: torch.device):
    anchors = [(37 * i) % 190 - (i % 13 == 0) for i in range(256)]
    arguments = make(anchors, device, window=128, num_queries=5)
    for found, expected in zip(
        kernel.window_indices(**arguments), reference.window_indices(**arguments), strict=True
    ):
        assert torch.equal(found, expected)
