"""Random lives of an ExtensibleTensor against a plain model of its bytes."""

from __future__ import annotations

import extkv
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

GRANULE = 64 << 10


class TensorMachine(RuleBasedStateMachine):
    """Grow, shrink, write, view and free; bytes and sizes agree with the model."""

    @initialize(
        num_segments=st.integers(1, 4),
        capacity=st.sampled_from([1, 1000, GRANULE, 3 * GRANULE // 2, 5 * GRANULE]),
        chunk=st.sampled_from([None, GRANULE]),
        growth=st.sampled_from(["exact", "geometric"]),
    )
    def make(self, num_segments: int, capacity: int, chunk: int | None, growth: str) -> None:
        self.free_before = extkv.memory_info("cpu").free
        self.tensor = extkv.ExtensibleTensor(
            capacity * num_segments, "cpu", num_segments, max_chunk_bytes=chunk, growth=growth
        )
        self.base = self.tensor.base_ptr
        self.model = [torch.empty(0, dtype=torch.uint8) for _ in range(num_segments)]
        self.views: list[tuple[torch.Tensor, int]] = []

    @rule(share=st.floats(0, 1), zero_new=st.booleans())
    def grow(self, share: float, zero_new: bool) -> None:
        capacity, old = self.tensor.segment_capacity_bytes, self.tensor.bytes_per_segment
        size = max(int(capacity * share), old)
        self.tensor.resize_per_segment_(size, zero_new=zero_new)
        for index in range(len(self.model)):
            new_bytes = self.tensor.segment(index)[old:].clone()
            assert not zero_new or not new_bytes.any()
            self.model[index] = torch.cat([self.model[index], new_bytes])

    @rule(share=st.floats(0, 1))
    def shrink(self, share: float) -> None:
        size = int(self.tensor.bytes_per_segment * share)
        committed = self.tensor.physical_bytes
        given_back = self.tensor.shrink_per_segment_(size)
        assert self.tensor.physical_bytes == committed - given_back
        self.model = [values[:size] for values in self.model]
        self.views = [(view, index) for view, index in self.views if view.numel() <= size]

    @rule(index=st.integers(0, 3), share=st.floats(0, 1), value=st.integers(0, 255))
    def write(self, index: int, share: float, value: int) -> None:
        index %= len(self.model)
        start = int(self.tensor.bytes_per_segment * share)
        self.tensor.segment(index)[start:] = value
        self.model[index] = self.model[index].clone()
        self.model[index][start:] = value

    @rule(index=st.integers(0, 3))
    def take_view(self, index: int) -> None:
        index %= len(self.model)
        self.views.append((self.tensor.segment(index), index))

    @precondition(lambda self: self.views)
    @rule()
    def drop_view(self) -> None:
        self.views.pop(0)

    @invariant()
    def bytes_and_sizes_agree(self) -> None:
        assert self.tensor.base_ptr == self.base
        assert self.tensor.num_bytes == sum(values.numel() for values in self.model)
        for index, values in enumerate(self.model):
            assert torch.equal(self.tensor.segment(index), values)
        for view, index in self.views:
            assert torch.equal(view, self.model[index][: view.numel()])
        stats = self.tensor.stats()
        assert stats.num_views == len(self.views)
        assert stats.committed_bytes - stats.logical_bytes == stats.rounding_bytes >= 0

    def teardown(self) -> None:
        if not hasattr(self, "tensor"):
            return
        self.tensor.free()
        self.views.clear()
        assert extkv.memory_info("cpu").free == self.free_before


TestTensorMachine = TensorMachine.TestCase


@given(
    capacity=st.integers(1, 8 * GRANULE),
    num_segments=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 8 * GRANULE), max_size=4),
)
def test_committed_granules_are_exactly_those_that_hold_committed_bytes(
    capacity: int, num_segments: int, sizes: list[int]
) -> None:
    tensor = extkv.ExtensibleTensor(capacity * num_segments, "cpu", num_segments, growth="exact")
    for size in sorted(min(size, capacity) for size in sizes):
        tensor.resize_per_segment_(size)
        granules: set[int] = set()
        for segment in range(num_segments):
            start = segment * capacity
            granules.update(range(start // GRANULE, -(-(start + size) // GRANULE) if size else 0))
        assert tensor.physical_bytes == len(granules) * GRANULE
    tensor.free()
