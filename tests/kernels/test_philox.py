"""Philox words and uniforms: published vectors, equality of kernel and twin, separate streams."""

from __future__ import annotations

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.kernels import philox as kernel
from extkv.reference import philox as reference

MODULES = pytest.mark.parametrize("philox", [kernel, reference], ids=["kernel", "reference"])


def signed(low: int, high: int) -> int:
    """Return two 32-bit words as one signed 64-bit number."""
    number = low | high << 32
    return number - 2**64 if number >= 2**63 else number


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Return the words, written as in the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def random_rows(num_rows: int, device: torch.device) -> list[torch.Tensor]:
    """Return seeds, positions and lanes."""
    generator = torch.Generator().manual_seed(num_rows)
    limits = [(-(2**63), 2**63 - 1), (0, 2**40), (0, 2**32)]
    return [
        torch.randint(low, high, (num_rows,), generator=generator).to(device)
        for low, high in limits
    ]


def test_plain_philox_gives_the_published_words():
    # Random123's known-answer file, philox4x32 with 10 rounds.
    assert plain_philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert plain_philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )
    assert plain_philox(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@MODULES
@pytest.mark.parametrize(
    ("counter", "key"),
    [
        ((0, 0, 0, 0), (0, 0)),
        ((0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)),
        ((0x243F6A88, 0x05A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)),
        ((5, 3, 17, 0), (42, 0)),
    ],
    ids=str,
)
def test_counter_is_lane_stream_position_and_key_is_the_seed(
    counter: tuple[int, ...], key: tuple[int, ...], philox, device: torch.device
):
    words = philox.philox_words(
        torch.tensor([signed(*key)], device=device),
        torch.tensor([signed(*counter[2:])], device=device),
        counter[1],
        torch.tensor([counter[0]], device=device),
    )
    assert tuple(words[0].tolist()) == plain_philox(counter, key)


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_kernel_equals_the_reference_bit_for_bit(num_rows: int, device: torch.device):
    rows = random_rows(num_rows, device)
    for stream in kernel.Stream:
        arguments = (rows[0], rows[1], stream, rows[2])
        assert torch.equal(kernel.philox_words(*arguments), reference.philox_words(*arguments))
        assert torch.equal(
            kernel.philox_uniforms(*arguments), reference.philox_uniforms(*arguments)
        )


def test_both_modules_number_the_streams_alike():
    assert [(s.name, s.value) for s in kernel.Stream] == [
        (s.name, s.value) for s in reference.Stream
    ]


def test_streams_positions_and_lanes_do_not_share_words():
    grid = torch.cartesian_prod(torch.arange(8), torch.arange(16), torch.arange(8))
    seeds, positions, lanes = grid.unbind(1)
    words = torch.cat(
        [reference.philox_words(seeds, positions, s, lanes) for s in reference.Stream]
    )
    assert len({tuple(row) for row in words.tolist()}) == 4 * 8 * 16 * 8


def test_uniforms_are_inside_the_open_interval():
    words = torch.tensor([0, 1, 511, 512, 2**32 - 512, 2**32 - 1])
    uniforms = (words >> 9).to(torch.float32).add(0.5).mul(2.0**-23)
    assert uniforms.tolist() == [2**-24, 2**-24, 2**-24, 3 * 2**-24, 1 - 2**-24, 1 - 2**-24]


def test_uniforms_fill_the_interval_evenly():
    rows = torch.arange(50_000)
    uniforms = reference.philox_uniforms(rows, rows * 0, 3, rows * 0)
    assert 0 < float(uniforms.min()) < float(uniforms.max()) < 1
    for column in uniforms.unbind(1):
        counts = torch.histc(column, 50, 0, 1)
        statistic = float(((counts - 1000) ** 2 / 1000).sum())
        assert statistic < 98  # 49 degrees of freedom, one in 50,000


@MODULES
def test_takes_strided_rows_and_writes_out(philox, device: torch.device):
    table = torch.stack(random_rows(5, device), dim=1)
    out = torch.full((5, 4), -1, device=device)
    found = philox.philox_words(table[:, 0], table[:, 1], 2, table[:, 2], out=out)
    assert found is out
    columns = [column.contiguous() for column in table.unbind(1)]
    assert torch.equal(out, reference.philox_words(columns[0], columns[1], 2, columns[2]))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3, dtype=torch.int32), "seeds must be torch.int64"),
        (1, torch.zeros(4, dtype=torch.int64), r"positions must have shape \[3\]"),
        (2, -1, "stream must be in"),
        (3, torch.zeros(3), "lanes must be torch.int64"),
    ],
    ids=["seeds", "positions", "stream", "lanes"],
)
def test_rejects_arguments_that_do_not_fit(
    index: int, value: object, message: str, device: torch.device
):
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    arguments = [zeros, zeros, 0, zeros]
    arguments[index] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.philox_words(*arguments)


@pytest.mark.gpu
def test_gpu_words_equal_the_cpu(device: torch.device):
    rows = random_rows(100_003, torch.device("cpu"))
    moved = [row.to(device) for row in rows]
    for stream in (0, 3):
        expected = reference.philox_words(rows[0], rows[1], stream, rows[2])
        assert torch.equal(
            kernel.philox_words(moved[0], moved[1], stream, moved[2]).cpu(), expected
        )
        expected = reference.philox_uniforms(rows[0], rows[1], stream, rows[2])
        assert torch.equal(
            kernel.philox_uniforms(moved[0], moved[1], stream, moved[2]).cpu(), expected
        )


@pytest.mark.parametrize("count", [0, 1, 24, 25])
def test_few_rows_give_the_words_of_many(count: int):
    generator = torch.Generator().manual_seed(count)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (2, 100), generator=generator)
    lanes = torch.randint(2**32, (100,), generator=generator)
    for stream in reference.Stream:
        many = reference.philox_words(seeds, positions, stream, lanes)
        few = [part[:count] for part in (seeds, positions, lanes)]
        words = reference.philox_words(few[0], few[1], stream, few[2])
        assert words.dtype == torch.int64
        assert torch.equal(words, many[:count])
        out = torch.empty(count, 4, dtype=torch.int64)
        assert reference.philox_words(few[0], few[1], stream, few[2], out=out) is out
        assert torch.equal(out, many[:count])
