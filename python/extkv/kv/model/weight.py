"""Weights as shapes: how many parameters they are, and how many bytes on one of several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCALE_BYTES = 4  # one float32 for each block of a block-wise quantised matrix


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored on the device.

    Attributes:
        item_bytes: Bytes of a parameter that is not quantised.
        quantized_item_bytes: Bytes of one in a quantised matrix; None where nothing is quantised.
        scale_block: Rows and columns that share a scale; None where scales are too few to count.
    """

    item_bytes: int
    quantized_item_bytes: int | None = None
    scale_block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Weight:
    """Equal tensors of one part of a model.

    Attributes:
        part: The row of the table that counts them: ``"attention"``, ``"experts"``, ....
        shape: Shape of one.
        count: How many there are.
        max_ranks: Ranks that they can be split over; 1 if every rank holds them whole, None for
            any number.
        is_quantized: Whether a quantised checkpoint quantises them.
    """

    part: str
    shape: tuple[int, ...]
    count: int = 1
    max_ranks: int | None = None
    is_quantized: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters in the whole model."""
        return self.count * math.prod(self.shape)

    def parameters_on_rank(self, num_ranks: int) -> int:
        """Return the parameters that one of `num_ranks` ranks holds."""
        return -(-self.num_parameters // self._num_parts(num_ranks))

    def bytes_on_rank(self, num_ranks: int, stored: WeightFormat) -> int:
        """Return the bytes that one of `num_ranks` ranks holds, scales included."""
        num_parameters = self.parameters_on_rank(num_ranks)
        if not self.is_quantized or stored.quantized_item_bytes is None:
            return num_parameters * stored.item_bytes
        scales = 0
        if stored.scale_block is not None:
            blocks = (-(-n // per) for n, per in zip(self.shape, stored.scale_block, strict=True))
            scales = -(-self.count * math.prod(blocks) // self._num_parts(num_ranks))
        return num_parameters * stored.quantized_item_bytes + scales * SCALE_BYTES

    def _num_parts(self, num_ranks: int) -> int:
        return num_ranks if self.max_ranks is None else min(num_ranks, self.max_ranks)


@dataclass(frozen=True)
class PartSize:
    """What one part of a model takes on a rank."""

    part: str
    num_parameters: int
    num_bytes: int


def linear(
    part: str,
    num_outputs: int,
    num_inputs: int,
    *,
    bias: bool = False,
    max_ranks: int | None = None,
) -> list[Weight]:
    """Return the matrix of a linear layer, which checkpoints may quantise, and its bias."""
    matrix = Weight(part, (num_outputs, num_inputs), max_ranks=max_ranks, is_quantized=True)
    return [matrix, Weight(part, (num_outputs,), max_ranks=max_ranks)] if bias else [matrix]


def sum_by_part(weights: list[Weight], num_ranks: int, stored: WeightFormat) -> list[PartSize]:
    """Add up what one rank holds of each part, in the order in which parts first appear."""
    totals: dict[str, tuple[int, int]] = {}
    for weight in weights:
        num_parameters, num_bytes = totals.get(weight.part, (0, 0))
        totals[weight.part] = (
            num_parameters + weight.parameters_on_rank(num_ranks),
            num_bytes + weight.bytes_on_rank(num_ranks, stored),
        )
    return [PartSize(part, *total) for part, total in totals.items()]
